"""How far linear blocks, noise and inverse singular values explain a trajectory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.pictures import labels
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.trajectories import Linearisation, Perturbation, TrajectoryResult

# Further down than usual: the label of the axis lies between.
_BELOW = labels.BELOW | {"borderaxespad": 4}
_MARKERS = tuple(labels.MARKERS.values())

_Part = TypeVar("_Part")
_Linear = Linearisation | TrajectoryResult
_Noisy = Perturbation | TrajectoryResult
_WithSingularValues = CouplingMap | Linearisation
_Inverted = _WithSingularValues | TrajectoryResult
_Prediction = Literal["one_step", "product", "closed_form", "previous", "input"]
# Each prediction's line style and name, by panel.
_PREDICTIONS: dict[str, dict[_Prediction, tuple[str, str]]] = {
    "one step": {
        "one_step": ("-", "(I + J) x"),
        "previous": (":", "x, no step"),
    },
    "all steps": {
        "product": ("-", "product of (I + J)"),
        "closed_form": ("--", "closed form"),
        "input": (":", "x⁰, no step"),
    },
}


@checked
def plot_linearisation(
    results: _Linear | Mapping[str, _Linear], *, fig: Figure | None = None
) -> Figure:
    """Draw errors and directions of a trajectory's linear predictions by depth.

    The picture shows whether a linearised block predicts the step better than no block
    at all: a solid line has to lie below the dotted one of its colour (relative error,
    above), or above it (cosine similarity, below). The titles of the upper panels say
    which is the better one, by its mean over the layers. On the left each step starts
    from the true stream, on the right only the first one does.

    Args:
        results: one linearisation or a result that holds one; or several by name.
        fig: the figure to draw in; a new one by default.

    Returns the Figure; its four Axes are relative error and cosine similarity (rows) of
    one step and of the compounded predictions (columns).

    Raises:
        ValueError: no result, or one without a linearisation.

    Example:
        >>> fig = tlc.plots.plot_linearisation(tlc.trajectories.linearisation(trace))
    """
    results_by_name = _parts(results, Linearisation, "linearisation")
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 6.8)
    panels = fig.subplots(2, 2, sharex=True)
    for (errors, cosines), (title, predictions) in zip(
        panels.T, _PREDICTIONS.items(), strict=True
    ):
        _draw_predictions(errors, cosines, results_by_name, predictions)
        points = [f"{title}: mean error against no step"]
        points += _points(results_by_name, predictions)
        # Half of the width has room for some thirty letters.
        lines = "\n".join(fill(point, 30) for point in points)
        errors.set_title(lines, fontsize="small", parse_math=False)
        # An error of 1 is that of predicting 0.
        errors.axhline(1, color="0.8", linewidth=1, zorder=0)
        cosines.axhline(0, color="0.8", linewidth=1, zorder=0)
        cosines.set_xlabel("after layer")
        cosines.xaxis.set_major_locator(MaxNLocator(integer=True))
        labels.plain_legend(cosines, **_BELOW)
    one_step, compounded = panels[0]
    # Errors of one step lie close together: a logarithmic axis would hide by how much
    # they differ.
    one_step.set_ylim(bottom=0)
    compounded.set_yscale("log", nonpositive="mask")
    one_step.set_ylabel("relative error")
    panels[1, 0].set_ylabel("cosine similarity")
    # Room for lines at 1; the other end depends on the model.
    for cosines in panels[1]:
        cosines.set_ylim(top=1.03)
    # The closed form takes its U from one layer, which the title names if all agree.
    title = "Linearised trajectory"
    reference_layers = {
        result.reference_layer
        for result in results_by_name.values()
        if result.closed_form is not None
    }
    if len(reference_layers) == 1:
        title += f" · closed form with U of layer {reference_layers.pop()}"
    labels.entitle(fig, _heading(title, results_by_name))
    return fig


def _draw_predictions(
    errors: Axes,
    cosines: Axes,
    results_by_name: Mapping[str, Linearisation],
    predictions: Mapping[_Prediction, tuple[str, str]],
) -> None:
    """Draw each prediction's error and direction."""
    for name, result, color in labels.assign_colors(results_by_name):
        for prediction, (line_style, text) in predictions.items():
            if prediction == "closed_form" and result.closed_form is None:
                continue
            look: dict[str, Any] = {
                "color": color,
                "linestyle": line_style,
                "linewidth": 1.4,
                "label": f"{name}: {text}",
            }
            errors.plot(result.relative_error(prediction).cpu().numpy(), **look)
            cosines.plot(result.cosine_similarity(prediction).cpu().numpy(), **look)


def _points(
    results_by_name: Mapping[str, Linearisation],
    predictions: Mapping[_Prediction, tuple[str, str]],
) -> Iterator[str]:
    """Yield what is to be seen of each result: linear prediction against no step."""
    is_one_step = "one_step" in predictions
    for name, result in results_by_name.items():
        linear = result.relative_error("one_step" if is_one_step else "product")
        no_step = result.relative_error("previous" if is_one_step else "input")
        error, plain_error = float(linear.mean()), float(no_step.mean())
        verdict = "better" if error < plain_error else "no better"
        if math.isnan(error - plain_error):
            verdict = "not known"
        yield f"{name}: {verdict}, {error:.2f} against {plain_error:.2f}"


@checked
def plot_perturbation(
    results: _Noisy | Mapping[str, _Noisy], *, ax: Axes | None = None
) -> Axes:
    """Draw how similar a noisy token is to the clean one, by the size of the noise.

    The picture shows whether the blocks undo noise (the solid line, after the last
    layer, lies above the dashed one, before the first) or amplify it.

    Args:
        results: one perturbation or a result that holds one; or several by name.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes; the lines of each result are the means before the first layer and
    after the last, then the samples after the last as points.

    Raises:
        ValueError: no result, one without a perturbation, or relative noise beside
            absolute.

    Example:
        >>> noisy = tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2)
        >>> ax = tlc.plots.plot_perturbation(noisy)
    """
    results_by_name = _parts(results, Perturbation, "perturbation")
    kinds_of_noise = {result.relative for result in results_by_name.values()}
    if len(kinds_of_noise) > 1:
        raise ValueError(
            "the noise of some results is relative, of others absolute: these have no "
            "axis in common"
        )
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.0).subplots()
    for number, (name, result, color) in enumerate(
        labels.assign_colors(results_by_name)
    ):
        dashes = _dashes_between(number, len(results_by_name))
        _draw_noise(ax, name, result, color, dashes)
    title = _heading("Noise in a token's embedding", results_by_name)
    labels.finish_lines(ax, title, ncols=len(results_by_name), **_BELOW)
    # Scale 0 has no place on a logarithmic axis.
    all_positive = all(min(result.scales) > 0 for result in results_by_name.values())
    ax.set_xscale("log" if all_positive else "linear")
    ax.axhline(0, color="0.8", linewidth=1, zorder=0, label="_zero")
    if kinds_of_noise.pop():
        ax.set_xlabel("size of the noise / size of the embedding")
    else:
        ax.set_xlabel("standard deviation of noise entries")
    ax.set_ylabel("cosine similarity to the clean token")
    ax.set_ylim(top=1.03)
    return ax


def _dashes_between(number: int, n_lines: int) -> tuple[float, tuple[float, float]]:
    """Return matplotlib's dashes of one of several lines, which leave room to the others.

    Relative noise of the same size moves every model's embedding about as far: lines
    before the first layer lie on each other, and one of them would hide the rest.
    """
    length = 3.0
    gap = length * max(1, n_lines - 1)
    return (length * number, (length, gap))


def _draw_noise(
    ax: Axes,
    name: str,
    result: Perturbation,
    color: str,
    dashes: tuple[float, tuple[float, float]],
) -> None:
    """Draw one result's means before the first layer and after the last, and samples."""
    # Scales may come in any order; a line goes from left to right.
    order = np.argsort(result.scales)
    scales = np.asarray(result.scales)[order]
    means = result.mean.cpu().numpy()[order]
    samples = result.cosine_similarity[..., -1].cpu().numpy()[order]
    label_before = f"{name}, before the first layer"
    label_after = f"{name}, after the last layer"
    ax.plot(scales, means[:, 0], linestyle=dashes, color=color, label=label_before)
    ax.plot(scales, means[:, -1], label=label_after, **labels.marked(color))
    ax.plot(
        np.repeat(scales, samples.shape[1]),
        samples.ravel(),
        ".",
        color=color,
        alpha=0.25,
        label="_samples",
    )


@checked
def plot_inverse_singular_values(
    results: _Inverted | Mapping[str, _Inverted],
    *,
    n: Count = 3,
    ax: Axes | None = None,
) -> Axes:
    """Draw `1/σ_k` of the Jacobians by depth, with the least-squares line of each k.

    The picture shows whether singular values scale inversely with depth, as in residual
    networks trained to classify: then the points lie on their line and R² is near 1.
    The lines are those of `inverse_singular_value_fit`.

    Args:
        results: maps of kind "depth", linearisations with their closed form, or results
            that hold one, by name; or one.
        n: how many singular values, from the largest; fewer where a result holds fewer.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes; the lines of each result and each k are the points, then the fit.

    Raises:
        ValueError: no result, one without singular values or of fewer than two layers,
            a map of tokens, or n below 1.

    Example:
        >>> ax = tlc.plots.plot_inverse_singular_values(tlc.depth_coupling(trace, k=8))
    """
    results_by_name = _parts(results, CouplingMap, "linearisation")
    ax = ax or labels.new_figure(labels.PHONE_WIDTH, 4.4).subplots()
    for name, result, color in labels.assign_colors(results_by_name):
        if result.singular_values is None:
            raise ValueError(
                f"{name!r} has no singular values: measure with `closed_form=True`"
            )
        # `[n_layers n]`, the largest first.
        S = result.singular_values[:, :n]
        _draw_inverses(ax, name, S, _layers(result), color)
    ax.set(xlabel="layer", ylabel="1 / singular value of J", ylim=(0, None))
    title = _heading("Inverse singular values", results_by_name)
    labels.finish_lines(ax, title, ncols=len(results_by_name), **_BELOW)
    return ax


def _layers(result: _WithSingularValues) -> Sequence[int]:
    if isinstance(result, CouplingMap):
        return result.row_layers
    return range(len(result.one_step))


def _draw_inverses(
    ax: Axes, name: str, S: Tensor, layers: Sequence[int], color: str
) -> None:
    """Draw one result's `1/σ_k`, `S` being `[n_layers k]`, and the line of each k."""
    fit = inverse_singular_value_fit(S, layers)
    ends = np.array([min(layers), max(layers)])
    n_drawn = S.shape[1]
    for i in range(n_drawn):
        # From full colour for σ_1 to 0.4 for the last.
        alpha = 1 - 0.6 * i / max(1, n_drawn - 1)
        ax.plot(
            layers,
            (1 / S[:, i]).cpu().numpy(),
            _MARKERS[i % len(_MARKERS)],
            markersize=3.5,
            label=f"{name}, σ_{i + 1}: R² = {float(fit.r_squared[i]):.2f}",
            color=color,
            alpha=alpha,
        )
        line = float(fit.intercept[i]) + float(fit.slope[i]) * ends
        ax.plot(ends, line, label="_fit", color=color, alpha=alpha)


def _parts(results: object, kind: type[_Part], part: str) -> dict[str, _Part]:
    """Return results by name; of a `TrajectoryResult`, the part of that name.

    Raises:
        ValueError: a result that was measured without the part.
    """
    results_by_name = labels.named(results, kind)
    for name, result in results_by_name.items():
        if isinstance(result, TrajectoryResult):
            results_by_name[name] = getattr(result, part)
    for name, result in results_by_name.items():
        if result is None:
            raise ValueError(f"{name!r} was measured without its {part}")
    return results_by_name


def _heading(
    title: str,
    results_by_name: Mapping[str, CouplingMap | Linearisation | Perturbation],
) -> str:
    """Return a title that names the token which the results are of."""
    positions = []
    for result in results_by_name.values():
        if isinstance(result, CouplingMap):
            if not result.is_mean_over_tokens:
                positions.append(result.row_positions[0])
        else:
            positions.append(result.position)
    provenances = [result.provenance for result in results_by_name.values()]
    return labels.heading(title, provenances, positions)
