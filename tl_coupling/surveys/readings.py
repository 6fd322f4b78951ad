"""What was measured, read under one choice or under all: pairs of a layer with itself,
orientation, measure, k.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tl_coupling.arguments import checked
from tl_coupling.measures import Orientation, mean_name, measured_in, null_name

if TYPE_CHECKING:
    import pandas
    import xarray

PAIRS = {False: "different", True: "all"}


def pairs_of_layers(data: "xarray.Dataset") -> str:
    """Which pairs the means are over, in words."""
    return in_words(bool(data.attrs.get("diagonal", 0)))


def in_words(diagonal: bool) -> str:
    """Which pairs of layers, in words."""
    return (
        "all pairs of layers, l = l' among them"
        if diagonal
        else "pairs of different layers"
    )


@checked
def with_diagonal(data: "xarray.Dataset", diagonal: bool = True) -> "xarray.Dataset":
    """Measured data whose means are over all pairs of layers, as in the paper, or over
    those of different layers.

    `mean_…` and `null_…` are made anew from the maps that the data hold, of any version
    of this library; the nulls of pairs of a layer with itself are their own values.
    Everything else, and data that are so already, stay as they are. Pairs that are
    undefined are left out of a mean.

    Args:
        data: of `measure_prompts`, `run`, `open_survey` or `checkpoint_sweep`.
        diagonal: whether pairs `l = l'` count.

    Raises ValueError for data without maps.

    Example:
        >>> data = tlc.surveys.measure_prompts(model, "w1 w2 w3", tlc.Settings(k=(4,)))
        >>> data["mean_coupling"].item() < tlc.surveys.with_diagonal(data)["mean_coupling"].item()
        True
    """
    if bool(data.attrs.get("diagonal", 0)) == diagonal:
        return data
    found = {}
    for measure in measured_in(data.data_vars):
        name = mean_name(measure)
        if not {"layer", "other_layer"} <= set(
            data[measure].dims if measure in data else ()
        ):
            raise ValueError(
                f"{name!r} cannot be taken over other pairs: there is no map {measure!r} in the data"
            )
        # A shallower model has fewer layers than the data: n is of what is there.
        values, own = data[measure], data["layer"] == data["other_layer"]
        n = data["n_layers"] if "n_layers" in data else data.sizes["layer"]
        of_own, null = (
            values.where(own).mean(("layer", "other_layer")),
            data[null_name(measure)],
        )
        found[name] = values.where(own & diagonal | ~own).mean(("layer", "other_layer"))
        in_all = of_own / n
        found[null_name(measure)] = (
            null * (n - 1) / n + in_all if diagonal else (null - in_all) * n / (n - 1)
        )
    made = {
        name: values.transpose(*data[name].dims).assign_attrs(data[name].attrs)
        for name, values in found.items()
    }
    return data.assign(made).assign_attrs(diagonal=int(diagonal))


def joined(runs: "Mapping[str, Sequence[xarray.Dataset]]") -> "xarray.Dataset":
    """The prompts of each run, the runs as checkpoints."""
    import xarray

    found = [xarray.concat(of_prompts, "prompt") for of_prompts in runs.values()]
    return xarray.concat(found, "checkpoint").assign_coords(checkpoint=list(runs))


@checked
def one_orientation(
    data: "xarray.Dataset", orientation: Orientation | None = None
) -> "xarray.Dataset":
    """Data of one orientation, by default the first that was measured; ValueError for
    one that was not.

    Example:
        >>> both = tlc.surveys.measure_prompts(model, "w1 w2 w3", tlc.Settings(k=(4,), orientation=("ujv", "vju")))
        >>> tlc.surveys.one_orientation(both, "vju").mean_coupling.dims
        ('prompt', 'k')
    """
    there = orientations_of(data)
    chosen = there[0] if orientation is None else orientation
    if chosen not in there:
        raise ValueError(
            f"`orientation` {chosen!r} was not measured; there is {', '.join(there)}"
        )
    if "orientation" not in data.dims:
        return data
    return data.sel(orientation=chosen, drop=True).assign_attrs(orientation=chosen)


def orientations_of(data: "xarray.Dataset") -> list[Orientation]:
    """Those that were measured."""
    both = "orientation" in data.dims
    found: list[Orientation] = (
        data["orientation"].values.tolist()
        if both
        else [data.attrs.get("orientation", "ujv")]
    )
    return found


@checked
def measure_table(data: "xarray.Dataset") -> "pandas.DataFrame":
    """Every measure × orientation × choice of pairs × k, each with its null: which
    choice makes which finding.

    Args:
        data: as for `with_diagonal`; what it has of measures and orientations, with
            `Settings(measures=tuple(MEASURES), orientation=("ujv", "vju"))` all there are.

    Returns a row for each, and for each model and checkpoint (an untrained twin is
    one). Columns: `model` and `checkpoint` where the data have them; `measure`,
    `orientation`, `pairs` of layers ("different" or "all"), `k`; `mean` and `spread`,
    over prompts, of the mean over pairs, and the mean `null`. Spread is NaN for one
    prompt.

    Example:
        >>> how = tlc.Settings(k=(2, 4), orientation=("ujv", "vju"), measures=("coupling", "released_norm"))
        >>> data = tlc.surveys.measure_prompts(model, ["w1 w2 w3", "w4 w5"], how)
        >>> len(tlc.surveys.measure_table(data))
        16
    """
    import pandas

    of = [str(dim) for dim in ("model", "checkpoint") if dim in data.dims]
    found = []
    for diagonal, pairs in PAIRS.items():
        chosen = with_diagonal(data, diagonal)
        for orientation in orientations_of(data):
            one = one_orientation(chosen, orientation)
            for measure in measured_in(one.data_vars):
                means = one[mean_name(measure)]
                columns: dict[str, Any] = {
                    "mean": means.mean("prompt"),
                    "spread": means.std("prompt", ddof=1)
                    if means.sizes["prompt"] > 1
                    else means.mean("prompt") * np.nan,
                    "null": one[null_name(measure)].mean("prompt"),
                }
                table = pandas.DataFrame(
                    {name: x.to_series() for name, x in columns.items()}
                ).reset_index()
                found.append(
                    table.assign(measure=measure, orientation=orientation, pairs=pairs)
                )
    rows = pandas.concat(found).dropna(subset=["mean"])
    return rows[
        [*of, "measure", "orientation", "pairs", "k", "mean", "spread", "null"]
    ].reset_index(drop=True)
