"""Depth coupling of a four-layer model against a naive transcription of the paper, and
what its result can do.
"""

import dataclasses
import itertools
import json
import math
import warnings

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from coupling_maps import MEASURES, assert_same
from random_matrices import haar
from tl_coupling import measures
from tl_coupling.blocks import BlockFunction
from tl_coupling.comparisons import CouplingMap

N_LAYERS, K = 4, 6
# Of all tokens the widest least gap between singular values (.011 of the norm): where
# two lie closer, rounding turns their vectors by more than is allowed here.
MIDDLE, LAST = 5, len(tiny.TOKENS) - 1


@pytest.fixture(scope="module")
def deep(tokenizer_folder) -> tuple[tlc.Trace, dict[int, np.ndarray]]:
    """A four-layer model's trace, and by position its Jacobians by plain autograd,
    `[n_layers d d]` in float64.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "N_LAYERS", N_LAYERS)
        patch.setitem(tiny.CONFIGS["llama"], "num_hidden_layers", N_LAYERS)
        hf_model = tiny.huggingface_model("llama")
        trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
        J = {
            t: np.stack(
                [
                    tiny.oracle_jacobian(hf_model, tiny.TOKENS, layer, t, t)
                    .double()
                    .numpy()
                    for layer in range(N_LAYERS)
                ]
            )
            for t in (MIDDLE, LAST)
        }
    return trace, J


@pytest.fixture(scope="module")
def result(deep) -> CouplingMap:
    return tlc.depth_coupling(deep[0], k=K)


def naive(
    J_1: np.ndarray, J_2: np.ndarray, k: int, orientation: str
) -> dict[str, np.ndarray | float]:
    """The paper's formulae for one pair, nothing shared between pairs and no k cut from
    another.
    """
    U, _, Vh = np.linalg.svd(J_2)
    s = np.linalg.svd(J_1)[1][:k]
    U, V = U[:, :k], Vh[:k].T
    A = U.T @ J_1 @ V if orientation == "ujv" else V.T @ J_1 @ U
    off = A - np.diag(np.diag(A))
    m = np.linalg.norm(off) / np.linalg.norm(A)
    return {
        "A": A,
        "coupling": 1 - m,
        "normalized_miscoupling": m,
        "miscoupling": np.linalg.norm(off),
        "spectral_miscoupling": np.linalg.norm(A - np.diag(s)) / np.linalg.norm(s),
        "trace, absolute": np.linalg.norm(np.abs(A) - np.diag(s)) / s.sum(),
        "captured_energy": np.linalg.norm(A) / np.linalg.norm(s),
    }


def naive_map(
    J: np.ndarray, layers: list[int], k: int, orientation: str = "ujv"
) -> dict[str, np.ndarray]:
    pairs = [
        [naive(J[row], J[col], k, orientation) for col in layers] for row in layers
    ]
    return {
        name: np.array([[pair[name] for pair in row] for row in pairs])
        for name in pairs[0][0]
    }


def assert_map(
    result: CouplingMap, J: np.ndarray, layers: list[int], k: int, orientation: str
) -> None:
    expected = naive_map(J, layers, k, orientation)
    A = result.at(k).numpy()
    # Singular vectors have their signs in pairs: |A| and its diagonal do not depend on
    # them.
    np.testing.assert_allclose(np.abs(A), np.abs(expected["A"]), atol=3e-5)
    np.testing.assert_allclose(
        np.diagonal(A, axis1=2, axis2=3),
        np.diagonal(expected["A"], axis1=2, axis2=3),
        atol=3e-5,
    )
    for measure in MEASURES:
        np.testing.assert_allclose(
            result.values(k, measure), expected[measure], atol=3e-5
        )
    values = result.values(k, "spectral_miscoupling", p=1.0, absolute=True)
    np.testing.assert_allclose(values, expected["trace, absolute"], atol=3e-5)


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
@pytest.mark.parametrize(
    ("position", "t", "layers", "chosen"),
    [
        (-1, LAST, None, [0, 1, 2, 3]),
        (MIDDLE, MIDDLE, None, [0, 1, 2, 3]),
        (MIDDLE - len(tiny.TOKENS), MIDDLE, [-1, 0, 2], [3, 0, 2]),
        (LAST, LAST, range(1, 3), [1, 2]),
        (LAST, LAST, (2,), [2]),
    ],
)
def test_depth_coupling_is_the_naive_transcription(
    deep, position, t, layers, chosen, orientation
):
    trace, J = deep
    result = tlc.depth_coupling(trace, K, position, orientation, layers=layers)
    assert result.matrices.shape == (len(chosen), len(chosen), K, K)
    assert result.row_layers == result.col_layers == tuple(chosen)
    assert result.row_positions == result.col_positions == (t,) * len(chosen)
    assert (result.kind, result.orientation, result.d_model, result.k) == (
        "depth",
        orientation,
        tiny.D_MODEL,
        K,
    )
    sigma = np.linalg.svd(J[t][chosen], compute_uv=False)
    np.testing.assert_allclose(result.singular_values, sigma[:, :K], rtol=1e-5)
    np.testing.assert_allclose(
        result.frobenius_norms, np.sqrt((sigma**2).sum(1)), rtol=1e-5
    )
    for k in range(1, K + 1):
        assert_map(result, J[t], chosen, k, orientation)


def test_rows_and_columns_are_not_interchanged(deep):
    """Row: the Jacobian; column: whose singular vectors. The map is far from symmetric,
    so a transpose would show.
    """
    J = deep[1][LAST]
    expected = naive_map(J, [0, 1, 2, 3], K)["spectral_miscoupling"]
    assert np.abs(expected - expected.T).max() > 1e-2


def test_the_whole_spectrum(deep):
    trace, J = deep
    result = tlc.depth_coupling(trace, tiny.D_MODEL)
    np.testing.assert_allclose(result.captured_energy(), 1, atol=1e-5)
    expected = naive_map(J[LAST], [0, 1, 2, 3], tiny.D_MODEL)["miscoupling"]
    np.testing.assert_allclose(result.miscoupling(), expected, rtol=1e-5, atol=3e-5)


def test_a_layer_with_itself_is_coupled_fully(result):
    own = torch.diagonal(result.matrices, dim1=0, dim2=1).permute(2, 0, 1)
    torch.testing.assert_close(
        own, torch.diag_embed(result.singular_values), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        torch.diagonal(result.coupling()), torch.ones(N_LAYERS), rtol=0, atol=1e-5
    )


def test_one_a_serves_every_smaller_k(deep, result):
    assert torch.equal(result.at(), result.matrices)
    for k in (1, 3, K):
        again = tlc.depth_coupling(deep[0], k)
        torch.testing.assert_close(
            again.matrices.abs(), result.at(k).abs(), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            again.coupling(), result.coupling(k), rtol=0, atol=1e-5
        )
        assert again.mean() == pytest.approx(result.mean(k), abs=1e-5)
        for measure in MEASURES:
            assert again.null(measure=measure) == pytest.approx(
                result.null(k, measure), abs=1e-5
            )


def test_two_orientations_from_the_same_jacobians(deep, monkeypatch):
    trace, calls, original = deep[0], [], BlockFunction.jacobians

    def spy(block, *args):
        calls.append(block.layer)
        return original(block, *args)

    monkeypatch.setattr(BlockFunction, "jacobians", spy)
    both = tlc.comparisons.depth_coupling_by_orientation(
        trace, K, MIDDLE, layers=[2, 0], chunk_size=7
    )
    assert calls == [2, 0]
    assert list(both) == ["ujv", "vju"]
    for orientation, one in both.items():
        single = tlc.depth_coupling(
            trace, K, MIDDLE, orientation, layers=[2, 0], chunk_size=7
        )
        assert_same(one, single)
    assert list(
        tlc.comparisons.depth_coupling_by_orientation(trace, 2, orientations=["vju"])
    ) == ["vju"]
    assert tlc.depth_coupling(trace, 2).orientation == "ujv"


def test_chunk_size_changes_nothing(deep):
    trace = deep[0]
    all_layers = tlc.block_jacobians(trace)
    for chunk_size in (1, 5, tiny.D_MODEL, 10**6):
        torch.testing.assert_close(
            tlc.block_jacobians(trace, chunk_size=chunk_size),
            all_layers,
            rtol=0,
            atol=1e-6,
        )
        values = tlc.depth_coupling(trace, K, chunk_size=chunk_size).coupling()
        torch.testing.assert_close(
            values, tlc.depth_coupling(trace, K).coupling(), rtol=0, atol=1e-5
        )


def test_progress_wraps_the_loop_over_jacobians(deep):
    seen = []

    def progress(numbers):
        for number in numbers:
            yield number
            seen.append(number)

    tlc.depth_coupling(deep[0], 2, layers=[3, 1], progress=progress)
    assert seen == [0, 1]


def test_mean_with_and_without_the_diagonal(result):
    for measure, options in [
        *((m, {}) for m in MEASURES),
        ("spectral_miscoupling", {"p": 1.0, "absolute": True}),
    ]:
        values = result.values(4, measure, **options).double().numpy()
        off = [
            values[i, j]
            for i, j in itertools.product(range(N_LAYERS), repeat=2)
            if i != j
        ]
        assert result.mean(4, measure, off_diagonal=False, **options) == pytest.approx(
            values.mean(), abs=1e-6
        )
        assert result.mean(4, measure, **options) == pytest.approx(
            np.mean(off), abs=1e-6
        )
    assert result.mean() == result.mean(K, "coupling", off_diagonal=True)


def test_what_the_mean_leaves_out_is_named_by_layer_and_position(result):
    """Also where the same connection stands in another place of the grid, or the same
    layer at another token.
    """
    values = result.coupling()
    shifted = dataclasses.replace(result, col_layers=(1, 0, 2, 3))
    keep = [
        (i, j)
        for i, j in itertools.product(range(4), repeat=2)
        if (0, 1, 2, 3)[i] != (1, 0, 2, 3)[j]
    ]
    assert shifted.mean() == pytest.approx(
        float(np.mean([values[pair] for pair in keep])), abs=1e-6
    )
    elsewhere = dataclasses.replace(result, kind="self", col_positions=(0, 1, 2, 3))
    assert elsewhere.mean() == pytest.approx(float(values.mean()), abs=1e-6)


def test_a_single_layer_has_no_mean_off_the_diagonal(deep):
    one = tlc.depth_coupling(deep[0], 2, layers=[1])
    assert one.mean(off_diagonal=False) == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="off_diagonal=False"):
        one.mean()
    assert "mean coupling 1.000" in repr(one)


@pytest.mark.parametrize("layers", [None, [3, 1], [0, 3], [2, 2, 0]])
def test_locality_profile_is_the_loop(deep, layers):
    result = tlc.depth_coupling(deep[0], K, layers=layers)
    chosen = result.row_layers
    for measure, options in (
        ("coupling", {}),
        ("spectral_miscoupling", {"absolute": True}),
    ):
        values = result.values(3, measure, **options).double().numpy()
        by_distance = {}
        for i, j in itertools.product(range(len(chosen)), repeat=2):
            by_distance.setdefault(abs(chosen[i] - chosen[j]), []).append(values[i, j])
        profile = result.locality_profile(3, measure, **options)
        expected = [
            np.mean(by_distance.get(d, [math.nan])) for d in range(max(by_distance) + 1)
        ]
        np.testing.assert_allclose(profile, expected, atol=1e-6)


def test_null_is_the_mean_over_the_rows(deep, result):
    sigma, d = np.linalg.svd(deep[1][LAST], compute_uv=False), tiny.D_MODEL
    norm = np.sqrt((sigma**2).sum(1))
    for k in (2, K):
        length, trace = np.sqrt((sigma[:, :k] ** 2).sum(1)), sigma[:, :k].sum(1)
        squared = (k * norm / d) ** 2 + length**2
        assert result.null(k) == pytest.approx(1 - math.sqrt(1 - 1 / k))
        assert result.null(k, "normalized_miscoupling") == pytest.approx(
            math.sqrt(1 - 1 / k)
        )
        assert result.null(k, "miscoupling") == pytest.approx(
            np.mean(math.sqrt(k * k - k) * norm / d), rel=1e-5
        )
        assert result.null(k, "captured_energy") == pytest.approx(
            np.mean(k * norm / d / length), rel=1e-5
        )
        null = result.null(k, "spectral_miscoupling")
        assert null == pytest.approx(np.mean(np.sqrt(squared) / length), rel=1e-5)
        null = result.null(k, "spectral_miscoupling", p=1.0)
        assert null == pytest.approx(np.mean(np.sqrt(squared) / trace), rel=1e-5)
    assert result.null() == result.null(K, "coupling")


def test_absolute_null_is_what_random_frames_give(deep, result):
    J = torch.from_numpy(deep[1][LAST])
    Q, R = torch.linalg.qr(
        torch.randn(
            2,
            10_000,
            tiny.D_MODEL,
            K,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
    )
    U, V = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = []
    for J_1 in J:
        s = torch.linalg.svdvals(J_1)[:K]
        distance = ((U.mT @ J_1 @ V).abs() - torch.diag(s)).norm(dim=(1, 2))
        rows.append(float(distance.square().mean().sqrt() / s.norm()))
    assert result.null(measure="spectral_miscoupling", absolute=True) == pytest.approx(
        np.mean(rows), rel=3e-3
    )


def test_values_by_name(result):
    assert torch.equal(
        result.values(3, "released_norm"), result.spectral_miscoupling(3, 2, True)
    )
    assert torch.equal(
        result.values(3, "released_trace"), result.spectral_miscoupling(3, 1, True)
    )
    for measure in ("coupling", "released_trace"):
        with pytest.raises(
            ValueError, match=f"options of 'spectral_miscoupling', not of '{measure}'"
        ):
            result.values(3, measure, p=1)
    for measure in MEASURES:
        assert torch.equal(result.values(3, measure), getattr(result, measure)(3))
        assert torch.equal(result.values(measure=measure), getattr(result, measure)())
    absolute = result.values(3, "spectral_miscoupling", p=1.0, absolute=True)
    assert torch.equal(absolute, result.spectral_miscoupling(3, 1.0, True))
    assert not torch.equal(absolute, result.spectral_miscoupling(3))
    with pytest.raises(TypeError, match="absolut"):
        result.values(3, "spectral_miscoupling", absolut=True)


@pytest.mark.parametrize("measure", measures.MEASURES)
def test_null_follows_the_choice_of_the_diagonal(result, measure):
    """Of all 16 pairs, 12 are left to chance; a layer with itself keeps its value."""
    own = float(result.values(4, measure).diagonal().sum())
    expected = (12 * result.null(4, measure) + own) / 16
    assert result.null(4, measure, off_diagonal=False) == pytest.approx(
        expected, rel=1e-6
    )
    means = [result.mean(4, measure, off_diagonal=off) for off in (True, False)]
    assert means[1] == pytest.approx((12 * means[0] + own) / 16, rel=1e-6)
    low, high = result.null_interval(4, measure, n_draws=20)
    expected = [(12 * end + own) / 16 for end in (low, high)]
    assert result.null_interval(
        4, measure, n_draws=20, off_diagonal=False
    ) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("within", ["spans", "pairs"])
def test_nulls_within_the_spans_are_those_of_rotated_vectors(deep, within):
    """The singular vectors themselves are turned, and A is made anew from the
    Jacobians: numpy alone.
    """
    k, J = 3, deep[1][LAST]
    result, rng = (
        tlc.comparisons.jacobian_coupling(torch.from_numpy(J), k),
        np.random.default_rng(0),
    )
    tops = [(U[:, :k], Vh[:k].T) for U, _, Vh in map(np.linalg.svd, J)]
    squares = []
    for _ in range(1500):
        A = np.zeros((len(J), len(J), k, k))
        for col, (U, V) in enumerate(tops):
            Q, R = haar(k, rng), haar(k, rng)
            A[:, col] = (U @ Q).T @ J @ (V @ (Q if within == "pairs" else R))
        off = np.linalg.norm(A * (1 - np.eye(k)), axis=(-2, -1)) ** 2
        squares.append([off, off / np.linalg.norm(A, axis=(-2, -1)) ** 2])
    is_off_diagonal = ~np.eye(len(J), dtype=bool)
    for measure, sampled in zip(
        ("miscoupling", "normalized_miscoupling"), np.mean(squares, 0), strict=True
    ):
        assert result.null(k, measure, within=within) == pytest.approx(
            np.sqrt(sampled)[is_off_diagonal].mean(), rel=0.01
        )
    low, high = result.null_interval(k, within=within)
    assert low < 1 - np.sqrt(squares)[:, 1][:, is_off_diagonal].mean() < high


def test_an_interval_of_the_null_holds_what_is_drawn(deep):
    """Maps whose columns have random singular vectors, of layers that are one map and
    of unrelated ones.
    """
    rng, k, d = np.random.default_rng(1), 3, 24
    jacobian = haar(d, rng) * np.geomspace(1, 0.05, d) @ haar(d, rng)
    unrelated = np.stack(
        [haar(d, rng) * np.geomspace(1, 0.05, d) @ haar(d, rng) for _ in range(5)]
    )
    is_off_diagonal, widths = ~np.eye(5, dtype=bool), []
    for J in (np.stack([jacobian] * 5), unrelated):
        result = tlc.comparisons.jacobian_coupling(torch.from_numpy(J), k)
        low, high = result.null_interval(k, n_draws=1000)
        means = []
        for _ in range(400):
            frames = [(haar(d, rng)[:, :k], haar(d, rng)[:, :k]) for _ in range(5)]
            A = np.stack([U.T @ J @ V for U, V in frames], 1)
            m = np.linalg.norm(A * (1 - np.eye(k)), axis=(-2, -1)) / np.linalg.norm(
                A, axis=(-2, -1)
            )
            means.append(1 - m[is_off_diagonal].mean())
        inside = np.mean([low < mean < high for mean in means])
        widths.append(np.diff(np.quantile(means, (0.025, 0.975)))[0] / (high - low))
        assert inside > 0.92, inside
    # As narrow as can be where all rows have the same vectors.
    assert 0.85 < widths[0] < 1.15
    assert widths[1] < 0.8


def test_intervals_by_distance_hold_profiles_of_unrelated_layers():
    """Layers with Haar-random vectors, whose matrices are made anew; the interval of
    each distance is that of the profile, or wider.
    """
    k, d, layers = 3, 24, (0, 1, 2, 4, 5)
    rng = np.random.default_rng(2)
    spectrum = np.geomspace(1, 0.05, d)
    profiles = []
    for _ in range(400):
        U, V = ([haar(d, rng) for _ in layers] for _ in range(2))
        pair_values: dict[int, list[float]] = {}
        for row, col in itertools.permutations(range(len(layers)), 2):
            A = U[col][:, :k].T @ (U[row] * spectrum) @ V[row].T @ V[col][:, :k]
            coupling = 1 - np.linalg.norm(A - np.diag(np.diag(A))) / np.linalg.norm(A)
            distance = abs(layers[row] - layers[col])
            pair_values.setdefault(distance, []).append(coupling)
        profiles.append({d: np.mean(values) for d, values in pair_values.items()})
    J = np.stack([(u * spectrum) @ v.T for u, v in zip(U, V, strict=True)])
    result = tlc.comparisons.jacobian_coupling(torch.from_numpy(J), k)
    result = dataclasses.replace(result, row_layers=layers, col_layers=layers)
    intervals = result.null_interval_by_distance(n_draws=1000)
    assert intervals.isnan().all(1).tolist() == [True] + [False] * 5
    for distance in range(1, 6):
        low, high = intervals[distance].tolist()
        drawn = np.array([profile[distance] for profile in profiles])
        assert np.mean((low < drawn) & (drawn < high)) > 0.92
        narrowest, widest = 0.9, 1.5
        width = np.diff(np.quantile(drawn, (0.025, 0.975)))[0]
        assert narrowest < (high - low) / width < widest


@pytest.mark.parametrize(
    ("within", "measure"),
    [("space", "coupling"), ("space", "released_norm"), ("pairs", "coupling")],
)
def test_an_interval_of_the_null_hardly_depends_on_its_draws(deep, within, measure):
    """By default its ends are known to a twentieth of the width, its middle better."""
    result = tlc.comparisons.jacobian_coupling(torch.from_numpy(deep[1][LAST]), 4)
    ends = np.array(
        [
            result.null_interval(4, measure, within=within, seed=seed)
            for seed in range(4)
        ]
    )
    width = np.diff(ends).mean()
    assert ends.std(0, ddof=1).max() < width / 20


@pytest.mark.parametrize(("k", "mean"), [(2, 1 / 3), (10, 0.05155)])
def test_an_interval_of_the_null_lies_around_the_mean_of_random_subspaces(k, mean):
    """Of forty layers with slow spectra it is narrow, and lies around the mean, not the
    root mean square.
    """
    rng = np.random.default_rng(0)
    spectrum = np.geomspace(1, 0.7, 100)
    J = np.stack([haar(100, rng) * spectrum @ haar(100, rng) for _ in range(40)])
    result = tlc.comparisons.jacobian_coupling(torch.from_numpy(J), k)
    low, high = result.null_interval(k)
    assert (low + high) / 2 == pytest.approx(mean, abs=(high - low) / 20)


def test_undefined_pairs_are_counted_and_left_out_of_the_mean(deep):
    J = torch.from_numpy(deep[1][LAST]).clone()
    J[1] = 0
    with pytest.warns(UserWarning, match="k = 3 is above the rank of layer 1"):
        result = tlc.comparisons.jacobian_coupling(J, 3)
    with (
        pytest.warns(
            UserWarning,
            match="coupling is undefined for 3 of 12 pairs, .* the mean is over the others",
        ),
        pytest.warns(UserWarning, match="the measure is undefined there"),
    ):
        mean = result.mean()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = result.coupling().numpy()
    assert mean == pytest.approx(np.nanmean(values[~np.eye(N_LAYERS, dtype=bool)]))
    with (
        pytest.warns(UserWarning, match="undefined for 12 of 12 pairs, .* is 0: NaN"),
        pytest.warns(UserWarning, match="the measure is undefined there"),
    ):
        assert math.isnan(
            dataclasses.replace(result, matrices=0 * result.matrices).mean()
        )


def test_jacobians_at_hand_are_compared_as_those_of_a_trace(deep):
    J = tlc.block_jacobians(deep[0])
    for orientation in ("ujv", "vju"):
        expected = tlc.depth_coupling(deep[0], K, orientation=orientation)
        got = tlc.comparisons.jacobian_coupling(
            J, K, orientation, provenance=deep[0].provenance
        )
        torch.testing.assert_close(
            got.coupling(), expected.coupling(), atol=1e-5, rtol=1e-5
        )
        assert (got.row_layers, got.kind, got.orientation) == (
            expected.row_layers,
            "depth",
            orientation,
        )
        assert got.provenance["model"] == expected.provenance["model"]
    for bad, message in (
        (J[:0], "`J` is empty"),
        (J[:1, :5, :5], r"`k` must lie in \[1, 5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tlc.comparisons.jacobian_coupling(bad, K)
    with pytest.raises(ValueError, match="must name the 4 rows"):
        tlc.comparisons.jacobian_coupling(J, K, layers=[0, 1])


@pytest.mark.parametrize("k", [0, -1, K + 1])
def test_k_that_the_result_does_not_hold(result, k):
    for method in (
        result.at,
        result.coupling,
        result.values,
        result.mean,
        result.locality_profile,
    ):
        with pytest.raises(ValueError, match=rf"`k` must lie in \[1, {K}\].*got {k}"):
            method(k)


def test_null_for_a_k_that_the_result_does_not_hold(result):
    with pytest.raises(ValueError, match=rf"`k` must lie in \[1, {K}\]"):
        result.null(K + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"`k` must lie in \[1, 32\].*got 0"),
        ({"k": -3}, r"`k` must lie in \[1, 32\].*got -3"),
        ({"k": 33}, r"`k` must lie in \[1, 32\].*got 33"),
        ({"k": 50}, r"`k` must lie in \[1, 32\].*got 50"),
        ({"k": 2, "layers": []}, "`layers` is empty"),
        (
            {"k": 2, "layers": [0, 4]},
            r"`layer` must lie in \[-4, 3\] for this 4-block model, got 4",
        ),
        ({"k": 2, "layers": [-5]}, r"`layer` must lie in \[-4, 3\].*got -5"),
        (
            {"k": 2, "position": 8},
            r"`position` must lie in \[-8, 7\] for this 8-token prompt, got 8",
        ),
        ({"k": 2, "position": -9}, r"`position` must lie in \[-8, 7\].*got -9"),
        ({"k": 2, "chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
    ],
)
def test_bad_arguments_have_one_clear_error_before_any_jacobian(
    deep, options, message, monkeypatch
):
    if "chunk_size" not in options:
        monkeypatch.setattr(
            BlockFunction,
            "jacobians",
            lambda *_: pytest.fail("a Jacobian was computed"),
        )
    for function in (tlc.depth_coupling, tlc.comparisons.depth_coupling_by_orientation):
        with pytest.raises(ValueError, match=message) as error:
            function(deep[0], **options)
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("as_a_user")
def test_unknown_orientation(deep):
    for orientation in ("uvj", "UJV", "", None):
        for call in (
            lambda o=orientation: tlc.depth_coupling(deep[0], 2, orientation=o),
            lambda o=orientation: tlc.comparisons.depth_coupling_by_orientation(
                deep[0], 2, orientations=["ujv", o]
            ),
            lambda o=orientation: tlc.coupling_matrix(
                torch.eye(2), tlc.svd(torch.eye(2)), 1, o
            ),
        ):
            with pytest.raises(
                ValueError,
                match=f'`orientations?` must be "ujv" or "vju", got {orientation!r}',
            ):
                call()


@pytest.mark.usefixtures("as_a_user")
def test_unknown_measure(result):
    for call in (result.values, result.mean, result.null, result.locality_profile):
        with pytest.raises(
            ValueError,
            match=r"`measure` must be one of coupling, .*captured_energy, .*, got 'at'",
        ):
            call(2, "at")


def test_a_cut_inside_a_repeated_singular_value_warns_and_names_the_layer(
    deep, monkeypatch
):
    repeated = torch.diag(torch.tensor([3.0, 2.0, 2.0, *[1.0] * (tiny.D_MODEL - 3)]))
    distinct = torch.diag(torch.linspace(3, 1, tiny.D_MODEL))

    def stand_in(block, *_):
        return (repeated if block.layer == 2 else distinct)[None], "full_sequence"

    monkeypatch.setattr(BlockFunction, "jacobians", stand_in)
    with pytest.warns(
        UserWarning, match="σ_2 and σ_3 are equal to rounding in layer 2, token 7:"
    ):
        tlc.depth_coupling(deep[0], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tlc.depth_coupling(deep[0], 3)
        tlc.depth_coupling(deep[0], 2, layers=[0, 1, 3])


def test_a_zero_jacobian_is_nan_with_a_warning_and_only_where_it_is(deep, monkeypatch):
    J = torch.randn(
        tiny.D_MODEL, tiny.D_MODEL, generator=torch.Generator().manual_seed(0)
    )

    def stand_in(block, *_):
        return (J * (block.layer != 1))[None], "full_sequence"

    monkeypatch.setattr(BlockFunction, "jacobians", stand_in)
    with pytest.warns(UserWarning, match="k = 6 is above the rank of layer 1, token 7"):
        result = tlc.depth_coupling(deep[0], K)
    for measure in (
        "coupling",
        "normalized_miscoupling",
        "spectral_miscoupling",
        "captured_energy",
    ):
        with pytest.warns(UserWarning, match="undefined there"):
            values = result.values(measure=measure)
        assert values.isnan().nonzero()[:, 0].unique().tolist() == [1]
        assert int(values.isnan().sum()) == N_LAYERS
    assert result.miscoupling()[1].tolist() == [0] * N_LAYERS


def test_provenance_says_how(deep):
    trace = deep[0]
    result = tlc.depth_coupling(trace, 2, MIDDLE, layers=[-1, 1])
    assert result.provenance["position"] == MIDDLE
    assert set(result.provenance["paths"]) == {
        f"layer 3, token {MIDDLE}",
        f"layer 1, token {MIDDLE}",
    }
    assert {key: result.provenance[key] for key in trace.provenance} == trace.provenance
    assert json.loads(json.dumps(result.provenance)) == result.provenance
    assert "position" not in trace.provenance


def test_repr_says_what_it_is(result):
    text = repr(result)
    assert "\n" not in text
    for part in (
        "depth",
        "local/tiny",
        "4×4",
        f"k≤{K}",
        "ujv",
        f"{result.mean():.3f}",
        f"null {result.null():.3f}",
    ):
        assert part in text


def test_repr_where_a_layer_was_chosen_twice(deep):
    assert "2×2" in repr(tlc.depth_coupling(deep[0], 2, layers=[1, 1]))


@pytest.mark.long("measures SmolLM2")
def test_the_embedded_model_against_the_authors_algorithm(smollm2, reference):
    trace = tlc.trace(smollm2, reference["prompt"], final_norm=True)
    assert trace.tokens.tolist() == reference["token_ids"]
    both = tlc.comparisons.depth_coupling_by_orientation(trace, k=50)
    ujv, vju = both["ujv"], both["vju"]
    np.testing.assert_allclose(
        ujv.singular_values[:, :10], reference["sigma"], rtol=0, atol=1e-4
    )
    assert set(reference["coupling"]) == {"10", "30", "50"}
    for k, expected in reference["coupling"].items():
        got = {
            "ujv_norm": ujv.spectral_miscoupling(int(k), p=2.0, absolute=True),
            "ujv_trace": ujv.spectral_miscoupling(int(k), p=1.0, absolute=True),
            "vju_norm": vju.spectral_miscoupling(int(k), p=2.0, absolute=True),
            "m": ujv.miscoupling(int(k)),
            "m_normalized": ujv.normalized_miscoupling(int(k)),
        }
        assert set(got) == set(expected)
        for name, values in got.items():
            assert values.shape == (30, 30)
            np.testing.assert_allclose(
                values, expected[name], rtol=0, atol=1e-4, err_msg=f"{name}, K = {k}"
            )


@pytest.mark.parametrize(
    ("rows", "cols"), [([1], None), (None, [3, 0]), ([2, -1], [1])]
)
def test_some_rows_and_columns_are_a_part_of_the_map(deep, result, rows, cols):
    part = tlc.depth_coupling(deep[0], K, rows=rows, cols=cols)
    chosen_rows = [layer % N_LAYERS for layer in rows or range(N_LAYERS)]
    chosen_cols = [layer % N_LAYERS for layer in cols or range(N_LAYERS)]
    assert part.row_layers == tuple(chosen_rows)
    assert part.col_layers == tuple(chosen_cols)
    expected = result.matrices[chosen_rows][:, chosen_cols]
    torch.testing.assert_close(part.matrices.abs(), expected.abs(), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        part.coupling(3), result.coupling(3)[chosen_rows][:, chosen_cols]
    )
    assert part.frobenius_norms == pytest.approx(result.frobenius_norms[chosen_rows])


def test_layers_beside_rows_are_refused(deep):
    with pytest.raises(ValueError, match="give `layers`, for rows and columns, or"):
        tlc.depth_coupling(deep[0], layers=[1], rows=[1])
    with pytest.raises(ValueError, match="`cols` is empty"):
        tlc.depth_coupling(deep[0], 4, rows=[1], cols=[])


def test_jacobians_with_a_gradient_are_compared_as_numbers(deep):
    """Such as `training.jacobians` gives."""
    J = tlc.block_jacobians(deep[0])
    expected = tlc.comparisons.jacobian_coupling(J, K)
    for given in (J.requires_grad_(), 1 * J):
        got = tlc.comparisons.jacobian_coupling(given, K)
        assert torch.equal(got.matrices, expected.matrices)
        assert not got.matrices.requires_grad
        assert got.mean() == expected.mean()
