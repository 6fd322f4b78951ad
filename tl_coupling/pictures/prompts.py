"""Draw coupling across prompts."""

import numpy as np
from matplotlib.axes import Axes

from tl_coupling.arguments import checked
from tl_coupling.comparisons import PromptCoupling, PromptMeasure
from tl_coupling.pictures import labels
from tl_coupling.results import RANDOM_BASES

_OVERLAPS = {
    "write_overlap": "overlap of write directions",
    "read_overlap": "overlap of read directions",
}
# In characters; longer names of rows would push the map aside.
_LONGEST_NAME = 24


@checked
def plot_prompt_coupling(
    result: PromptCoupling,
    *,
    untrained: PromptCoupling | None = None,
    k: int | None = None,
    measure: PromptMeasure = "coupling",
    ax: Axes | None = None,
) -> Axes:
    """Draw by layer how far every two prompts share a layer's axes.

    Read off whether the axes are the model's (near 1) or the prompt's (near the dashed
    null, random bases with the same singular values; in the grey band lie 95 % of the
    means that they give). Thin lines are pairs of prompts, the thick line is their
    mean. What lies above the untrained twin, in vermilion, was learnt: two Jacobians of
    one random block are alike to some degree, too.

    Args:
        result: of at least two prompts.
        untrained: the same prompts and layers of the untrained twin.
        k: how many top singular vectors; as many as the result holds by default.
        measure: as in `PromptCoupling.values`.
        ax: where to draw; a new figure by default.

    Returns the Axes. Raises ValueError for a k that a result does not hold, and for a
    twin of other layers.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> ax = tlc.plots.plot_prompt_coupling(tlc.prompt_coupling(traces, k=4))
    """
    if untrained is not None and untrained.layers != result.layers:
        raise ValueError(
            f"`untrained` must be of the layers of `result`, {list(result.layers)}, "
            f"got {list(untrained.layers)}"
        )
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    k = result.k if k is None else k
    if untrained is not None:
        _draw(ax, untrained, k, measure, labels.UNTRAINED, "untrained")
    name = "mean of pairs" if untrained is None else "trained"
    _draw(ax, result, k, measure, labels.TRAINED, name)
    # Layers have different nulls: random bases get the singular values of the layer.
    nulls = result.null_by_layer(k, measure).numpy()
    ax.plot(result.layers, nulls, label=RANDOM_BASES, **labels.NULL_LINE)
    intervals = result.null_interval_by_layer(k, measure).numpy()
    labels.draw_null_band(ax, result.layers, *intervals.T)
    ax.set_xlabel("layer")
    ax.set_ylabel(_label(measure))
    ax.set_ylim(bottom=0)
    subject = f"Across {result.n_prompts} prompts · k = {k}"
    title = labels.heading(subject, [result.provenance])
    below = labels.BELOW | {"bbox_to_anchor": (0.5, -0.18), "ncols": 2}
    labels.finish_lines(ax, title, **below)
    return ax


@checked
def plot_prompt_map(
    result: PromptCoupling,
    *,
    layer: int | None = None,
    k: int | None = None,
    measure: PromptMeasure = "coupling",
    ax: Axes | None = None,
) -> Axes:
    """Draw how far every two prompts share axes as a heat map.

    Read off which prompts are alike: rows are the prompts of the Jacobian, columns
    those of the singular vectors. Grey are prompts with themselves, which say nothing.
    The mark on the colour bar is the null.

    Args:
        result: of at least two prompts.
        layer: one of the result's layers; the mean over all by default.
        k, measure, ax: as in `plot_prompt_coupling`.

    Returns the Axes; the heat map is its only image. Raises ValueError for a layer or k
    that the result does not hold.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> ax = tlc.plots.plot_prompt_map(tlc.prompt_coupling(traces, k=4), layer=1)
    """
    values = result.values(k, measure).detach().cpu().double().numpy()
    nulls = result.null_by_layer(k, measure).double().numpy()
    scope = "mean over layers"
    if layer is None:
        shown = values.mean(0)
        null = float(nulls.mean())
    else:
        if layer not in result.layers:
            raise ValueError(
                f"`layer` must be one of the result's, {list(result.layers)}, "
                f"got {layer}"
            )
        place = result.layers.index(layer)
        shown = values[place]
        null = float(nulls[place])
        scope = f"layer {layer}"
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.2, "compressed").subplots()
    is_own = np.eye(result.n_prompts, dtype=bool)
    drawn = np.where(is_own, np.nan, shown)
    # The null counts for the scale, as its mark must be on the bar.
    image = ax.imshow(drawn, vmin=0, vmax=max(np.nanmax(drawn), null))
    ax.set_facecolor(labels.UNDEFINED)
    names = [_short(prompt) for prompt in result.prompts]
    labels.name_ticks(ax.yaxis, names, labels.MAX_TOKEN_TICKS)
    labels.name_ticks(ax.xaxis, names, labels.MAX_TOKEN_TICKS, rotation=30, ha="right")
    ax.set_ylabel("whose Jacobian")
    ax.set_xlabel("whose singular vectors")
    bar = ax.figure.colorbar(image, ax=ax, label=_label(measure)).ax
    labels.mark_and_name_null(bar, null)
    k = result.k if k is None else k
    subject = f"Across prompts · {scope} · k = {k}"
    labels.entitle(ax, labels.heading(subject, [result.provenance]))
    return ax


def _draw(
    ax: Axes,
    result: PromptCoupling,
    k: int,
    measure: PromptMeasure,
    color: str,
    name: str,
) -> None:
    """Draw a thin line for every pair of prompts, and a thick one for the mean."""
    values = result.values(k, measure).detach().cpu().double().numpy()
    # `[n_layers n_pairs]`, both orders of a pair.
    pairs = values[:, ~np.eye(result.n_prompts, dtype=bool)]
    ax.plot(result.layers, pairs, color=color, linewidth=0.5, alpha=0.25)
    mean = result.by_layer(k, measure).detach().cpu().double().numpy()
    look = labels.marked(color, len(result.layers)) | {"linewidth": 2}
    ax.plot(result.layers, mean, label=name, **look)


def _label(measure: PromptMeasure) -> str:
    """Return a measure in words."""
    if measure == "write_overlap" or measure == "read_overlap":
        return _OVERLAPS[measure]
    return labels.short_measure(measure)


def _short(prompt: str) -> str:
    """Return the end of a prompt, where its last token is."""
    prompt = " ".join(prompt.split())
    if len(prompt) <= _LONGEST_NAME:
        return prompt
    return "…" + prompt[-_LONGEST_NAME + 1 :].lstrip()
