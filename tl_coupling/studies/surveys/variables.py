"""What is measured of one traced prompt, as one dataset."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.comparisons import CouplingMap, carriers
from tl_coupling.comparisons.maps import mean_over_pairs
from tl_coupling.dynamics import products
from tl_coupling.measures import (
    Measure,
    facts_of_own,
    mean_name,
    null_name,
)
from tl_coupling.models import missing_head
from tl_coupling.results import INPUT_DIGEST
from tl_coupling.studies.surveys.settings import Settings
from tl_coupling.trajectories import (
    entropy_by_depth,
    equidistance,
    expodistance,
    line_shape_score,
    line_shape_score_by_depth,
    norms,
    step_lengths,
)

if TYPE_CHECKING:
    import xarray

# A variable of a dataset: a number or text, or dimensions and values.
Variable: TypeAlias = (
    float | int | str | tuple[str | tuple[str, ...], np.ndarray | list[float]]
)
# Entries of the provenance of one prompt alone.
_PROMPT_ENTRIES = {
    "prompt",
    "image",
    "tokens",
    "str_tokens",
    INPUT_DIGEST,
    "paths",
    "position",
    "remarks",
    "svd",
}


def loss(traced: Trace) -> float:
    """Return the mean negative log-likelihood of each token given those before it.

    It is in nats; NaN for one token, or an image.
    """
    if traced.tokens is None or traced.n_pos < 2:
        return float("nan")
    # The last token predicts what the prompt does not hold. With `final_norm` the
    # stream at the end is normalised already.
    logits = traced.logits(traced.residual[-1, :-1], normalised=traced.final_norm)
    next_tokens = traced.tokens[1:].to(logits.device)
    return float(torch.nn.functional.cross_entropy(logits, next_tokens))


def _loss_where_known(traced: Trace) -> float:
    """Return `loss`; NaN for a model whose checkpoint has no head.

    That is among the trace's remarks.
    """
    return float("nan") if missing_head(traced.model) else loss(traced)


def measures(traced: Trace, settings: Settings, *maps: CouplingMap) -> "xarray.Dataset":
    """Return every measure of one prompt, from its coupling maps.

    `maps` are one for each orientation.
    """
    result = maps[0]
    # A model may have fewer blocks than a window has steps, and windows are odd.
    window = min(settings.window, traced.n_layers - 1 + traced.n_layers % 2)
    # `[window token]`, a mean over tokens whose score is defined.
    windowed = line_shape_score(traced.residual, window).nanmean(1).cpu().numpy()
    singular_values = result.singular_values.cpu().numpy()
    variables: dict[str, Variable] = {
        "singular_values": (("layer", "singular_value"), singular_values),
        **_shapes(traced, settings.position),
        "windowed_line_shape_score": ("window", windowed),
        "loss": _loss_where_known(traced),
        "n_pos": traced.n_pos,
        **_depth_variables(traced),
        "remarks": "\n".join(traced.provenance["remarks"]),
    }
    coords = {
        "singular_value": range(1, result.k + 1),
        # The layer in the middle of each window.
        "window": np.arange(len(windowed)) + window // 2,
        "depth": range(traced.n_layers + 1),
    }
    provenance = _shared_provenance(result) | facts_of_own(settings.own_measures)
    attrs = {"window": window, "provenance": json.dumps(provenance)}
    data = measures_of_maps(maps, settings).assign(variables)
    return data.assign_coords(coords).assign_attrs(attrs)


def products_of_blocks(traced: Trace, position: int) -> dict[str, Variable]:
    """Return what `dynamics.products` gives at each depth."""
    result = products(traced, position=position, progress=False)
    low, high = result.alignment_gain_interval.unbind(-1)
    null_ratio = result.null_participation_ratio.mean(0)
    layer_values = {
        "log_largest": result.log_largest,
        "alignment_gain": result.alignment_gain,
        "alignment_gain_low": low,
        "alignment_gain_high": high,
        "product_participation_ratio": result.participation_ratio,
        "null_product_participation_ratio": null_ratio,
    }
    return {name: ("layer", values.numpy()) for name, values in layer_values.items()}


def carried_by_branch(traced: Trace, settings: Settings) -> "xarray.Dataset":
    """Return what `carriers` gives of attention, MLP and the MLP acting on attention:
    shares of each layer, and the null of the mean excess.
    """
    import xarray

    result = carriers(
        traced,
        min(*settings.k, traced.d_model),
        settings.position,
        settings.orientations[0],
        progress=False,
    ).by_branch()
    ends = [result.null_interval(label) for label in result.labels]
    low, high = np.array(ends).T
    layer_shares = {
        "carried_share": result.by_layer("diagonal_share"),
        "jacobian_share": result.by_layer("jacobian_share"),
    }
    data = {
        name: (("layer", "branch"), shares.cpu().numpy())
        for name, shares in layer_shares.items()
    }
    null = {"null_excess_low": ("branch", low), "null_excess_high": ("branch", high)}
    return xarray.Dataset({**data, **null}, {"branch": list(result.labels)})


def _shapes(traced: Trace, position: int) -> dict[str, Variable]:
    """Return the shapes of one token's path, and their means over all tokens."""
    t = traced.position_index(position)
    variables: dict[str, Variable] = {}
    for shape in (line_shape_score, expodistance, equidistance):
        token_values = shape(traced.residual)
        variables[shape.__name__] = float(token_values[t])
        variables[f"{shape.__name__}_all_tokens"] = float(token_values.nanmean())
    return variables


def _shared_provenance(result: CouplingMap) -> dict[str, object]:
    """Return the entries of the provenance that do not belong to one prompt alone."""
    provenance = {
        key: value
        for key, value in result.provenance.items()
        if key not in _PROMPT_ENTRIES
    }
    if image := result.provenance.get("image"):
        provenance["preprocessing"] = image["preprocessing"]
    return provenance


def measures_of_maps(
    maps: Sequence[CouplingMap], settings: Settings
) -> "xarray.Dataset":
    """Return the measures of one prompt's maps, one for each orientation.

    Two orientations make a dimension.
    """
    import xarray

    orientation_datasets = [_map_measures(result, settings) for result in maps]
    orientations = [result.orientation for result in maps]
    data = orientation_datasets[0]
    attrs = data.attrs | {"orientation": ", ".join(orientations)}
    if len(maps) > 1:
        data = xarray.concat(orientation_datasets, "orientation")
        data = data.assign_coords(orientation=orientations)
    return data.assign_attrs(attrs)


def _map_measures(result: CouplingMap, settings: Settings) -> "xarray.Dataset":
    """Return the measures of one map of layers, their means over pairs, their nulls."""
    import xarray

    layers = list(result.row_layers)
    coords = {
        "k": list(settings.k),
        "layer": layers,
        "other_layer": layers,
        "distance": range(len(layers)),
    }
    variables: dict[str, Variable] = {}
    for measure in settings.named_measures:
        variables |= _measure_variables(result, measure, settings)
    profiles = [result.locality_profile(k).cpu().numpy() for k in settings.k]
    variables["locality"] = (("k", "distance"), np.stack(profiles))
    # netCDF has no booleans.
    attrs = {
        "diagonal": int(settings.diagonal),
        "p": settings.p,
        "absolute": int(settings.absolute),
    }
    return xarray.Dataset(variables, coords, attrs)


def _measure_variables(
    result: CouplingMap, measure: Measure, settings: Settings
) -> dict[str, Variable]:
    """Return one measure of every pair, its mean over pairs and its null, at every k."""
    name = measure.name
    off_diagonal = not settings.diagonal
    pair_values = [result.values(k, measure) for k in settings.k]
    if settings.diagonal or len(result.row_layers) > 1:
        own_pairs = result.own_pairs()
        means = [
            mean_over_pairs(values, own_pairs, name, off_diagonal)
            for values in pair_values
        ]
    else:
        # A model of one block has no pairs of different ones.
        means = [float("nan") for _ in settings.k]
    nulls = [result.null(k, measure, off_diagonal=off_diagonal) for k in settings.k]
    return {
        name: (("k", "layer", "other_layer"), torch.stack(pair_values).cpu().numpy()),
        mean_name(name): ("k", means),
        null_name(name): ("k", nulls),
    }


def _depth_variables(traced: Trace) -> dict[str, Variable]:
    """Return how the stream grows, bends and comes to say something.

    Of each, the median over tokens.
    """
    x = traced.residual
    # Not every model has logits.
    entropy = torch.full(x.shape[:2], torch.nan, device=x.device)
    with suppress(ValueError):
        entropy = entropy_by_depth(traced)
    token_values = {
        "step_length": ("layer", step_lengths(x)),
        "line_shape_score_by_depth": ("layer", line_shape_score_by_depth(x)),
        "norm": ("depth", norms(x)),
        "logit_lens_entropy": ("depth", entropy),
    }
    return {
        name: (dim, _median(values)) for name, (dim, values) in token_values.items()
    }


def _median(token_values: Tensor) -> np.ndarray:
    """Return the median over tokens, where they are defined, at every depth."""
    # torch's `nanmedian` takes the lower of two middle values, the quantile their mean.
    return token_values.double().nanquantile(0.5, dim=1).cpu().numpy()
