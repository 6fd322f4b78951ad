"""What was measured, read under one choice or under all: pairs of layers, orientation,
measure, k.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tl_coupling.arguments import checked
from tl_coupling.comparisons import describe_pairs, null_interval_of_spectra
from tl_coupling.measures import Orientation, mean_name, measured_in, null_name
from tl_coupling.statistics import Interval

if TYPE_CHECKING:
    import pandas
    import xarray

# By whether a layer's pair with itself counts.
PAIRS = {False: "different", True: "all"}
# The frames that are drawn for a null have at most this width, or 8 k.
_WIDEST = 256


def pairs_of_layers(data: "xarray.Dataset") -> str:
    """Say which pairs of layers the means in the data are over."""
    return describe_pairs(bool(data.attrs.get("diagonal", 0)))


@checked
def with_diagonal(data: "xarray.Dataset", diagonal: bool = True) -> "xarray.Dataset":
    """Return data whose means are over all pairs of layers, or over different ones.

    All pairs are those of the paper. `mean_…` and `null_…` are made anew from the maps
    that the data hold, of any version of this library; the nulls of pairs of a layer
    with itself are their own values. Everything else, and data that are so already,
    stay as they are. Pairs that are undefined are left out of a mean.

    Args:
        data: of `measure_prompts`, `run_survey`, `open_survey` or `checkpoint_sweep`.
        diagonal: whether pairs `l = l'` count.

    Raises ValueError for data without maps.

    Example:
        >>> data = tlc.surveys.measure_prompts(model, "w1 w2 w3", tlc.Settings(k=(4,)))
        >>> with_own_pairs = tlc.surveys.with_diagonal(data)
        >>> data["mean_coupling"].item() < with_own_pairs["mean_coupling"].item()
        True
    """
    if bool(data.attrs.get("diagonal", 0)) == diagonal:
        return data
    changed = {}
    for measure in measured_in(data.data_vars):
        mean, null = _mean_and_null(data, measure, diagonal)
        changed[mean_name(measure)] = mean
        changed[null_name(measure)] = null
    changed = {
        # As they were: arithmetic on datasets reorders dimensions and drops attributes.
        name: values.transpose(*data[name].dims).assign_attrs(data[name].attrs)
        for name, values in changed.items()
    }
    return data.assign(changed).assign_attrs(diagonal=int(diagonal))


def _mean_and_null(
    data: "xarray.Dataset", measure: str, diagonal: bool
) -> "tuple[xarray.DataArray, xarray.DataArray]":
    """Return the mean of a measure and its null over the other choice of pairs."""
    dims_of_map = data[measure].dims if measure in data else ()
    if not {"layer", "other_layer"} <= set(dims_of_map):
        raise ValueError(
            f"{mean_name(measure)!r} cannot be taken over other pairs: "
            f"there is no map {measure!r} in the data"
        )
    values = data[measure]
    is_own = data["layer"] == data["other_layer"]
    # A shallower model has fewer layers than the data have.
    n_layers = data["n_layers"] if "n_layers" in data else data.sizes["layer"]
    counts = is_own & diagonal | ~is_own
    mean = values.where(counts).mean(("layer", "other_layer"))
    # A mean over n² pairs has n of them on the diagonal.
    own_share = values.where(is_own).mean(("layer", "other_layer")) / n_layers
    null = data[null_name(measure)]
    if diagonal:
        # n (n − 1) of the n² pairs are of different layers, so that their null counts
        # by (n − 1) / n. Below, the null of all pairs is taken apart again.
        return mean, null * (n_layers - 1) / n_layers + own_share
    return mean, (null - own_share) * n_layers / (n_layers - 1)


def null_interval_of_coupling(data: "xarray.Dataset", k: int) -> Interval:
    """Return where 95 % of a model's mean coupling would lie with random vectors.

    Of pairs of different layers, as `CouplingMap.null_interval`, from the singular
    values that the data keep; the others count as 0. Spectra are means over prompts and
    seeds, whose values are taken to rise and fall together.

    Args:
        data: of one model at one checkpoint, with `singular_values`.
        k: how many top singular vectors.
    """
    kept = data["singular_values"]
    samples = [dim for dim in kept.dims if dim not in ("layer", "singular_value")]
    spectra = kept.mean(samples).transpose("layer", "singular_value").values
    # A shallower model has fewer layers than the data have.
    S_1 = torch.from_numpy(spectra[np.isfinite(spectra).all(1)]).double()
    width = json.loads(data.attrs["provenance"])["d_model"]
    # Random frames of wider streams have the same angles, but for a factor that coupling
    # does not see: it is a ratio.
    return null_interval_of_spectra(S_1, k, min(width, max(_WIDEST, 8 * k)))


def joined_runs(runs: "Mapping[str, Sequence[xarray.Dataset]]") -> "xarray.Dataset":
    """Return the data of every run's prompts as one; the runs are its checkpoints."""
    import xarray

    run_datasets = [
        xarray.concat(prompt_datasets, "prompt") for prompt_datasets in runs.values()
    ]
    data = xarray.concat(run_datasets, "checkpoint")
    return data.assign_coords(checkpoint=list(runs))


@checked
def select_orientation(
    data: "xarray.Dataset", orientation: Orientation | None = None
) -> "xarray.Dataset":
    """Return data of one orientation, by default the first that was measured.

    Raises ValueError for one that was not measured.

    Example:
        >>> settings = tlc.Settings(k=(4,), orientation=("ujv", "vju"))
        >>> both = tlc.surveys.measure_prompts(model, "w1 w2 w3", settings)
        >>> tlc.surveys.select_orientation(both, "vju").mean_coupling.dims
        ('prompt', 'k')
    """
    measured = orientations_of(data)
    if orientation is None:
        orientation = measured[0]
    if orientation not in measured:
        raise ValueError(
            f"`orientation` {orientation!r} was not measured; "
            f"there is {', '.join(measured)}"
        )
    if "orientation" not in data.dims:
        return data
    data = data.sel(orientation=orientation, drop=True)
    return data.assign_attrs(orientation=orientation)


def orientations_of(data: "xarray.Dataset") -> list[Orientation]:
    """Return the orientations that were measured."""
    if "orientation" not in data.dims:
        return [data.attrs.get("orientation", "ujv")]
    orientations: list[Orientation] = data["orientation"].values.tolist()
    return orientations


@checked
def measure_table(data: "xarray.Dataset") -> "pandas.DataFrame":
    """Return every measure × orientation × choice of pairs × k, each with its null.

    Shows which choice makes which finding.

    Args:
        data: as for `with_diagonal`; what it has of measures and orientations. All
            there are come of `Settings(measures=tuple(MEASURES), orientation=("ujv",
            "vju"))`.

    Returns a row for each, and for each model and checkpoint (an untrained twin is
    one). Columns: `model` and `checkpoint` where the data have them; `measure`,
    `orientation`, `pairs` of layers ("different" or "all"), `k`; `mean` and `spread`,
    over prompts, of the mean over pairs, and the mean `null`. Spread is NaN for one
    prompt. Pairs and prompts that were not measured are NaN in the data, and left out.

    Example:
        >>> settings = tlc.Settings(
        ...     k=(2, 4), orientation=("ujv", "vju"), measures=("coupling", "released_norm")
        ... )
        >>> data = tlc.surveys.measure_prompts(model, ["w1 w2 w3", "w4 w5"], settings)
        >>> len(tlc.surveys.measure_table(data))
        16
    """
    import pandas

    tables = []
    for diagonal, pairs in PAIRS.items():
        pairs_data = with_diagonal(data, diagonal)
        for orientation in orientations_of(data):
            choice_data = select_orientation(pairs_data, orientation)
            for measure in measured_in(choice_data.data_vars):
                table = _prompt_statistics(choice_data, measure)
                tables.append(
                    table.assign(measure=measure, orientation=orientation, pairs=pairs)
                )
    # A model that has no such checkpoint has a row of NaN in the table.
    rows = pandas.concat(tables).dropna(subset=["mean"])
    run_columns = [name for name in ("model", "checkpoint") if name in data.dims]
    choices = ["measure", "orientation", "pairs", "k"]
    columns = [*run_columns, *choices, "mean", "spread", "null"]
    return rows[columns].reset_index(drop=True)


def _prompt_statistics(data: "xarray.Dataset", measure: str) -> "pandas.DataFrame":
    """Return mean, spread and null of one measure over prompts, a row for each k."""
    import pandas

    means = data[mean_name(measure)]
    mean = means.mean("prompt")
    if means.sizes["prompt"] > 1:
        spread = means.std("prompt", ddof=1)
    else:
        # NaN in the same shape.
        spread = mean * np.nan
    null = data[null_name(measure)].mean("prompt")
    columns = {"mean": mean, "spread": spread, "null": null}
    series = {name: values.to_series() for name, values in columns.items()}
    return pandas.DataFrame(series).reset_index()
