"""All that is measured of one model on a set of prompts, as one dataset."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.comparisons import CouplingMap, depth_couplings
from tl_coupling.measures import (
    MEASURES,
    MeasureName,
    Norm,
    Orientation,
    mean_name,
    measure_named,
    null_name,
)
from tl_coupling.models import context_length, missing_head, reads_pixels, tokenize
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompt
from tl_coupling.traces import Trace, trace
from tl_coupling.trajectories import (
    Window,
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

Prompts = str | Prompt | Sequence[str | Prompt]
PAPER_PROMPT = "What is the capital of France? The capital is"
# What surveys hold that were made before others could be chosen.
_OF_THE_PAPERS: tuple[MeasureName, ...] = (
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
)
IMPLIED = {
    "measures": list(_OF_THE_PAPERS),
    "p": 2,
    "absolute": False,
    "diagonal": False,
}
_OF_ONE_PROMPT = {
    "prompt",
    "image",
    "tokens",
    "str_tokens",
    "paths",
    "position",
    "remarks",
    "svd",
}
# What records say of the whole files of a model.
_OF_ITS_FILES = {"weights_digest"}


@made_by("Settings(k=…)")
@checked
@dataclass(frozen=True)
class Settings:
    """How prompts are measured.

    Attributes:
        k: numbers of top singular vectors; one computation gives all.
        position: as in `depth_coupling`.
        orientation: `"ujv"`, `"vju"`, or both, from the same Jacobians: then they are a
            dimension of the data.
        final_norm, prepend_bos: as in `trace`.
        window: steps in a window of the line-shape score; fewer if the model has fewer
            blocks.
        n_singular_values: how many singular values are kept, or the largest k if that
            is more.
        measures: which measures of coupling. By default those of the papers;
            `tuple(measures.MEASURES)` are all, with what the released code reports,
            `"released_norm"` and `"released_trace"`.
        p, absolute: of `spectral_miscoupling`.
        diagonal: whether means (and their nulls) are over all pairs of layers, as in
            the paper's section 5.4; by default they are over pairs of different layers.
            A layer is coupled with itself exactly, which adds `(1 − c) / n_layers` to a
            mean coupling c: more in a shallow model. `with_diagonal` changes it
            afterwards.

    Example:
        >>> settings = tlc.Settings(k=(2, 4), orientation=("ujv", "vju"), window=1)
        >>> data = tlc.surveys.measure_prompts(model, "w1 w2 w3", settings)
        >>> dict(data.mean_coupling.sizes)
        {'prompt': 1, 'orientation': 2, 'k': 2}
    """

    k: tuple[Count, ...] = (10, 30, 50)
    position: int = -1
    orientation: Orientation | tuple[Orientation, ...] = "ujv"
    final_norm: bool = False
    prepend_bos: bool | None = None
    window: Window = 11
    n_singular_values: Count = 10
    measures: tuple[MeasureName, ...] = _OF_THE_PAPERS
    p: Norm = 2
    absolute: bool = False
    diagonal: bool = False

    def __post_init__(self) -> None:
        if not self.k or len(set(self.k)) < len(self.k):
            raise ValueError(
                f"`k` must be different whole numbers, one or more, got {list(self.k)}"
            )
        for name, chosen in (
            ("orientation", self.orientations),
            ("measures", self.measures),
        ):
            if not chosen or len(set(chosen)) < len(chosen):
                raise ValueError(
                    f"`{name}` must be different ones, one or more, got {list(chosen)}"
                )

    @property
    def orientations(self) -> tuple[Orientation, ...]:
        """One or both."""
        return (
            (self.orientation,)
            if isinstance(self.orientation, str)
            else self.orientation
        )

    def largest(self, d_model: int) -> int:
        """How many singular vectors are needed of a model that wide."""
        return max(*self.k, min(self.n_singular_values, d_model))

    def as_plan(self) -> dict[str, Any]:
        """The settings, JSON-able."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """Prompts with ids; bare texts are numbered. ValueError where there are none, or an
    id twice.
    """
    given = [prompts] if isinstance(prompts, str | Prompt) else list(prompts)
    named = [
        p if isinstance(p, Prompt) else Prompt(str(i), p) for i, p in enumerate(given)
    ]
    if not named:
        raise ValueError("`prompts` is empty: wanted at least one")
    if len({p.id for p in named}) < len(named):
        raise ValueError("the ids of `prompts` must differ")
    return named


@checked
def measure_prompts(
    model: nn.Module,
    prompts: Prompts,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Every measure of one model for every prompt.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, which get the ids "0", "1", …, or `Prompt` objects.
        settings, progress: how; and what wraps the loop, by default a bar in a terminal
            or notebook, False for none.

    Raises:
        ValueError: no prompts, an id twice, texts for a model that reads images, images
            for one that reads text, or prompts longer than the model's context, before
            anything is measured; otherwise as `trace` and `depth_coupling`, with the
            prompt's id.

    Returns:
        a Dataset, where `layer` is that of J_1 and `other_layer` that of the singular
        vectors:

        - each measure of coupling, `[prompt k layer other_layer]`; its mean over pairs
          of different layers (all, with `Settings(diagonal=True)`), `mean_…`, and its
          null, `null_…`, both `[prompt k]`; coupling by distance in depth, `locality`.
          All have a dimension `orientation`, after `prompt`, if there are two;
        - `singular_values`, `[prompt layer singular_value]`;
        - `line_shape_score`, `expodistance`, `equidistance` of the token at `position`,
          `[prompt]`, and their mean over all tokens, `…_all_tokens`;
          `windowed_line_shape_score`, `[prompt window]`, mean over all tokens;
        - by depth, the median over tokens (one attention sink can be longer than all
          others together): `norm` and `logit_lens_entropy` (NaN for a model without
          logits), `[prompt depth]`; `step_length` and `line_shape_score_by_depth`,
          `[prompt layer]`;
        - `n_pos`, `[prompt]`: number of tokens; `remarks`: anything unusual about the
          trace, a line each;
        - `loss`: mean negative log-likelihood of the prompt's tokens given those
          before, in nats; NaN for one token.

    Cost: for each prompt, a trace, `depth_coupling`, and an unembedding at every depth.

    Example:
        >>> data = tlc.surveys.measure_prompts(model, ["w1 w2 w3", "w4 w5"], tlc.Settings(k=(2, 4)))
        >>> dict(data.coupling.sizes)
        {'prompt': 2, 'k': 2, 'layer': 2, 'other_layer': 2}
    """
    chosen, settings = as_prompts(prompts), settings or Settings()

    def of_prompt(traced: Trace) -> "xarray.Dataset":
        how = settings.largest(traced.d_model), settings.position, settings.orientations
        # `iter` shows no bar: there is one for the prompts.
        return measures(
            traced, settings, *depth_couplings(traced, *how, progress=iter).values()
        )

    return of_each_prompt(model, chosen, settings, of_prompt, progress)


def of_each_prompt(
    model: nn.Module,
    chosen: Sequence[Prompt],
    settings: Settings,
    measure: "Callable[[Trace], xarray.Dataset]",
    progress: Progress | None,
) -> "xarray.Dataset":
    """What `measure` finds in each traced prompt, along the dimension `prompt`; errors
    name the prompt.
    """
    import xarray

    _check_kinds(model, chosen)
    _check_lengths(model, chosen, settings)
    measured = []
    for prompt in with_progress(chosen, progress, "prompts"):
        with _errors_of(prompt):
            traced = trace(
                model,
                prompt,
                prepend_bos=settings.prepend_bos,
                final_norm=settings.final_norm,
            )
            measured.append(measure(traced))
    data = xarray.concat(measured, "prompt", combine_attrs="drop_conflicts")
    return data.assign_coords(
        prompt=[p.id for p in chosen], task=("prompt", [p.task or "" for p in chosen])
    )


@contextmanager
def _errors_of(prompt: Prompt) -> Iterator[None]:
    """Errors in the block name the prompt."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from error


def _check_kinds(model: Any, prompts: Sequence[Prompt]) -> None:
    """Raise on texts for a model that reads images, and on images for one that reads
    text.

    A text that names a file would be opened, and results hold the checksum of an image
    only where it is one.
    """
    # If it is not a model, `trace` says so.
    if not hasattr(model, "cfg"):
        return
    wants_images = reads_pixels(model)
    for prompt in prompts:
        if wants_images and prompt.image is None:
            raise ValueError(
                f"prompt {prompt.id!r} is a text, {prompt.prompt[:80]!r}, and this model reads images: give "
                "Prompt(id, image=FILE)"
            )
        if prompt.image is not None and not wants_images:
            raise ValueError(
                f"prompt {prompt.id!r} is an image, and this model reads text: give Prompt(id, text), or a vision model"
            )


def _check_lengths(model: Any, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Raise on prompts longer than the model's context, before hours are spent on the
    others.
    """
    # If it is not a model, `trace` says so.
    if (n_ctx := context_length(model) if hasattr(model, "cfg") else None) is None:
        return
    lengths = {}
    for prompt in prompts if not reads_pixels(model) else ():
        with _errors_of(prompt):
            lengths[prompt.id] = len(
                tokenize(model, prompt.prompt, settings.prepend_bos)[0]
            )
    if too_long := [
        f"{name!r} ({length})" for name, length in lengths.items() if length > n_ctx
    ]:
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts have more tokens than this model's context holds, {n_ctx}: "
            f"{', '.join(too_long[:5])}{', …' if len(too_long) > 5 else ''}; shorten them or leave them out"
        )


def loss(traced: Trace) -> float:
    """Mean negative log-likelihood of each token given those before it, in nats; NaN
    for one token, or an image.
    """
    if traced.tokens is None or traced.n_pos < 2:
        return float("nan")
    logits = traced.logits(traced.residual[-1, :-1], normalised=traced.final_norm)
    return float(
        torch.nn.functional.cross_entropy(logits, traced.tokens[1:].to(logits.device))
    )


def _loss_where_known(traced: Trace) -> float:
    """`loss`; NaN for a model whose checkpoint has no head, which is among the trace's
    remarks.
    """
    return float("nan") if missing_head(traced.model) else loss(traced)


def measures(traced: Trace, settings: Settings, *maps: CouplingMap) -> "xarray.Dataset":
    """Every measure of one prompt, from its coupling maps, one for each orientation."""
    result, coupled = maps[0], of_maps(maps, settings)
    variables: dict[str, Any] = {
        "singular_values": (
            ("layer", "singular_value"),
            result.singular_values.cpu().numpy(),
        )
    }
    t = traced.position_index(settings.position)
    for shape in (line_shape_score, expodistance, equidistance):
        of_tokens = shape(traced.residual)
        variables |= {
            shape.__name__: float(of_tokens[t]),
            f"{shape.__name__}_all_tokens": float(of_tokens.nanmean()),
        }
    window = min(settings.window, traced.n_layers - 1 + traced.n_layers % 2)
    windowed = line_shape_score(traced.residual, window).nanmean(1).cpu().numpy()
    variables |= {"windowed_line_shape_score": ("window", windowed)}
    variables |= {"loss": _loss_where_known(traced), "n_pos": traced.n_pos}
    variables |= _by_depth(traced)
    variables["remarks"] = "\n".join(traced.provenance["remarks"])
    # The layer in the middle of each window.
    coords = {
        "singular_value": range(1, result.k + 1),
        "window": np.arange(len(windowed)) + window // 2,
    }
    coords["depth"] = range(traced.n_layers + 1)
    provenance = {
        key: value
        for key, value in result.provenance.items()
        if key not in _OF_ONE_PROMPT | _OF_ITS_FILES
    }
    if image := result.provenance.get("image"):
        provenance["preprocessing"] = image["preprocessing"]
    attrs = {"window": window, "provenance": json.dumps(provenance)}
    return coupled.assign(variables).assign_coords(coords).assign_attrs(attrs)


def of_maps(maps: Sequence[CouplingMap], settings: Settings) -> "xarray.Dataset":
    """What `_of_map` says of the maps of one prompt, one for each orientation; two make
    a dimension.
    """
    import xarray

    found, orientations = (
        [_of_map(one, settings) for one in maps],
        [one.orientation for one in maps],
    )
    attrs = found[0].attrs | {"orientation": ", ".join(orientations)}
    both = (
        xarray.concat(found, "orientation").assign_coords(orientation=orientations)
        if len(maps) > 1
        else found[0]
    )
    return both.assign_attrs(attrs)


def _of_map(result: CouplingMap, settings: Settings) -> "xarray.Dataset":
    """The measures of one map of layers, their means over pairs, and their nulls."""
    import xarray

    ks, layers = settings.k, list(result.row_layers)
    coords = {
        "k": list(ks),
        "layer": layers,
        "other_layer": layers,
        "distance": range(len(layers)),
    }
    variables: dict[str, Any] = {}
    for name in settings.measures:
        measure = MEASURES[name]
        if measure.takes_options:
            measure = measure_named(name, p=settings.p, absolute=settings.absolute)
        values = np.stack([result.values(k, measure).cpu().numpy() for k in ks])
        # A model of one block has no pairs of different ones.
        has_mean, off = settings.diagonal or len(layers) > 1, not settings.diagonal
        means = [result.mean(k, measure, off) if has_mean else float("nan") for k in ks]
        nulls = [result.null(k, measure, off_diagonal=off) for k in ks]
        variables |= {
            name: (("k", "layer", "other_layer"), values),
            mean_name(name): ("k", means),
        }
        variables[null_name(name)] = ("k", nulls)
    variables["locality"] = (
        ("k", "distance"),
        np.stack([result.locality_profile(k).cpu().numpy() for k in ks]),
    )
    # netCDF has no booleans.
    attrs = {
        "diagonal": int(settings.diagonal),
        "p": settings.p,
        "absolute": int(settings.absolute),
    }
    return xarray.Dataset(variables, coords, attrs)


def _by_depth(traced: Trace) -> dict[str, Any]:
    """How the stream grows, bends and comes to say something: of each, the median over
    tokens.
    """
    x = traced.residual
    of_tokens = {
        "step_length": step_lengths(x),
        "line_shape_score_by_depth": line_shape_score_by_depth(x),
    }
    of_tokens |= {
        "norm": norms(x),
        "logit_lens_entropy": torch.full(x.shape[:2], torch.nan, device=x.device),
    }
    # Not every model has logits.
    with suppress(ValueError):
        of_tokens["logit_lens_entropy"] = entropy_by_depth(traced)
    medians = {
        name: values.double().nanquantile(0.5, dim=1).cpu().numpy()
        for name, values in of_tokens.items()
    }
    return {
        name: ("layer" if len(value) == traced.n_layers else "depth", value)
        for name, value in medians.items()
    }
