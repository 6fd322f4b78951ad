"""Coupling maps in files: exact, whole or not at all, and one clear error for anything
else.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from scipy import stats

import tiny
import tl_coupling as tlc
from coupling_maps import MEASURES, assert_same
from made_up_results import random_map
from tl_coupling.comparisons import CouplingMap


@pytest.fixture(scope="module")
def result(tiny_trace: tlc.Trace) -> CouplingMap:
    return tlc.depth_coupling(tiny_trace, k=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_path", [str, Path])
def test_save_and_load_are_exact(tiny_trace, tmp_path, dtype, as_path):
    result = tlc.comparisons.depth_coupling_by_orientation(
        tiny_trace, 6, 3, layers=[1, 0]
    )["vju"]
    odd = {
        "prompt": 'Ġ "quoted"\n☃',
        "nothing": None,
        "nested": {"a": [1, 2.5, True]},
        "long": "x" * 100_000,
    }
    result = dataclasses.replace(
        result,
        matrices=result.matrices.to(dtype),
        singular_values=result.singular_values.to(dtype),
        frobenius_norms=result.frobenius_norms.to(dtype),
        provenance=result.provenance | odd,
    )
    path = tmp_path / "map.nc"
    assert result.save(as_path(path)) == path
    loaded = CouplingMap.load(as_path(path))
    assert_same(loaded, result)
    assert repr(loaded) == repr(result)
    for measure in MEASURES:
        assert torch.equal(loaded.values(3, measure), result.values(3, measure))
        assert loaded.null(3, measure) == result.null(3, measure)
    assert [p.name for p in tmp_path.iterdir()] == ["map.nc"]


def test_what_is_not_finite_survives_the_file(result, tmp_path):
    matrices = result.matrices.clone()
    matrices[0, 1, 0, 0] = float("nan")
    matrices[0, 1, 0, 1] = float("inf")
    loaded = CouplingMap.load(
        dataclasses.replace(result, matrices=matrices).save(tmp_path / "map.nc")
    )
    assert torch.equal(loaded.matrices.nan_to_num(7), matrices.nan_to_num(7))
    assert torch.equal(loaded.matrices.isnan(), matrices.isnan())


def test_the_file_opens_without_the_package(result, tmp_path):
    with xarray.open_dataset(result.save(tmp_path / "map.nc")) as file:
        assert file["matrices"].dims == ("row", "col", "i", "j")
        assert file["row_layer"].values.tolist() == [0, 1]
        assert (
            file["col_position"].values.tolist()
            == [len(tiny.TOKENS) - 1] * tiny.N_LAYERS
        )
        assert file.attrs["orientation"] == "ujv"
        assert json.loads(file.attrs["provenance"]) == result.provenance


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), KeyboardInterrupt()]
)
def test_a_save_that_fails_leaves_nothing_or_what_was_there(
    result, tmp_path, monkeypatch, error
):
    def interrupted(_, path, *args, **kwargs):
        Path(path).write_bytes(b"half a file")
        raise error

    older = result.save(tmp_path / "older.nc")
    older_content = older.read_bytes()
    monkeypatch.setattr(xarray.Dataset, "to_netcdf", interrupted)
    for path in (older, tmp_path / "new.nc"):
        with pytest.raises(type(error)):
            result.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["older.nc"]
    assert older.read_bytes() == older_content


def test_save_replaces_an_older_file_and_a_failing_rename_cleans_up(
    tiny_trace, result, tmp_path
):
    path = result.save(tmp_path / "map.nc")
    newer = tlc.depth_coupling(tiny_trace, 2)
    newer.save(path)
    assert_same(CouplingMap.load(path), newer)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        result.save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "map.nc"]


def spoil(result: CouplingMap, path: Path, damage: str) -> None:
    dataset = result.to_dataset()
    if damage == "garbage":
        path.write_bytes(b"not netCDF at all" * 100)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut short":
        dataset.to_netcdf(path, engine="netcdf4")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "another netCDF":
        xarray.Dataset({"temperature": ("x", [1.0, 2.0])}).to_netcdf(
            path, engine="netcdf4"
        )
    elif damage == "classic netCDF":
        xarray.Dataset({"temperature": ("x", [1.0, 2.0])}).to_netcdf(
            path, engine="scipy"
        )
    elif damage.startswith("without "):
        name = damage.removeprefix("without ")
        dataset.attrs.pop(name, None)
        dataset.drop_vars(name, errors="ignore").to_netcdf(path, engine="netcdf4")
    else:
        name, value = damage.split("=")
        dataset.assign_attrs({name: json.loads(value)}).to_netcdf(
            path, engine="netcdf4"
        )


DAMAGE = [
    "garbage",
    "empty",
    "cut short",
    "another netCDF",
    "classic netCDF",
    'provenance="{"',
    'd_model="wide"',
]
DAMAGE += [
    f"without {name}"
    for name in ("matrices", "frobenius_norms", "row_layer", "kind", "provenance")
]
UNNOTICED = ["d_model=[1, 2]", "provenance=3", 'orientation="uvj"', 'provenance="3"']


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("damage", [*DAMAGE, *UNNOTICED])
def test_a_file_that_is_no_coupling_map_is_one_clear_error(result, tmp_path, damage):
    path = tmp_path / "odd.nc"
    spoil(result, path, damage)
    with pytest.raises(
        ValueError, match=r"is not a file that `CouplingMap\.save` wrote"
    ) as error:
        CouplingMap.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_load_names_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.nc"):
        CouplingMap.load(tmp_path / "absent.nc")


def test_the_file_has_every_pair_at_every_k(result, tmp_path):
    with xarray.open_dataset(result.save(tmp_path / "map.nc")) as file:
        assert file["coupling"].dims == ("k", "row", "col")
        assert file["k"].values.tolist() == [1, 2, 3, 4, 5, 6]
        for k in (1, 3, 6):
            A = result.matrices[..., :k, :k]
            expected = tlc.normalized_miscoupling(A)
            of_k = file.sel(k=k)
            for name, values in (
                ("coupling", 1 - expected),
                ("normalized_miscoupling", expected),
            ):
                torch.testing.assert_close(
                    torch.tensor(of_k[name].values), values.double(), rtol=0, atol=1e-6
                )
            assert of_k["null"].values == pytest.approx(result.null(k))


def test_a_file_without_them_is_read(result, tmp_path):
    older = result.to_dataset().drop_vars(
        ["coupling", "normalized_miscoupling", "null"]
    )
    older.drop_vars("k").to_netcdf(tmp_path / "older.nc")
    assert_same(CouplingMap.load(tmp_path / "older.nc"), result)


def test_a_table_has_a_row_for_each_pair_and_k(result):
    table = result.to_dataframe([2, 5])
    assert len(table) == 2 * tiny.N_LAYERS**2
    assert set(table["model"]) == {result.provenance["model"]}
    for row in table.itertuples():
        pair = (
            result.row_layers.index(row.row_layer),
            result.col_layers.index(row.col_layer),
        )
        assert row.coupling == pytest.approx(
            float(result.coupling(row.k)[pair]), abs=1e-6
        )
        assert row.null == pytest.approx(result.null(row.k))
        assert row.row_position == row.col_position == len(tiny.TOKENS) - 1
    assert len(result.to_dataframe()) == 6 * tiny.N_LAYERS**2
    with pytest.raises(ValueError, match="`k` must lie in"):
        result.to_dataframe([7])


def test_a_table_of_tokens_has_their_texts(tiny_trace, result):
    chosen = {"positions": [1, 4], "k": 3}
    of_tokens = tlc.self_coupling(tiny_trace, layer=0, other_layer=1, **chosen)
    table = of_tokens.to_dataframe([3])
    first, second = (tiny_trace.str_tokens[position] for position in (1, 4))
    assert first != second
    assert table["row_token"].tolist() == [first, first, second, second]
    assert table["col_token"].tolist() == [first, second, first, second]
    assert "row_token" not in result.to_dataframe([3])


def test_a_mean_has_means_in_its_table(tiny_trace):
    other = tlc.trace(tiny_trace.model, tiny_trace.tokens[:4])
    mean = tlc.mean_depth_coupling([tiny_trace, other], 3)
    table = mean.to_dataframe([3]).set_index(["row_layer", "col_layer"])
    expected = mean.coupling(3)
    for pair, value in table["coupling"].items():
        assert value == pytest.approx(float(expected[pair]), abs=1e-6)
    assert table["null"].to_numpy() == pytest.approx(mean.null(3))


@pytest.mark.parametrize("of", ["jacobian", "vectors"])
def test_a_profile_is_a_row_or_column_without_the_layer_itself(result, of):
    values = result.coupling(4)
    profile = result.profile(1, 4, of=of)
    assert bool(profile[1].isnan())
    expected = values[1, 0] if of == "jacobian" else values[0, 1]
    assert float(profile[0]) == float(expected)
    with pytest.raises(
        ValueError, match=r"one of the layers .* got 2; there are \[0, 1\]"
    ):
        result.profile(2, of=of)


def test_of_tokens_there_is_no_profile(tiny_trace):
    tokens = tlc.self_coupling(tiny_trace, 0, k=2)
    with pytest.raises(ValueError, match="each of which has one, got 0"):
        tokens.profile(0)


def test_the_strongest_pairs_are_those_of_a_loop_over_all(result):
    values = result.coupling(2).double().numpy()
    pairs = sorted(
        (
            (values[i, j], (row, 7), (col, 7))
            for i, row in enumerate(result.row_layers)
            for j, col in enumerate(result.col_layers)
            if row != col
        ),
        reverse=True,
    )
    strongest = result.strongest(1, k=2)
    assert [(p.value, p.jacobian_of, p.vectors_of) for p in strongest] == pairs[:1]
    # More than there are.
    assert len(result.strongest(99, k=2)) == len(pairs)


def test_the_strongest_pairs_of_tokens_have_positions_and_no_nan():
    tokens = random_map(layers=(1, 4, 6), kind="self")
    matrices = tokens.matrices.clone()
    # No Jacobian, no coupling.
    matrices[0] = 0
    zero = dataclasses.replace(
        tokens,
        matrices=matrices,
        singular_values=tokens.singular_values.clone().index_fill_(
            0, torch.tensor(0), 0.0
        ),
    )
    # The rows and columns of a map of tokens are of two layers: no pair is its own.
    with pytest.warns(UserWarning, match="undefined"):
        assert zero.mean() > 0
    with pytest.warns(UserWarning, match="undefined"):
        strongest = zero.strongest(9)
    assert len(strongest) == 6
    assert {pair.jacobian_of for pair in strongest} == {(8, 4), (8, 6)}
    assert {pair.vectors_of for pair in strongest} == {(9, 1), (9, 4), (9, 6)}


def test_random_layers_are_rarely_far_from_chance():
    """Their p is that of chance, or larger: the null is as wide as it can be."""
    ps = np.array([random_map(seed=seed).null_p(3) for seed in range(80)])
    assert (ps <= 0.1).mean() < 0.1 + 3 * math.sqrt(0.1 * 0.9 / len(ps))
    # And not always 1.
    assert 0.2 < np.median(ps) < 0.8
    assert ps.min() > 1 / 8001


@pytest.mark.parametrize("off_diagonal", [True, False])
@pytest.mark.parametrize("within", ["space", "spans"])
def test_p_is_the_share_of_random_means(off_diagonal, within):
    """It lies on the same side of .025 as the mean does of the interval's ends."""
    options = {"off_diagonal": off_diagonal, "within": within}
    for seed in range(6):
        random = random_map(seed=seed)
        low, high = random.null_interval(2, **options)
        p = random.null_p(2, **options)
        mean = random.mean(2, off_diagonal=off_diagonal)
        assert (mean > high) == (p < 0.025)
        assert (mean < low) == (p > 0.975)


def test_layers_that_share_all_directions_have_the_smallest_p():
    one = random_map(layers=(0,))
    alike = dataclasses.replace(
        random_map(layers=(0, 1, 2)),
        matrices=one.matrices.expand(3, 3, -1, -1).clone(),
        singular_values=one.singular_values.expand(3, -1).clone(),
        frobenius_norms=one.frobenius_norms.expand(3).clone(),
    )
    assert alike.mean(3) == pytest.approx(1)
    assert alike.null_p(3) == 1 / 8001


def test_all_is_chance_where_every_matrix_is_diagonal():
    """At k = 1: the random means and the mean are 1, but for rounding."""
    for seed in range(5):
        assert random_map(layers=(0, 1, 2), seed=seed).null_p(1) == 1
    narrow = random_map(layers=(0, 1, 2))
    single = dataclasses.replace(narrow, matrices=narrow.matrices.float())
    assert single.chance(1).p == 1


def test_two_layers_know_no_smaller_p_than_their_draws():
    """They compare the same frames: each of their means is one of 800 draws."""
    alike = random_map(layers=(0, 1))
    same = torch.eye(alike.k).expand(2, 2, -1, -1).clone()
    assert dataclasses.replace(alike, matrices=same).null_p(3) == 1 / 801


def test_tokens_have_no_distance_in_layers():
    tokens = random_map(kind="self")
    for ask in (tokens.locality_profile, tokens.null_interval_by_distance):
        with pytest.raises(ValueError, match="by `row_position` and `col_position`"):
            ask(3)


def test_p_of_a_pair_is_the_share_of_haar_random_frames():
    """Frames by scipy, coupling by numpy, singular values that are all known."""
    k, n = 3, 4000
    result = random_map(layers=(0, 1, 2), k=12)
    p = result.null_p_by_pair(k, n_draws=n)
    assert p.isnan().equal(torch.eye(3, dtype=torch.bool))
    frames = stats.ortho_group(12, seed=np.random.default_rng(1)).rvs(2 * n)
    U, V = frames[:n, :, :k], frames[n:, :, :k]
    for row, S in enumerate(result.singular_values.numpy()):
        A = np.einsum("nik,i,nil->nkl", U, S, V)
        energies = np.square(A).sum((1, 2))
        outside = energies - np.square(A.diagonal(axis1=1, axis2=2)).sum(1)
        random = 1 - np.sqrt(outside / energies)
        for col in {0, 1, 2} - {row}:
            share = (random >= float(result.coupling(k)[row, col])).mean()
            error = math.sqrt(2 * share * (1 - share) / n)
            assert float(p[row, col]) == pytest.approx(share, abs=4 * error + 2 / n)


def test_p_of_random_pairs_is_uniform():
    """One pair of each map, so that they are independent."""
    ps = [float(random_map(seed=s).null_p_by_pair(3)[0, 1]) for s in range(100)]
    assert stats.kstest(ps, "uniform").pvalue > 0.01


def test_the_smallest_p_of_a_pair_is_that_of_its_draws():
    one = random_map(layers=(0,))
    alike = dataclasses.replace(
        random_map(layers=(0, 1)),
        matrices=one.matrices.expand(2, 2, -1, -1).clone(),
        singular_values=one.singular_values.expand(2, -1).clone(),
        frobenius_norms=one.frobenius_norms.expand(2).clone(),
    )
    p = alike.null_p_by_pair(3, n_draws=99)
    assert p[0, 1] == p[1, 0] == 1 / 100
    # Every 1 × 1 matrix is diagonal.
    assert alike.null_p_by_pair(1, n_draws=99)[0, 1] == 1
    nothing = dataclasses.replace(alike, matrices=torch.zeros_like(alike.matrices))
    with pytest.warns(UserWarning, match="undefined"):
        assert nothing.null_p_by_pair(2).isnan().all()


def test_a_single_connection_leaves_nothing_to_chance():
    single = random_map(layers=(0,))
    for table in (
        single.table([3]),
        random_map(layers=(0, 1)).table([3], chances={}),
    ):
        assert table.caption.endswith("\nnull: random subspaces")


def test_a_mean_that_is_undefined_has_no_p():
    random = random_map(layers=(0, 1))
    # Singular vectors in which the other layer does nothing.
    nothing = dataclasses.replace(random, matrices=torch.zeros_like(random.matrices))
    with pytest.warns(UserWarning, match="undefined"):
        assert math.isnan(nothing.null_p(2))


def test_a_k_that_a_map_does_not_hold_is_one_to_compute(result: CouplingMap) -> None:
    for read in (result.mean, result.coupling, result.null):
        with pytest.raises(
            ValueError,
            match=r"^`k` must lie in \[1, 6\] \(the number of singular vectors\), got 10: "
            r"the result holds no more, compute it with `k=10`$",
        ):
            read(10)
    # More than the model's width cannot be computed either.
    with pytest.raises(ValueError, match=r"singular vectors\), got 99$"):
        result.mean(99)
