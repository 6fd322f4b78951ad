"""Draw an atlas: small maps of many models, checkpoints and tasks, each of which opens as
a map to explore.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rcParams

from tl_coupling.arguments import checked
from tl_coupling.interactive.explorer_data import (
    MOST_SIDE_BY_SIDE,
    coded_values,
    color_scales,
)
from tl_coupling.interactive.views import View
from tl_coupling.results import plural, small_map

if TYPE_CHECKING:
    import xarray

_HERE = Path(__file__)
# Between stops of a colour scale no eye sees a difference.
_N_STOPS = 17
# The k that small maps show, where it was measured.
_USUAL_K = 10
# Checkpoints by their names in surveys.
_TRAINED = {"main": "trained", "untrained": "untrained"}


class _Map(NamedTuple):
    """One map of an atlas: a model at a checkpoint, on a task.

    Attributes:
        model, task, n_prompts: of what it is the mean.
        state: "trained", "untrained" or "checkpoints", by which a reader chooses.
        name: of the checkpoint, as it is read.
        ks: the numbers of top singular vectors that were measured.
        rows, cols: the layers.
        values: `[n_ks n_rows n_cols]`; NaN where undefined.
        nulls: what random subspaces would give, at each k.
    """

    model: str
    task: str
    n_prompts: int
    state: str
    name: str
    ks: list[int]
    rows: list[int]
    cols: list[int]
    values: Float[np.ndarray, "n_ks n_rows n_cols"]
    nulls: Float[np.ndarray, " n_ks"]

    @property
    def figure(self) -> str:
        """The name of the figure that shows it beside other checkpoints."""
        return f"{self.model}/{self.task}"

    def at(self, k: int) -> Float[np.ndarray, "n_rows n_cols"]:
        """Return the values at k; NaN for a layer with itself."""
        is_own = np.equal.outer(self.rows, self.cols)
        return np.where(is_own, np.nan, self.values[self.ks.index(k)])

    def strongest_pair(self, k: int) -> tuple[int, int]:
        """Return row and column of the largest value of two different layers."""
        place = int(np.nan_to_num(self.at(k), nan=-1.0).argmax())
        return divmod(place, len(self.cols))


@checked
def show_atlas(
    data: "xarray.Dataset | Sequence[xarray.Dataset]", *, k: int | None = None
) -> View:
    """Show maps of many models, checkpoints and tasks, each of which opens to explore.

    Small maps stand model by model, on one scale, with their mean beside what random
    subspaces give. A reader chooses models, tasks, and trained or untrained ones. Each
    small map is a link that opens the figure of `show_coupling` at its strongest pair:
    a model beside its untrained twin, or all checkpoints with a slider. What is open is
    in the address: `#map=gpt2/gsm8k&k=10&pair=8,10`. Without scripts the small maps are
    there alone.

    Args:
        data: maps of `generalization.task_maps`; or several such.
        k: the number of top singular vectors that small maps show, among those that
            were measured: 10 by default, or the one nearest to it.

    Raises:
        ValueError: no maps, maps that are not by task, two of one model, checkpoint and
            task, or a k that was not measured.

    Cost: 2 bytes for each pair, map and k, and 1 for its small map; a third more for the
    page: 10 kB for 30 layers and four k.

    Example:
        >>> maps = tlc.generalization.task_maps(
        ...     tlc.surveys.measure_prompts(model, prompts, tlc.Settings(k=(2, 4)))
        ... )
        >>> tlc.interactive.show_atlas(maps)
        <View of an atlas of 2 maps: 1 model, 2 tasks>
    """
    datasets = list(data) if isinstance(data, Sequence) else [data]
    atlas_maps = [each for by_task in datasets for each in _maps_of(by_task)]
    if not atlas_maps:
        raise ValueError("`data` has no maps: wanted at least one")
    # One scale for all small maps, which ends at the largest value of them all.
    shown_ks = [_shown_k(each, k) for each in atlas_maps]
    top = max(
        float(np.nanmax(each.at(shown_k), initial=1e-9))
        for each, shown_k in zip(atlas_maps, shown_ks, strict=True)
    )
    figures: dict[str, list[_Map]] = {}
    for each in atlas_maps:
        figures.setdefault(each.figure, []).append(each)
    # The small maps of a model, by state.
    sections: dict[str, dict[str, list[str]]] = {}
    for each, shown_k in zip(atlas_maps, shown_ks, strict=True):
        address = _address(each, shown_k, figures[each.figure])
        states = sections.setdefault(each.model, {})
        cell = _small_map(each, shown_k, top, address)
        states.setdefault(each.state, []).append(cell)
    numbers = {
        "shared": {"side": "layer", "matrix_k": 0, "directions": {}, **color_scales()},
        "figures": {name: _figure(group, k) for name, group in figures.items()},
    }
    text = html.escape(json.dumps(numbers, allow_nan=False, separators=(",", ":")))
    shown = "".join(_section(name, states) for name, states in sections.items())
    body = (
        f'<div class="tlc-atlas" data-atlas="{text}">'
        f'<div data-part="open"></div>{_legend(atlas_maps, shown_ks, top)}{shown}</div>'
    )
    n_tasks = len({each.task for each in atlas_maps})
    name = (
        f"an atlas of {plural(len(atlas_maps), 'map')}: "
        f"{plural(len(sections), 'model')}, {plural(n_tasks, 'task')}"
    )
    return View(body, atlas_script(), name)


def _maps_of(data: "xarray.Dataset") -> list[_Map]:
    """Return the maps that were measured, model by model, and then task by task."""
    dims = {"model", "checkpoint", "task", "k", "layer", "other_layer"}
    if "coupling" not in data or set(data["coupling"].dims) != dims:
        raise ValueError(
            "wanted maps by task, of `generalization.task_maps`, got data with "
            f"{', '.join(map(str, data.data_vars)) or 'nothing'} over "
            f"{', '.join(map(str, data.dims)) or 'nothing'}"
        )
    names = (data[name].values.tolist() for name in ("model", "task", "checkpoint"))
    maps = []
    for model, task, checkpoint in product(*names):
        part = data.sel(model=model, task=task, checkpoint=checkpoint)
        # A shallower model has fewer layers than the data have.
        measured = part.dropna("layer", how="all", subset=["coupling"])
        measured = measured.dropna("other_layer", how="all", subset=["coupling"])
        measured = measured.dropna("k", how="all", subset=["coupling"])
        if not measured["coupling"].size:
            continue
        state = _TRAINED.get(str(checkpoint), "checkpoints")
        is_step = str(checkpoint).isdecimal()
        maps.append(
            _Map(
                model=str(model),
                task=str(task),
                n_prompts=int(measured["n_prompts"]),
                state=state,
                name=f"step {checkpoint}"
                if is_step
                else _TRAINED.get(str(checkpoint), str(checkpoint)),
                ks=measured["k"].values.tolist(),
                rows=measured["layer"].values.tolist(),
                cols=measured["other_layer"].values.tolist(),
                values=measured["coupling"]
                .transpose("k", "layer", "other_layer")
                .values,
                nulls=measured["null_coupling"].values,
            )
        )
    return maps


def _shown_k(one_map: _Map, k: int | None) -> int:
    """Return the k that a small map shows."""
    if k is None:
        return min(one_map.ks, key=lambda measured: abs(measured - _USUAL_K))
    if k not in one_map.ks:
        raise ValueError(
            f"`k` = {k} was not measured for {one_map.model}, {one_map.name}, "
            f"{one_map.task}; there are {one_map.ks}"
        )
    return k


def _figure(group: Sequence[_Map], k: int | None) -> dict[str, Any]:
    """Return what the script draws of a model on a task, at all of its checkpoints."""
    first = group[0]
    names: set[str] = set()
    for other in group:
        if other.name in names:
            raise ValueError(
                f"`data` holds {other.figure}, {other.name} twice: drop one of them"
            )
        names.add(other.name)
        if (other.rows, other.cols, other.ks) != (first.rows, first.cols, first.ks):
            raise ValueError(
                f"the maps of {first.figure} must be of the same layers and k, "
                f"{other.name!r} has others than {first.name!r}"
            )
    first_k = _shown_k(first, k)
    return {
        "heading": [
            f"{first.model}, {first.task}",
            f"depth coupling, mean over {plural(first.n_prompts, 'prompt')}",
        ],
        "rows": list(map(str, first.rows)),
        "cols": list(map(str, first.cols)),
        "row_keys": first.rows,
        "col_keys": first.cols,
        "row_ids": first.rows,
        "col_ids": first.cols,
        "row_layers": first.rows,
        "col_layers": first.cols,
        "first_k": first_k,
        "ks": first.ks,
        "pair": first.strongest_pair(first_k),
        "runs": [
            {
                "name": each.name,
                "values": coded_values(each.values),
                # The same for every row: the script repeats it.
                "nulls": np.round(each.nulls, 5).tolist(),
                "sigma": [],
                "matrices": "",
            }
            for each in group
        ],
    }


def _address(one_map: _Map, k: int, group: Sequence[_Map]) -> str:
    """Return the address that opens the figure of a group at a map's strongest pair."""
    row, col = one_map.strongest_pair(k)
    address = f"#map={quote(one_map.figure)}&k={k}&pair={one_map.rows[row]},{one_map.cols[col]}"
    if len(group) > MOST_SIDE_BY_SIDE:
        run = [each.name for each in group].index(one_map.name)
        address += f"&run={run}"
    return address


def _small_map(one_map: _Map, k: int, top: float, address: str) -> str:
    """Return a small map with its mean, which is a link."""
    values = one_map.at(k)
    mean = float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
    null = float(one_map.nulls[one_map.ks.index(k)])
    times = f"{mean / null:.1f} × chance"
    picture = base64.b64encode(small_map(values, (0.0, top), _colors())).decode()
    n_rows, n_cols = values.shape
    alt = html.escape(
        f"Coupling of {n_rows} × {n_cols} layers of {one_map.model}, {one_map.name}, "
        f"{one_map.task}, k = {k}: mean {mean:.3f}, {times}"
    )
    facts = {
        "model": one_map.model,
        "state": one_map.state,
        "task": one_map.task,
        "run": one_map.name,
    }
    data = "".join(f' data-{key}="{html.escape(fact)}"' for key, fact in facts.items())
    return (
        f'<a class="tlc-small" href="{html.escape(address)}"{data}>'
        f'<img src="data:image/png;base64,{picture}" width="{n_cols}" '
        f'height="{n_rows}" alt="{alt}"><b>{html.escape(one_map.task)}</b> '
        f"<span>{html.escape(one_map.name)}</span> <span>mean {mean:.3f}</span> "
        f"<span>{times}</span></a>"
    )


def _colors() -> list[tuple[int, int, int]]:
    """Return stops of the colour scale that maps to explore have."""
    steps = colormaps[str(rcParams["image.cmap"])](np.linspace(0, 1, _N_STOPS))
    stops = np.rint(255 * steps[:, :3]).astype(int).tolist()
    return [(red, green, blue) for red, green, blue in stops]


def _legend(maps: Sequence[_Map], shown_ks: Sequence[int], top: float) -> str:
    """Return the scale of the small maps, with chance marked where all have one k."""
    stops = ", ".join(f"rgb{color}" for color in _colors())
    ks = sorted(set(shown_ks))
    mark = ""
    said = f"k = {' or '.join(map(str, ks))}"
    if len(ks) == 1:
        null = float(maps[0].nulls[maps[0].ks.index(ks[0])])
        mark = f'<i data-part="chance" style="left: {100 * null / top:.1f}%"></i>'
        said += f"; the mark is chance, {null:.3f}"
    return (
        '<div class="tlc-scale"><span class="tlc-ends">0 <span class="tlc-bar">'
        f'<i style="background: linear-gradient(to right, {stops})"></i>{mark}</span> '
        f"{top:.3f}</span> <span>{said}. One scale for all; grey: a layer with itself. "
        "Row: the layer whose Jacobian it is. Column: the layer whose singular vectors "
        "are used.</span></div>"
    )


def _section(model: str, states: Mapping[str, Sequence[str]]) -> str:
    """Return the small maps of a model: all trained ones, and then all others."""
    grids = "".join(
        f'<div class="tlc-smalls">{"".join(cells)}</div>' for cells in states.values()
    )
    return f"<section><h4>{html.escape(model)}</h4>{grids}</section>"


@lru_cache(maxsize=1)
def atlas_script() -> str:
    """Return the script that draws every atlas of `show_atlas` on a page."""
    files = [_HERE.with_name(name) for name in ("explorer.js", "atlas.js")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
