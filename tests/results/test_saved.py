"""Saved results: what is loaded is what was saved, or it is said that it is not."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray

import tl_coupling as tlc
from html_reader import Reader
from made_up_results import random_map
from tl_coupling.results import Saved

pytestmark = pytest.mark.usefixtures("as_a_user")


def audit(trace: tlc.Trace) -> tlc.trajectories.LensAudit:
    return tlc.trajectories.lens_audit(
        tlc.trajectories.product_lens([trace]),
        [trace, tlc.trace(trace.model, "w5 w6 w7")],
    )


RESULTS: dict[str, Callable[[tlc.Trace], Saved]] = {
    "a map": lambda trace: tlc.depth_coupling(trace, k=3),
    "a mean": lambda trace: tlc.mean_depth_coupling(
        [trace, tlc.trace(trace.model, trace.tokens[:4])], k=3
    ),
    "a trajectory": tlc.trajectories.measure_trajectory,
    "shapes": lambda trace: tlc.trajectories.measure_trajectory(
        trace, linear=False, noise=False
    ),
    "a linearisation": tlc.trajectories.linearisation,
    "a linearisation without its closed form": lambda trace: (
        tlc.trajectories.linearisation(trace, closed_form=False)
    ),
    "a perturbation": lambda trace: tlc.trajectories.perturbation(
        trace, (0.1, 1.0), n_samples=2, relative=False
    ),
    "influence": tlc.cross_token_influence,
    "products": lambda trace: tlc.dynamics.products(trace, n_draws=2),
    "a map of products": tlc.dynamics.product_map,
    "eigenvalues": tlc.dynamics.eigenvalues,
    "carriers": lambda trace: tlc.carriers(trace, k=3),
    "heads": lambda trace: tlc.comparisons.head_coupling(trace, k=2),
    "directions": lambda trace: tlc.directions.directions_of(trace, 1, k=1),
    "parts": lambda trace: tlc.block_parts(trace, 1),
    "directions of a block": lambda trace: tlc.jacobians.block_directions(trace, 1, 2),
    "frozen": lambda trace: tlc.comparisons.frozen_coupling(trace, k=2),
    "a comparison": lambda trace: tlc.compare(
        tlc.depth_coupling(trace, k=3), tlc.depth_coupling(trace, k=3)
    ),
    "prompts": lambda trace: tlc.prompt_coupling(
        [trace, tlc.trace(trace.model, trace.tokens[:4])], k=2
    ),
    "an audit": lambda trace: audit(trace),
    # netCDF would give it back as the remark itself.
    "an audit with one remark": lambda trace: dataclasses.replace(
        audit(trace), remarks=("it is not known",)
    ),
    "alignment": lambda trace: tlc.trajectories.residual_alignment(trace, 3),
    "decoded": lambda trace: tlc.directions.decode(trace, 1, k=1, n_draws=2),
    "an ablation": lambda trace: tlc.directions.ablate(
        trace.model,
        ["w1 w2"],
        tlc.directions.shared_subspace([trace], rank=1, k=3),
        n_draws=1,
    ),
    "a rotation": lambda trace: tlc.directions.rotate(
        trace.model, ["w1 w2"], n_draws=1
    ),
    "a subspace": lambda trace: tlc.directions.shared_subspace([trace], rank=1, k=3),
    "steering": lambda trace: tlc.directions.steer(
        trace.model,
        ["w1"],
        tlc.directions.directions_of(trace, 1, k=1),
        [0.1],
        n_draws=1,
    ),
}


def content(result: Saved) -> xarray.Dataset:
    return result.to_dataset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESULTS)
def test_what_was_saved_is_loaded(
    name: str, tiny_trace: tlc.Trace, tmp_path: Path
) -> None:
    result = RESULTS[name](tiny_trace)
    path = result.save(tmp_path / "result.nc")
    loaded = type(result).load(path)
    assert content(loaded).equals(content(result))
    assert repr(loaded) == repr(result)
    assert repr(result).startswith(f"{type(result).__name__}(")
    assert "\n" not in repr(result)
    with xarray.open_dataset(path) as file:
        assert len(file.attrs["digest"]) == 64


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESULTS)
def test_a_name_for_each_entry_along_a_dimension(
    name: str, tiny_trace: tlc.Trace
) -> None:
    """Results that were made by hand, or read from an edited file."""
    result = RESULTS[name](tiny_trace)
    sized = {
        dim
        for field, dims in result.DIMS.items()
        if isinstance(getattr(result, field), torch.Tensor)
        for dim in dims.split()
    }
    for field, dims in result.DIMS.items():
        names = getattr(result, field)
        if isinstance(names, tuple) and dims in sized:
            with pytest.raises(ValueError, match=f"`{field}` must name the"):
                dataclasses.replace(result, **{field: (*names, names[0])})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_shows_a_short_table(name: str, tiny_trace: tlc.Trace) -> None:
    result = RESULTS[name](tiny_trace)
    table = result.table()
    assert len(table.rows) in range(1, 13)
    assert {len(row) for row in table.rows} == {len(table.headings)}
    # The model is named once.
    assert "tiny" in f"{table.title}\n{table.caption}"
    page = Reader(result._repr_html_())
    assert page.open == [""]
    assert len(page.all("th")) == len(table.headings)
    assert len(page.all("td")) == len(table.rows) * len(table.headings)
    assert table.headings[-1] in page.text
    assert table.rows[-1][-1] in page.text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return random_map().save(tmp_path / "map.nc")


def edited(path: Path, edit: Callable[[xarray.Dataset], object]) -> None:
    with xarray.load_dataset(path) as dataset:
        edit(dataset)
    dataset.to_netcdf(path, engine="netcdf4")


EDITS: dict[str, Callable[[xarray.Dataset], object]] = {
    "a number": lambda data: data["matrices"].values.__setitem__((0, 0, 0, 0), 7.0),
    "its last bit": lambda data: data["matrices"].values.__setitem__(
        (0, 0, 0, 0), np.nextafter(data["matrices"].values[0, 0, 0, 0], 7)
    ),
    "a NaN": lambda data: data["singular_values"].values.__setitem__((0, 0), np.nan),
    "a layer": lambda data: data.__setitem__("row_layer", ("row", [3, 2, 1, 0])),
    "the width": lambda data: data.attrs.update(d_model=13),
    "the model": lambda data: data.attrs.update(provenance='{"model": "another"}'),
    "the kind": lambda data: data.attrs.update(kind="self"),
    "one more": lambda data: data.attrs.update(note="mine"),
    "the digest": lambda data: data.attrs.update(digest="0" * 64),
    "no digest at all": lambda data: data.attrs.update(digest=""),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_was_edited_says_that_it_was_changed(edit: str, path: Path) -> None:
    edited(path, EDITS[edit])
    with pytest.raises(
        ValueError, match=r"map.nc was changed after `CouplingMap.save`"
    ):
        tlc.CouplingMap.load(path)


def test_trajectories_that_were_edited_say_so(
    tiny_trace: tlc.Trace, tmp_path: Path
) -> None:
    result = tlc.trajectories.measure_trajectory(tiny_trace, linear=False, noise=False)
    path = result.save(tmp_path / "shapes.nc")
    edited(path, lambda data: data["norm"].values.__setitem__((0, 0), 7.0))
    with pytest.raises(ValueError, match=r"was changed after `Traj"):
        type(result).load(path)


def test_a_file_of_an_earlier_version_without_a_digest_is_loaded(path: Path) -> None:
    edited(path, lambda data: data.attrs.pop("digest"))
    assert content(tlc.CouplingMap.load(path)).equals(content(random_map()))


@pytest.mark.parametrize("parts", [True, False])
def test_trajectories_of_an_earlier_version_are_loaded(
    parts: bool, tiny_trace: tlc.Trace, tmp_path: Path
) -> None:
    """Their files do not say whose they are; a result inside has its own attribute."""
    result = tlc.trajectories.measure_trajectory(tiny_trace, linear=parts, noise=parts)
    path = result.save(tmp_path / "trajectory.nc")
    edited(path, lambda data: [data.attrs.pop(name) for name in ("digest", "result")])
    loaded = type(result).load(path)
    assert content(loaded).equals(content(result))
    assert (loaded.linearisation is not None) == parts
    assert repr(loaded) == repr(result)
    assert repr(loaded.perturbation) == repr(result.perturbation)


def test_a_file_that_was_only_written_again_is_loaded(path: Path) -> None:
    """As by another version of xarray, or compressed."""
    with xarray.load_dataset(path) as dataset:
        compressed = {name: {"zlib": True} for name in dataset.data_vars}
    dataset.to_netcdf(path, engine="netcdf4", encoding=compressed)
    assert content(tlc.CouplingMap.load(path)).equals(content(random_map()))


def loaded_or_said(path: Path) -> tlc.CouplingMap | str:
    """Return the result of a file, or the error's text."""
    try:
        return tlc.CouplingMap.load(path)
    except ValueError as error:
        return str(error)


def test_a_damaged_file_is_never_another_result(path: Path) -> None:
    whole, right = path.read_bytes(), content(random_map())
    rng = random.Random(0)
    n_refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        loaded = loaded_or_said(path)
        if isinstance(loaded, str):
            n_refused += 1
            assert "\n" not in loaded
        else:
            assert content(loaded).equals(right)
            assert loaded.provenance == random_map().provenance
    assert n_refused > 10


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Texts(Saved):
    """What may stand in a result's tuples and tensors."""

    numbers: torch.Tensor
    flags: torch.Tensor
    texts: tuple[str, ...]
    empty: tuple[int, ...]
    one: tuple[str, ...]
    shift: float
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "numbers": "text",
        "flags": "text",
        "texts": "text",
        "empty": "nothing",
        "one": "single",
    }


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float64])
def test_texts_of_all_kinds_and_short_numbers_come_back(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    result = Texts(
        numbers=torch.tensor([-0.0, torch.nan, torch.inf, 0.5], dtype=dtype),
        flags=torch.tensor([True, False, True, True]),
        texts=("", " Ünï\n", "\t\0x", "日本"),
        empty=(),
        one=("only",),
        shift=0.1,
        provenance={"tokens": ["\0", "\ud800"], "nothing": None},
    )
    loaded = Texts.load(result.save(tmp_path / "texts.nc"))
    assert loaded.numbers.tolist()[2:] == [torch.inf, 0.5]
    assert loaded.provenance == result.provenance
    assert list(loaded.one) == ["only"]
    assert loaded.shift == 0.1
