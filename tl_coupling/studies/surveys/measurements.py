"""Every measure of one model on a set of prompts, as one dataset."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace, trace
from tl_coupling.comparisons import depth_coupling_by_orientation
from tl_coupling.measures import Metric, stream_metric
from tl_coupling.models import context_length, reads_pixels, tokenize
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompt, Prompts, as_prompts, naming_prompt
from tl_coupling.studies.surveys.kept import KeptPrompts
from tl_coupling.studies.surveys.settings import Settings
from tl_coupling.studies.surveys.variables import (
    carried_by_branch,
    measures,
    products_of_blocks,
)

if TYPE_CHECKING:
    import xarray

# Prompts that an error names.
_MOST_NAMED = 5


@checked
def measure_prompts(
    model: nn.Module,
    prompts: Prompts,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Return every measure of one model for every prompt.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, which get the ids "0", "1", …, or `Prompt` objects.
        settings: how they are measured.
        progress: wraps the loop over prompts; by default a bar in a terminal or
            notebook, False for none.

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
        - with `Settings(dynamics=True)`, of the product of the blocks up to each layer,
          `[prompt layer]`: `log_largest`, `alignment_gain` with its ends
          `alignment_gain_low` and `alignment_gain_high`, `product_participation_ratio`
          and its mean over conjugated products, `null_product_participation_ratio`;
        - with `Settings(carriers=True)`, of attention, MLP and the MLP acting on
          attention, `[prompt layer branch]`: `carried_share` of the couplings'
          diagonals and `jacobian_share`, whose difference is the excess; and where its
          mean over layers lies with random singular vectors, `[prompt branch]`:
          `null_excess_low` and `null_excess_high`;
        - `n_pos`, `[prompt]`: number of tokens; `remarks`: anything unusual about the
          trace, a line each;
        - `loss`: mean negative log-likelihood of the prompt's tokens given those
          before, in nats; NaN for one token.

    Cost: for each prompt, a trace, `depth_coupling`, and an unembedding at every depth.

    Example:
        >>> settings = tlc.Settings(k=(2, 4))
        >>> data = tlc.surveys.measure_prompts(model, ["w1 w2 w3", "w4 w5"], settings)
        >>> dict(data.coupling.sizes)
        {'prompt': 2, 'k': 2, 'layer': 2, 'other_layer': 2}
    """
    return measured_prompts(
        model, as_prompts(prompts), settings or Settings(), progress
    )


def measured_prompts(
    model: nn.Module,
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Progress | None,
    kept: KeptPrompts | None = None,
) -> "xarray.Dataset":
    """Return what `measure_prompts` does; prompts that are `kept` are not measured
    again.
    """

    metric = None
    if settings.metric is not None:
        # The metric is that of all prompts, and so known only when each was traced
        # once.
        metric = stream_metric(_traced(model, prompt, settings) for prompt in prompts)

    def measure(traced: Trace) -> "xarray.Dataset":
        return _measure_prompt(traced, settings, metric)

    return measure_each_prompt(model, prompts, settings, measure, progress, kept)


def _traced(model: nn.Module, prompt: Prompt, settings: Settings) -> Trace:
    with naming_prompt(prompt):
        return trace(
            model,
            prompt,
            prepend_bos=settings.prepend_bos,
            final_norm=settings.final_norm,
        )


def _measure_prompt(
    traced: Trace, settings: Settings, metric: Metric | None
) -> "xarray.Dataset":
    """Return every measure of one traced prompt; each Jacobian is computed once."""
    maps = depth_coupling_by_orientation(
        traced,
        settings.largest(traced.d_model),
        settings.position,
        settings.orientations,
        without=settings.without,
        metric=metric,
        method=settings.method,
        batch=settings.batch,
        # `iter` shows no bar: there is one for the prompts.
        progress=iter,
    )
    data = measures(traced, settings, *maps.values())
    if settings.dynamics:
        data = data.assign(products_of_blocks(traced, settings.position))
    if settings.carriers:
        data = data.merge(carried_by_branch(traced, settings))
    return data


def measure_each_prompt(
    model: nn.Module,
    prompts: Sequence[Prompt],
    settings: Settings,
    measure: "Callable[[Trace], xarray.Dataset]",
    progress: Progress | None,
    kept: KeptPrompts | None = None,
) -> "xarray.Dataset":
    """Return what `measure` gives of each traced prompt, along a dimension `prompt`.

    Errors name the prompt. Prompts that are `kept` are not measured again, and others
    are kept.
    """
    import xarray

    # If it is not a model, `trace` says so.
    if hasattr(model, "cfg"):
        _check_kinds(model, prompts)
        _check_lengths(model, prompts, settings)

    def measure_prompt(prompt: Prompt) -> "xarray.Dataset":
        traced = _traced(model, prompt, settings)
        with naming_prompt(prompt):
            return measure(traced)

    # `map` is lazy: each prompt is measured when it is asked for, so that `kept` can
    # write it before the next.
    missing = prompts if kept is None else kept.missing(prompts)
    watched = with_progress(missing, progress, "prompts")
    measured: Iterator[xarray.Dataset] = map(measure_prompt, watched)
    if kept is not None:
        measured = kept.joined(prompts, missing, measured)
    prompt_datasets = list(measured)
    # The provenance that all prompts share stays.
    data = xarray.concat(prompt_datasets, "prompt", combine_attrs="drop_conflicts")
    ids = [prompt.id for prompt in prompts]
    tasks = [prompt.task or "" for prompt in prompts]
    return data.assign_coords(prompt=ids, task=("prompt", tasks))


def _check_kinds(model: nn.Module, prompts: Sequence[Prompt]) -> None:
    """Raise on texts for a model that reads images, and on images for one of text.

    A text that names a file would be opened, and results hold the checksum of an image
    only where it is one.
    """
    reads_images = reads_pixels(model)
    for prompt in prompts:
        if reads_images and prompt.image is None:
            raise ValueError(
                f"prompt {prompt.id!r} is a text, {prompt.text[:80]!r}, "
                "and this model reads images: give Prompt(image=FILE)"
            )
        if prompt.image is not None and not reads_images:
            raise ValueError(
                f"prompt {prompt.id!r} is an image, and this model reads text: "
                "give Prompt(text), or a vision model"
            )


def _check_lengths(
    model: nn.Module, prompts: Sequence[Prompt], settings: Settings
) -> None:
    """Raise on prompts that are too long, before hours are spent on the others."""
    n_ctx = context_length(model)
    if n_ctx is None or reads_pixels(model):
        return
    too_long = []
    for prompt in prompts:
        content = prompt.content
        # Of a model that reads text, all are texts or token ids.
        assert not isinstance(content, Path)
        with naming_prompt(prompt):
            tokens = tokenize(model, content, settings.prepend_bos)[0]
        if len(tokens) > n_ctx:
            too_long.append(f"{prompt.id!r} ({len(tokens)})")
    if too_long:
        named = ", ".join(too_long[:_MOST_NAMED])
        more = ", …" if len(too_long) > _MOST_NAMED else ""
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts have more tokens than this "
            f"model's context holds, {n_ctx}: {named}{more}; "
            "shorten them or leave them out"
        )
