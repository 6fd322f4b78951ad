"""Means over prompts against numpy over maps that were measured one by one, and their
files.
"""

import dataclasses
import gc
import math
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from scipy import stats

import tiny
import tl_coupling as tlc
from random_matrices import haar
from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.measures import MEASURES

K = 5
PROMPTS = ["w3 w14 w15 w92", "w65 w35", "w89 w79 w3 w2 w3 w8", "w46 w26 w43"]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.fixture(scope="module")
def maps(model) -> list[CouplingMap]:
    return [tlc.depth_coupling(tlc.trace(model, prompt), K) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def mean(model) -> MeanCouplingMap:
    return tlc.mean_depth_coupling((tlc.trace(model, prompt) for prompt in PROMPTS), K)


def test_methods_are_the_values_of_their_measures(mean):
    for measure in (
        "coupling",
        "normalized_miscoupling",
        "miscoupling",
        "spectral_miscoupling",
        "captured_energy",
    ):
        assert torch.equal(mean.values(measure=measure), getattr(mean, measure)(K))
    for measure, p in (("released_norm", 2), ("released_trace", 1)):
        released = mean.spectral_miscoupling(K, p=p, absolute=True)
        assert torch.equal(mean.values(measure=measure), released)


@pytest.mark.parametrize("measure", MEASURES)
def test_means_and_spreads_are_numpys(maps, mean, measure):
    off = ~np.eye(tiny.N_LAYERS, dtype=bool)
    for k in range(1, K + 1):
        values = np.stack(
            [of_prompt.values(k, measure).double().numpy() for of_prompt in maps]
        )
        np.testing.assert_allclose(
            mean.values(k, measure), values.mean(0), atol=2e-6, rtol=1e-5
        )
        np.testing.assert_allclose(
            mean.spread(k, measure), values.std(0, ddof=1), atol=2e-6, rtol=1e-3
        )
        of_prompts = values[:, off].mean(1)
        assert mean.mean(k, measure) == pytest.approx(
            of_prompts.mean(), abs=2e-6, rel=1e-5
        )
        assert mean.spread_of_mean(k, measure) == pytest.approx(
            of_prompts.std(ddof=1), abs=2e-6, rel=1e-3
        )
        assert mean.mean(k, measure, off_diagonal=False) == pytest.approx(
            values.mean(), abs=2e-6, rel=1e-5
        )
        nulls = [of_prompt.null(k, measure) for of_prompt in maps]
        assert mean.null(k, measure) == pytest.approx(np.mean(nulls), rel=1e-5)
        profiles = np.stack(
            [of_prompt.locality_profile(k, measure).numpy() for of_prompt in maps]
        )
        np.testing.assert_allclose(
            mean.locality_profile(k, measure), profiles.mean(0), atol=2e-6, rtol=1e-5
        )
    of_own_pairs = [
        of_prompt.values(3, measure).double().diagonal().mean() for of_prompt in maps
    ]
    own = np.mean(of_own_pairs)
    n = tiny.N_LAYERS
    null = ((n - 1) * mean.null(3, measure) + own) / n
    assert mean.null(3, measure, off_diagonal=False) == pytest.approx(
        null, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("quantity", ["map", "trace"])
def test_two_models_under_one_label_are_not_averaged(
    model, maps, tokenizer_folder, quantity
):
    second_model = tiny.bridge(tiny.huggingface_model("llama", 1), tokenizer_folder)
    trace = tlc.trace(second_model, PROMPTS[1])
    message = (
        "must be of one model.* two models of different weights are both called '.*': "
        "take each alone"
    )
    of_maps = partial(MeanCouplingMap.over, [maps[0], tlc.depth_coupling(trace, K)])
    traces = [tlc.trace(model, PROMPTS[0]), trace]
    of_traces = partial(tlc.mean_depth_coupling, traces, K)
    with pytest.raises(ValueError, match=message):
        (of_maps if quantity == "map" else of_traces)()


@pytest.mark.parametrize("fact", ["hooks", "part", "quantization", "fixed"])
def test_maps_that_were_made_in_different_ways_are_not_averaged(maps, fact):
    first, second = maps[:2]
    made_otherwise = dataclasses.replace(
        second, provenance=second.provenance | {fact: "another"}
    )
    with pytest.raises(ValueError, match=f"the same {fact}, got .* and 'another'"):
        MeanCouplingMap.over([first, made_otherwise])


def test_a_model_is_itself_in_another_dtype(maps, tokenizer_folder):
    """Its weights are the same numbers there."""
    model = tiny.bridge(tiny.huggingface_model("llama").double(), tokenizer_folder)
    in_double = tlc.depth_coupling(tlc.trace(model, PROMPTS[1]), K)
    assert (
        in_double.provenance["weights_digest"] == maps[0].provenance["weights_digest"]
    )


def test_what_lies_behind_the_values(maps, mean):
    for name in ("singular_values", "frobenius_norms"):
        expected = np.mean(
            [getattr(of_prompt, name).numpy() for of_prompt in maps], axis=0
        )
        np.testing.assert_allclose(getattr(mean, name), expected, rtol=1e-5)
    np.testing.assert_allclose(
        mean.at(3),
        np.mean([of_prompt.at(3).abs().numpy() for of_prompt in maps], axis=0),
        atol=1e-6,
    )
    assert (mean.k, mean.n_prompts, mean.kind, mean.orientation) == (
        K,
        len(PROMPTS),
        "depth",
        "ujv",
    )
    assert mean.row_layers == mean.col_layers == (0, 1)
    # The last token, of prompts of different lengths.
    assert mean.row_positions == mean.col_positions == (-1, -1)
    assert mean.provenance["prompts"] == PROMPTS
    assert mean.provenance["model"] == maps[0].provenance["model"]
    assert not {"prompt", "tokens", "str_tokens", "position"} & set(mean.provenance)
    for part in (
        "MeanCouplingMap",
        f"k≤{K}",
        "n_prompts=4",
        f"at k={K}: mean coupling {mean.mean():.3f}",
    ):
        assert part in repr(mean)


def test_the_same_position_of_prompts_of_different_lengths(model):
    result = tlc.mean_depth_coupling(
        [tlc.trace(model, prompt) for prompt in PROMPTS], 2, 1
    )
    assert result.row_positions == (1, 1)
    shifted = [tlc.depth_coupling(tlc.trace(model, PROMPTS[0]), 2, t) for t in (1, 2)]
    with pytest.raises(ValueError, match="must be of the same positions"):
        MeanCouplingMap.over(shifted)


def test_one_map_at_a_time_is_in_memory(maps):
    alive = []

    def one_by_one():
        for i in range(6):
            # Else they would be of one prompt.
            tokens = {"tokens": [i, 1, 2], "input_digest": str(i)}
            copy = dataclasses.replace(maps[0], provenance=maps[0].provenance | tokens)
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1
            alive.append(weakref.ref(copy))
            yield copy
            del copy

    result = MeanCouplingMap.over(one_by_one())
    assert len(alive) == result.n_prompts == 6
    np.testing.assert_allclose(result.coupling(), maps[0].coupling(), atol=1e-6)
    np.testing.assert_allclose(result.spread(), 0, atol=1e-7)


def test_one_prompt_has_no_spread(maps):
    of_one_prompt = MeanCouplingMap.over(maps[:1])
    np.testing.assert_allclose(
        of_one_prompt.coupling(3), maps[0].coupling(3), atol=1e-6
    )
    assert of_one_prompt.spread().isnan().all()
    assert np.isnan(of_one_prompt.spread_of_mean())


def test_tokens_of_prompts_of_one_length(model):
    traces = [tlc.trace(model, prompt) for prompt in ("w1 w2 w3", "w4 w5 w6")]
    maps = [tlc.self_coupling(trace, 0, 1, k=3) for trace in traces]
    expected = np.mean([of_prompt.coupling().numpy() for of_prompt in maps], axis=0)
    result = MeanCouplingMap.over(maps)
    np.testing.assert_allclose(result.coupling(), expected, atol=1e-6)
    assert result.row_positions == (0, 1, 2)
    # No pair of one connection with itself: every pair counts.
    assert result.spread_of_mean() == pytest.approx(
        np.std([of_prompt.mean() for of_prompt in maps], ddof=1), rel=1e-3
    )


def test_save_and_load(mean, tmp_path):
    path = mean.save(tmp_path / "mean.nc")
    for loaded in (MeanCouplingMap.load(path), CouplingMap.load(path)):
        assert type(loaded) is MeanCouplingMap
        for field in dataclasses.fields(mean):
            read = getattr(loaded, field.name)
            written = getattr(mean, field.name)
            if isinstance(read, torch.Tensor):
                assert torch.equal(read, written)
            else:
                assert read == written
    with xarray.open_dataset(path) as data:
        drawn = data["means"].sel(measure="coupling", k=3)
        np.testing.assert_array_equal(drawn, mean.coupling(3))


def test_a_mean_of_an_earlier_version_holds_fewer_measures(mean, tmp_path):
    path = mean.save(tmp_path / "mean.nc")
    with xarray.load_dataset(path) as data:
        # Which wrote no digest.
        del data.attrs["digest"]
        data.isel(measure=slice(5)).to_netcdf(path)
    loaded = MeanCouplingMap.load(path)
    assert torch.equal(loaded.spectral_miscoupling(2), mean.spectral_miscoupling(2))
    with pytest.raises(
        ValueError, match="an earlier version, without 'released_norm': measure again"
    ):
        loaded.values(2, "released_norm")


def test_the_interval_of_a_mean_is_no_narrower_than_that_of_a_prompt(maps, mean):
    """A model's frames may be the same on all prompts."""
    low, high = mean.null_interval(3)
    low_of_one, high_of_one = maps[0].null_interval(3)
    assert high_of_one - low_of_one == pytest.approx(high - low, rel=0.1)


@pytest.mark.parametrize("n_layers", [2, 5])
def test_the_interval_holds_means_over_prompts_of_one_set_of_frames(n_layers):
    """Each layer of a model of chance has frames that all its prompts share, and a
    spectrum that they don't: 150 models, four prompts each, by numpy alone.
    """
    rng = np.random.default_rng(0)
    k, d, n_prompts = 4, 16, 4
    inside = []
    for seed in range(150):
        frames = [(haar(d, rng), haar(d, rng)) for _ in range(n_layers)]
        maps = []
        means = []
        for _ in range(n_prompts):
            scales = rng.uniform(0.8, 1.2, d) * np.geomspace(1, 0.1, d)
            J = np.stack([(U * np.sort(scales)[::-1]) @ V.T for U, V in frames])
            if seed == 0:
                J_1 = torch.from_numpy(J)
                maps.append(tlc.comparisons.jacobian_coupling(J_1, k))
            A = np.stack(
                [U[:, :k].T @ J @ V[:, :k] for U, V in frames],
                1,
            )
            off = np.linalg.norm(A * (1 - np.eye(k)), axis=(-2, -1))
            coupling = 1 - off / np.linalg.norm(A, axis=(-2, -1))
            means.append(coupling[~np.eye(n_layers, dtype=bool)].mean())
        if seed == 0:
            low, high = MeanCouplingMap.over(maps).null_interval(k)
        inside.append(low < np.mean(means) < high)
    assert np.mean(inside) > 0.92


def of_all_pairs(J, U, V):
    """Coupling of every pair, by numpy: rows are the J_1, columns the frames."""
    A = U.transpose(0, 2, 1) @ J[:, None] @ V
    off = np.linalg.norm(A * (1 - np.eye(A.shape[-1])), axis=(-2, -1))
    return 1 - off / np.linalg.norm(A, axis=(-2, -1))


def frames_of(J, k):
    """The top singular vectors of each, by numpy."""
    U, _, Vh = np.linalg.svd(J)
    return U[..., :k], Vh[:, :k].transpose(0, 2, 1)


def haar_frames(shape, rng):
    """Uniform orthogonal matrices, by numpy."""
    Q, R = np.linalg.qr(rng.normal(size=(*shape, shape[-1])))
    return Q * np.sign(np.diagonal(R, axis1=-2, axis2=-1))[..., None, :]


@pytest.mark.parametrize("within", ["pairs", "spans"])
@pytest.mark.parametrize("same_frames", [True, False])
def test_the_interval_within_spans_is_that_of_frames_turned_by_numpy(
    within, same_frames
):
    """Where all prompts have the same frames, the interval has the quantiles of means
    with random turns; where they have not, it has 95 % of them or more.
    """
    rng = np.random.default_rng(0)
    n_layers, k, d, n_prompts = 4, 3, 12, 3
    first = rng.normal(size=(n_layers, d, d))
    J = [
        # Coupling does not depend on the scale of a layer.
        first * rng.uniform(0.5, 2, (n_layers, 1, 1))
        if same_frames
        else first + rng.normal(size=first.shape)
        for _ in range(n_prompts)
    ]
    maps = [tlc.comparisons.jacobian_coupling(torch.from_numpy(x), k) for x in J]
    mean = MeanCouplingMap.over(maps, within_ks=[k])
    low, high = mean.null_interval(k, within=within)
    frames = [frames_of(x, k) for x in J]
    different = ~np.eye(n_layers, dtype=bool)
    turned_means = []
    for _ in range(1500):
        # All prompts of a layer are turned alike.
        left, right = haar_frames((2, n_layers, k), rng)
        if within == "pairs":
            right = left
        prompt_means = [
            of_all_pairs(x, U @ left, V @ right)[different].mean()
            for x, (U, V) in zip(J, frames, strict=True)
        ]
        turned_means.append(np.mean(prompt_means))
    inside = np.mean([low < value < high for value in turned_means])
    if same_frames:
        expected = np.quantile(turned_means, [0.025, 0.975])
        width = expected[1] - expected[0]
        np.testing.assert_allclose([low, high], expected, atol=0.08 * width)
        # As wide as that of one prompt: it is the same draw of frames.
        low_of_one, high_of_one = maps[0].null_interval(k, within=within)
        assert high - low == pytest.approx(high_of_one - low_of_one, rel=0.1)
    else:
        assert inside >= 0.95
    measured = np.mean(
        [
            of_all_pairs(x, U, V)[different].mean()
            for x, (U, V) in zip(J, frames, strict=True)
        ]
    )
    share = np.mean(np.array(turned_means) >= measured)
    p = mean.null_p(k, within=within)
    # Further from chance, the p of what may rise and fall together is nearer to .5.
    assert abs(p - 0.5) <= abs(share - 0.5) + 0.05


@pytest.mark.parametrize("n_layers", [2, 4])
def test_prompts_of_one_set_of_frames_rarely_have_a_small_p(n_layers):
    """Models of chance by numpy, four prompts each: p is no smaller for their number."""
    rng = np.random.default_rng(1)
    k, d, n_prompts = 3, 12, 4
    ps = []
    for _ in range(60):
        frames = [(haar(d, rng), haar(d, rng)) for _ in range(n_layers)]
        maps = []
        for _ in range(n_prompts):
            S = np.sort(rng.uniform(0.8, 1.2, d) * np.geomspace(1, 0.1, d))[::-1]
            J = np.stack([(U * S) @ V.T for U, V in frames])
            maps.append(tlc.comparisons.jacobian_coupling(torch.from_numpy(J), k))
        ps.append(MeanCouplingMap.over(maps).null_p(k))
    share = np.mean(np.array(ps) < 0.1)
    assert share < 0.1 + 3 * math.sqrt(0.1 * 0.9 / len(ps))
    # And not always 1.
    assert 0.2 < np.median(ps) < 0.8


def test_nulls_within_spans_are_means_over_the_prompts(maps, tmp_path):
    mean = MeanCouplingMap.over(maps, within_ks=[3, 2])
    loaded = CouplingMap.load(mean.save(tmp_path / "mean.nc"))
    for measure in ("coupling", "spectral_miscoupling"):
        for within in ("spans", "pairs"):
            for k in (2, 3):
                nulls = [of_one.null(k, measure, within=within) for of_one in maps]
                null = mean.null(k, measure, within=within)
                assert null == pytest.approx(np.mean(nulls), rel=1e-5)
                assert loaded.null(k, measure, within=within) == null
                assert loaded.chance(k, measure, within=within) == mean.chance(
                    k, measure, within=within
                )
    with pytest.raises(
        ValueError, match=r"at k in \[3, 2\], got within='pairs' at k = 4"
    ):
        mean.null(4, within="pairs")
    with pytest.raises(ValueError, match="holds 800 draws, got `n_draws=50`"):
        mean.null_interval(2, within="pairs", n_draws=50)
    with pytest.raises(ValueError, match=rf"`k` must lie in \[1, {K}\]"):
        MeanCouplingMap.over(maps, within_ks=[K + 1])


def test_tokens_have_no_null_within_spans(model):
    trace = tlc.trace(model, PROMPTS[2])
    with pytest.raises(ValueError, match="are of maps at one token, got means over"):
        tlc.mean_depth_coupling([trace], K, "all", within_ks=[2])


def test_a_mean_says_its_p_and_which_test(mean, maps):
    for result, prompts in ((mean, ", all prompts as one draw"), (maps[0], "")):
        test = f"random subspaces, one-sided{prompts}"
        p = result.null_p(3)
        assert result.table([3]).caption.endswith(f": {p:.2g} (k = 3); {test}")


def test_a_map_of_one_prompt_is_no_mean(maps, mean, tmp_path):
    path = maps[0].save(tmp_path / "map.nc")
    with pytest.raises(
        ValueError, match=r"is not a file that `MeanCouplingMap\.save` wrote"
    ):
        MeanCouplingMap.load(path)
    with pytest.raises(ValueError, match=r"is not a file that `Influence\.save` wrote"):
        tlc.influence.Influence.load(mean.save(path))


def test_what_has_no_mean(maps, mean):
    vju = dataclasses.replace(maps[1], orientation="vju")
    of_other_model = dataclasses.replace(
        maps[1], provenance=maps[1].provenance | {"model": "other"}
    )
    for wrong_maps, message in (
        ([], "wanted at least one"),
        ([maps[0], vju], "same orientation, got 'ujv' and 'vju'"),
        ([maps[0], of_other_model], "same model, got .* and 'other'"),
        ([maps[0], mean], "map of one prompt, got MeanCouplingMap"),
    ):
        with pytest.raises(ValueError, match=message):
            MeanCouplingMap.over(wrong_maps)
    with pytest.raises(ValueError, match="holds p=2 and absolute=False"):
        mean.spectral_miscoupling(2, p=1)
    for ask in (mean.null, mean.null_interval, mean.null_p):
        with pytest.raises(
            ValueError,
            match="holds the null 'space' only, got within='pairs' at k = 2: give `within_ks",
        ):
            ask(2, within="pairs")
    with pytest.raises(ValueError, match=rf"`k` must lie in \[1, {K}\]"):
        mean.spread(K + 1)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("wrong", [["one text", "another"], "a text", [3], {"a": 1}])
def test_what_is_no_trace_is_one_line_that_says_what_to_do(wrong):
    with pytest.raises(
        TypeError,
        match=r"`traces` must be an iterable of traces, got (str|int): trace the prompts",
    ) as error:
        tlc.mean_depth_coupling(wrong, 2)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("as_a_user")
def test_several_traces_have_a_function_of_their_own(tiny_trace):
    for traces in ([tiny_trace], (trace for trace in [tiny_trace])):
        with pytest.raises(
            TypeError, match=r"`trace` must be a .*Trace, got .*`mean_depth_coupling"
        ) as error:
            tlc.depth_coupling(traces, 2)
        assert "\n" not in str(error.value)
    with pytest.raises(
        TypeError, match=r"`traces` must be .*, got Trace: `depth_coupling"
    ):
        tlc.mean_depth_coupling(tiny_trace, 2)


def test_a_narrow_model_takes_what_fits_and_says_so(tiny_trace):
    with pytest.warns(
        UserWarning, match="width 32: k = 32 is used in place of the default, 50"
    ) as warned:
        assert tlc.depth_coupling(tiny_trace).k == tiny.D_MODEL
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="k = 32 is used"):
        assert tlc.self_coupling(tiny_trace, 0).k == tiny.D_MODEL
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 32\].*got 50"):
        tlc.depth_coupling(tiny_trace, k=50)


def test_bars(model, tiny_trace, capfd, monkeypatch):
    seen = []

    def progress(items):
        for item in items:
            seen.append(type(item).__name__)
            yield item

    tlc.mean_depth_coupling(
        (tlc.trace(model, prompt) for prompt in PROMPTS), 2, progress=progress
    )
    assert seen == ["Trace"] * len(PROMPTS)
    shown = []
    monkeypatch.setattr(
        tlc.progress, "tqdm", lambda items, desc, **_: shown.append(desc) or items
    )
    for terminal, bars in ((False, []), (True, ["Jacobians"])):
        monkeypatch.setattr(
            "sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False
        )
        tlc.depth_coupling(tiny_trace, 2)
        assert shown == bars
        shown.clear()
    tlc.block_jacobians(tiny_trace)
    tlc.mean_depth_coupling([tiny_trace], 2)
    tlc.depth_coupling(tiny_trace, 2, progress=False)
    assert shown == ["Jacobians", "prompts"]


def test_the_spread_is_drawn(mean, maps):
    from tl_coupling.plots import plot_spread

    ax = plot_spread(mean, k=3)
    np.testing.assert_allclose(ax.images[0].get_array(), mean.spread(3))
    assert "standard deviation over 4 prompts" in ax.images[0].colorbar.ax.get_ylabel()
    with pytest.raises(ValueError, match="at least two prompts"):
        plot_spread(MeanCouplingMap.over(maps[:1]))


@pytest.mark.usefixtures("as_a_user")
def test_what_is_not_a_prompts_map_is_refused(maps, mean):
    of_prompt = maps[0]
    for several in ([mean, mean], [of_prompt, mean], [1]):
        with pytest.raises(ValueError, match="the coupling map of one prompt, got"):
            MeanCouplingMap.over(several)
    normalised = dataclasses.replace(
        of_prompt, provenance=of_prompt.provenance | {"final_norm": True}
    )
    with pytest.raises(ValueError, match="the same final_norm, got False and True"):
        MeanCouplingMap.over([of_prompt, normalised])
    for options in ({"foo": 1}, {"p": 2}):
        with pytest.raises(ValueError, match="map by map"):
            mean.values(3, "coupling", **options)


def test_measures_are_read_by_their_names_in_any_order(mean, tmp_path):
    path = mean.save(tmp_path / "mean.nc")
    with xarray.open_dataset(path, engine="netcdf4") as file:
        swapped = file.load().isel(measure=[4, 3, 2, 1, 0])
    # As of a version that wrote none.
    del swapped.attrs["digest"]
    swapped.to_netcdf(tmp_path / "swapped.nc", engine="netcdf4")
    loaded = CouplingMap.load(tmp_path / "swapped.nc")
    for name in swapped["measure"].values:
        assert torch.equal(loaded.values(3, str(name)), mean.values(3, str(name)))
        assert torch.equal(loaded.spread(3, str(name)), mean.spread(3, str(name)))
        assert loaded.null(3, str(name)) == mean.null(3, str(name))


@pytest.mark.usefixtures("as_a_user")
def test_measures_without_names_of_their_own_are_refused(mean, tmp_path):
    dataset = mean.to_dataset()
    names = dataset["measure"].values
    twice = dataset.assign_coords(measure=[names[0], *names[:-1]])
    nameless = dataset.drop_vars("measure")
    for number, damaged in enumerate((twice, nameless)):
        path = tmp_path / f"{number}.nc"
        damaged.to_netcdf(path, engine="netcdf4")
        with pytest.raises(ValueError, match="is not a file that"):
            CouplingMap.load(path)


def test_the_interval_is_that_of_a_t_test_over_prompts(model) -> None:
    texts = ["w3 w14 w15", "w9 w2 w6 w5", "w8 w7 w1", "w4 w4 w2 w1 w9"]
    maps = [tlc.depth_coupling(tlc.trace(model, text), k=4) for text in texts]
    mean = tlc.mean_of_maps(maps)
    values = [result.mean(2) for result in maps]
    expected = stats.t.interval(
        0.95, len(values) - 1, np.mean(values), stats.sem(values)
    )
    assert mean.interval(2) == pytest.approx(expected, rel=1e-5)
    assert all(map(math.isnan, tlc.mean_of_maps(maps[:1]).interval()))


def test_a_mean_of_saved_maps_is_that_of_the_prompts(model, tmp_path: Path) -> None:
    texts = ["w3 w14 w15", "w9 w2 w6 w5"]
    traces = [tlc.trace(model, text) for text in texts]
    paths = [
        tlc.depth_coupling(trace, k=4).save(tmp_path / f"{i}.nc")
        for i, trace in enumerate(traces)
    ]
    saved = tlc.mean_of_maps(map(tlc.CouplingMap.load, paths))
    measured = tlc.mean_depth_coupling(traces, k=4)
    assert torch.equal(saved.coupling(), measured.coupling())
    assert saved.interval() == measured.interval()
    assert saved.provenance["prompts"] == measured.provenance["prompts"]


def test_all_pairs_have_a_spread_and_an_interval_as_well(mean, maps) -> None:
    of_prompts = [result.mean(2, off_diagonal=False) for result in maps]
    by_map = mean.by_map(2, off_diagonal=False)
    np.testing.assert_allclose(by_map, of_prompts, rtol=1e-5)
    spread = mean.spread_of_mean(2, off_diagonal=False)
    assert spread == pytest.approx(np.std(of_prompts, ddof=1), rel=1e-4)
    expected = stats.t.interval(
        0.95, len(maps) - 1, np.mean(of_prompts), stats.sem(of_prompts)
    )
    assert mean.interval(2, off_diagonal=False) == pytest.approx(expected, rel=1e-4)
    assert mean.interval(2, off_diagonal=False) != mean.interval(2)


def test_a_short_table_says_what_the_methods_give(mean, maps) -> None:
    intervals = {3: mean.null_interval(3, off_diagonal=False)}
    table = mean.table([1, 3], off_diagonal=False, null_intervals=intervals)
    assert [row[0] for row in table.rows] == ["1", "3"]
    for k, coupling, null in table.rows:
        low, high = mean.interval(int(k), off_diagonal=False)
        spread = mean.spread_of_mean(int(k), off_diagonal=False)
        value = mean.mean(int(k), off_diagonal=False)
        assert coupling == f"{value:.3f} ± {spread:.3f} [{low:.3f}, {high:.3f}]"
        assert null == f"{mean.null(int(k), off_diagonal=False):.3f}"
        p = mean.null_p(int(k), off_diagonal=False)
        assert f"{p:.2g} (k = {k})" in table.caption
    low, high = intervals[3]
    assert f"{low:.3f} to {high:.3f} (k = 3)" in table.caption
    assert "k = 1 says nothing: a 1 × 1 matrix is diagonal" in table.caption
    assert f"{len(maps)} prompts" in table.caption
    of_one_prompt = maps[0].table([3])
    assert of_one_prompt.rows[0][1] == f"{maps[0].mean(3):.3f}"
    low, high = maps[0].null_interval(3)
    assert f"{low:.3f} to {high:.3f} (k = 3)" in of_one_prompt.caption


def test_the_table_of_a_mean_has_its_spread(mean: MeanCouplingMap) -> None:
    table = mean.to_dataframe([1, 3])
    of_three = table[table["k"] == 3]
    n_rows, n_cols = mean.coupling().shape
    values = of_three["coupling"].to_numpy().reshape(n_rows, n_cols)
    spreads = of_three["spread"].to_numpy().reshape(n_rows, n_cols)
    assert values == pytest.approx(mean.coupling(3).numpy())
    assert spreads == pytest.approx(mean.spread(3).numpy(), nan_ok=True)
    assert set(table["n_prompts"]) == {mean.n_prompts}


@pytest.mark.parametrize("position", ["all", [3, 1, -1], range(1, 6)])
def test_a_mean_over_tokens_is_that_of_one_call_for_each(model, position) -> None:
    """By numpy, over maps that were measured one by one."""
    trace = tlc.trace(model, PROMPTS[2])
    mean = tlc.depth_coupling(trace, K, position)
    positions = range(trace.n_pos) if position == "all" else list(position)
    maps = [tlc.depth_coupling(trace, K, t) for t in positions]
    for k in (1, 3, K):
        values = np.stack([of_token.coupling(k).numpy() for of_token in maps])
        np.testing.assert_allclose(mean.coupling(k), values.mean(0), atol=1e-6)
        np.testing.assert_allclose(
            mean.spread(k), values.std(0, ddof=1), atol=1e-6, rtol=1e-4
        )
        of_tokens = [of_token.mean(k) for of_token in maps]
        np.testing.assert_allclose(mean.by_map(k), of_tokens, atol=1e-6)
        assert mean.mean(k) == pytest.approx(np.mean(of_tokens), abs=1e-6)
    assert mean.provenance["positions"] == [t % trace.n_pos for t in positions]
    assert mean.provenance["prompt"] == PROMPTS[2]
    # Tokens of one prompt are not independent.
    assert mean.n_prompts == 1
    assert all(map(math.isnan, mean.interval(3)))


def test_prompts_count_once_each_with_the_mean_over_their_tokens(
    model, tmp_path: Path
) -> None:
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS]
    mean = tlc.mean_depth_coupling(traces, K, position="all")
    of_prompts = []
    for trace in traces:
        maps = [tlc.depth_coupling(trace, K, t) for t in range(trace.n_pos)]
        of_prompts.append(np.mean([of_token.mean(3) for of_token in maps]))
    np.testing.assert_allclose(mean.by_map(3), of_prompts, atol=1e-6)
    assert mean.n_prompts == len(PROMPTS)
    expected = stats.t.interval(
        0.95, len(PROMPTS) - 1, np.mean(of_prompts), stats.sem(of_prompts)
    )
    assert mean.interval(3) == pytest.approx(expected, rel=1e-4)
    paths = [
        tlc.depth_coupling(trace, K, "all").save(tmp_path / f"{i}.nc")
        for i, trace in enumerate(traces)
    ]
    saved = tlc.mean_of_maps(map(tlc.CouplingMap.load, paths))
    assert torch.equal(saved.coupling(), mean.coupling())
    # Maps of one token are not means over all.
    last = tlc.depth_coupling(traces[0], K)
    with pytest.raises(ValueError, match="the same is_mean_over_tokens"):
        tlc.mean_of_maps([last, tlc.CouplingMap.load(paths[1])])


def test_a_mean_over_tokens_says_so_and_is_compared(model) -> None:
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS[:2]]
    means = [tlc.depth_coupling(trace, K, position="all") for trace in traces]
    ax = tlc.plot_coupling(means[0], k=3)
    assert "mean over 4 tokens" in ax.get_title() + ax.figure.get_suptitle()
    assert "token 3" not in ax.get_title()
    ax = tlc.plots.plot_spread(means[0], k=3)
    assert "standard deviation over 4 tokens" in ax.images[0].colorbar.ax.get_ylabel()
    last = [tlc.depth_coupling(trace, K) for trace in traces]
    comparison = tlc.compare(last, means, 3, paired=True)
    differences = [b.mean(3) - a.mean(3) for a, b in zip(last, means, strict=True)]
    assert comparison.mean_difference == pytest.approx(np.mean(differences), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position": []}, r"at least one token, each once, got \[\]"),
        ({"position": [1, 1]}, r"each once, got \[1, 1\]"),
        ({"position": [0, 99]}, r"must lie in \[-4, 3\]"),
        ({"position": "last"}, '`position` must be "all", got'),
        ({"position": "all", "rows": [0]}, "`rows` and `cols` are for a single"),
    ],
)
def test_positions_that_cannot_be_are_refused(model, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.depth_coupling(tlc.trace(model, PROMPTS[0]), K, **arguments)


def test_one_trace_serves_all_tokens(model) -> None:
    """The model runs once, for the trace."""
    trace = tlc.trace(model, PROMPTS[2])
    runs = []
    handle = model.register_forward_pre_hook(lambda *_: runs.append(1))
    try:
        tlc.depth_coupling(trace, K, position="all")
    finally:
        handle.remove()
    assert not runs


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_a_map_of_unknown_weights_hides_no_others_that_differ(
    model, maps, tokenizer_folder, order
) -> None:
    """One without a digest, as of a streamed model, agrees with both of two models."""
    other = tiny.bridge(tiny.huggingface_model("llama", 1), tokenizer_folder)
    unknown = dataclasses.replace(
        maps[0], provenance=maps[0].provenance | {"weights_digest": None}
    )
    several = [
        unknown,
        maps[1],
        tlc.depth_coupling(tlc.trace(other, PROMPTS[2]), K),
    ]
    shuffled = [several[i] for i in order]
    message = "two models of different weights are both called"
    with pytest.raises(ValueError, match=message):
        tlc.mean_of_maps(shuffled)
    with pytest.raises(ValueError, match=message):
        tlc.compare(shuffled, maps, 2)
    assert tlc.mean_of_maps([unknown, maps[1]]).n_prompts == 2


def test_traces_of_unknown_weights_hide_no_others_that_differ(
    model, tokenizer_folder
) -> None:
    other = tiny.bridge(tiny.huggingface_model("llama", 1), tokenizer_folder)
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS[:2]]
    traces.append(tlc.trace(other, PROMPTS[2]))
    traces[0].provenance["weights_digest"] = None
    with pytest.raises(ValueError, match="two models of different weights"):
        tlc.prompt_coupling(traces, k=2)


@pytest.mark.parametrize("name", ["matrices", "singular_values", "frobenius_norms"])
def test_a_map_that_is_not_finite_has_no_mean_and_no_null(maps, name) -> None:
    """Norms are in nulls alone, where NaN was taken for a pair without one."""
    tensor = getattr(maps[0], name).clone()
    tensor.view(-1)[0] = math.nan
    planted = dataclasses.replace(maps[0], **{name: tensor})
    for call in (
        lambda: tlc.mean_of_maps([planted, maps[1]]),
        lambda: planted.null(measure="captured_energy"),
        planted.to_dataframe,
    ):
        with pytest.raises(ValueError, match="NaN or infinite entries") as error:
            call()
        assert "\n" not in str(error.value)


def test_means_of_two_classes_of_prompts_have_titles_of_their_own(maps, model):
    first = MeanCouplingMap.over(maps[:2])
    second = MeanCouplingMap.over(maps[2:])
    ending = "mean over pairs of different layers and prompts, {}"
    assert first.table().title.endswith(ending.format("“w3 w14 w15 w92”, “w65 w35”"))
    assert second.table().title.endswith(
        ending.format("“w89 w79 w3 w2 w3 w8”, “w46 w26 w43”")
    )
    of_all = MeanCouplingMap.over(maps)
    assert of_all.table().title.endswith(
        ending.format("“w3 w14 w15 w92” … “w46 w26 w43”")
    )


def test_prompts_of_token_ids_are_named_in_a_mean(model):
    prompts = ([3, 14, 15], [92, 65])
    by_ids = tlc.mean_depth_coupling([tlc.trace(model, ids) for ids in prompts], k=2)
    assert by_ids.provenance["prompts"] == ["w3w14w15", "w92w65"]
    hf_model = tiny.huggingface_model("llama")
    wordless = tlc.mean_depth_coupling(
        [tlc.trace(hf_model, ids) for ids in prompts], k=2
    )
    # Without a tokenizer there are only numbers.
    assert wordless.provenance["prompts"] == ["3 14 15", "92 65"]
