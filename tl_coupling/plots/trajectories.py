"""Trajectories: in two dimensions, their shape against depth, and how far linear blocks and noise explain them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import Count, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.plots.labels import by_name, finish_lines, heading, named, new_figure, own_axes, token_name
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.trajectories import (
    Linearisation,
    Perturbation,
    line_shape_score,
    line_shape_score_by_depth,
    norms,
    step_lengths,
    trajectory_pca,
)
from tl_coupling.trajectories.shapes import Window

View = Literal["all", "shallow", "deep"]

# A token that serves as attention sink is tens to hundreds of times as long as the others: no scale holds both.
_SINK = 10.0
_MAX_LEGEND_TOKENS = 24


@checked
def plot_trajectories(
    trace: Trace,
    *,
    views: Sequence[View] = ("all", "shallow", "deep"),
    positions: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Tokens' paths through the residual stream in the two principal components of the last depth.

    Read off whether tokens leave on straight lines, and where they part: a ring is where a token enters the panel's
    layers, a dot where it leaves them; the last token is black. All panels have the same axes, at different scales.

    Args:
        trace: a traced prompt.
        views: a panel for each: "all" depths, the "shallow" half of them, the "deep" half.
        positions: which tokens, for the components and the picture. By default all but attention sinks, tokens whose
            norm somewhere exceeds ten times that of the median token; the title names them.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; an Axes for each view, whose lines are the tokens in their order, then the marks of each.

    Raises:
        ValueError: an unknown view or none, a position out of range, fewer than two tokens to draw.
    """
    if not views:
        raise ValueError("`views` is empty: wanted at least one")
    chosen, left_out = _chosen(positions, [trace])
    if len(chosen) < 2:
        raise ValueError(f"principal components want at least 2 tokens, got positions {chosen}: give a longer prompt")
    pca = trajectory_pca(trace.residual[:, chosen])
    path = pca.projected.detach().cpu().numpy()
    shares = pca.explained_variance_ratio.tolist()

    n = trace.n_layers
    spans = {"all": (0, n), "shallow": (0, max(1, n // 2)), "deep": (n // 2, n)}
    shades = colormaps["viridis"](np.linspace(0.05, 0.95, len(chosen)))
    colors = ["black" if t == trace.n_pos - 1 else tuple(shades[i]) for i, t in enumerate(chosen)]
    fig = new_figure(4.0 * len(views) + 1.6, 4.6) if fig is None else fig
    for ax, view in zip(fig.subplots(1, len(views), squeeze=False)[0], views, strict=True):
        first, last = spans[view]
        for i, t in enumerate(chosen):
            x, y = path[first : last + 1, i].T
            front = {"zorder": 4 if t == trace.n_pos - 1 else 3}
            ax.plot(x, y, color=colors[i], linewidth=1.2, label=token_name(trace.provenance, t), **front)
            ax.plot(x[0], y[0], "o", color=colors[i], markerfacecolor="none", markersize=5, **front)
            ax.plot(x[-1], y[-1], "o", color=colors[i], markersize=4, **front)
        ax.set_title(f"{view}: depth {first} to {last}", fontsize="medium")
        ax.set_xlabel(f"PC 1 ({shares[0]:.0%} of the last depth's variance)", fontsize="small")
        ax.set_ylabel(f"PC 2 ({shares[1]:.0%})", fontsize="small")
        ax.tick_params(labelsize="small")
        ax.locator_params(nbins=6)
    if len(chosen) <= _MAX_LEGEND_TOKENS:
        # One line a token: the marks have names that begin with an underscore.
        legend = fig.legend(
            *ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small"
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    what = " · ".join(["Trajectories", *_without(left_out, trace)])
    fig.suptitle(heading(what, [trace.provenance]), fontsize="medium", parse_math=False)
    return fig


@checked
def plot_trajectory_metrics(
    traces: Trace | Mapping[str, Trace],
    *,
    window: Window = 11,
    positions: Sequence[int] | None = None,
    entropies: Float[Tensor, "n_depths n_pos"] | Mapping[str, Float[Tensor, "n_depths n_pos"]] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Norms, step lengths and line-shape scores against depth: the mean over tokens, and each token faintly.

    Read off how the stream grows, and how straight tokens go: a line-shape score of 1 is a straight line, the dashed
    line is what steps in random directions score, √(number of steps).

    Args:
        traces: traces by name, of one prompt; or one.
        window: how many steps the windowed score covers, odd; fewer where a model has fewer layers.
        positions: which tokens. By default all but attention sinks, tokens whose norm somewhere exceeds ten times that
            of the median token, in any of the traces; the title names them.
        entropies: of the logit lens, for a fifth panel: `logit_lens_entropy(trace.residual, …)`, by name like `traces`.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; its Axes are norm, step length, windowed score, score of the first steps, entropy.

    Raises:
        ValueError: no trace, traces of different prompts, a position out of range, a window that is even or below 1,
            entropies of other traces or another shape.
    """
    by = named(traces, Trace)
    first = next(iter(by.values()))
    if any(trace.tokens.tolist() != first.tokens.tolist() for trace in by.values()):
        raise ValueError("`traces` must be of one prompt, so that tokens and their means compare; got different ones")
    chosen, left_out = _chosen(positions, list(by.values()))
    if not chosen:
        raise ValueError("`positions` is empty: wanted at least one token")
    lens = _entropies(entropies, by)
    # A shallow model takes the largest odd window that it fills.
    windows = {name: min(window, trace.n_layers - 1 + trace.n_layers % 2) for name, trace in by.items()}

    n_panels = 4 if lens is None else 5
    fig = new_figure(3.1 * n_panels, 4.2) if fig is None else fig
    panels = fig.subplots(1, n_panels)
    for number, (name, trace) in enumerate(by.items()):
        x, color = trace.residual[:, chosen], f"C{number}"
        _with_mean(panels[0], norms(x), 0, color, name)
        _with_mean(panels[1], step_lengths(x), 0, color, name)
        _with_mean(panels[2], line_shape_score(x, window=windows[name]), windows[name] // 2, color, name)
        _with_mean(panels[3], line_shape_score_by_depth(x), 0, color, name)
        if lens is not None:
            _with_mean(panels[4], lens[name][:, chosen], 0, color, name)
    for width in sorted(set(windows.values())):
        panels[2].axhline(width**0.5, color="0.4", linestyle="--", linewidth=1, label=f"random steps, {width**0.5:.2f}")
    n_steps = np.arange(1, max(trace.n_layers for trace in by.values()) + 1)
    panels[3].plot(n_steps - 1, n_steps**0.5, color="0.4", linestyle="--", linewidth=1, label="random steps")

    widths = ", ".join(str(width) for width in sorted(set(windows.values())))
    words = [
        ("norm", "depth", "‖x‖"),
        ("step length", "layer", "‖step‖"),
        (f"line-shape score, {widths} steps", "middle layer", "LSS"),
        ("line-shape score so far", "up to layer", "LSS"),
        ("logit-lens entropy", "depth", "nats"),
    ]
    for ax, (name, below, left) in zip(panels, words[:n_panels], strict=True):
        ax.set(xlabel=below, ylabel=left)
        finish_lines(ax, name)
        ax.legend_.remove()
    for ax in panels[:2]:
        ax.set_yscale("log", nonpositive="mask")
    for ax in panels[2:4]:
        ax.set_ylim(bottom=1)
    legend = fig.legend(*panels[3].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    what = " · ".join(["Trajectories, mean over tokens and each token", *_without(left_out, first)])
    fig.suptitle(heading(what, [trace.provenance for trace in by.values()]), fontsize="medium", parse_math=False)
    return fig


@checked
def plot_linearisation(results: Linearisation | Mapping[str, Linearisation], *, fig: Figure | None = None) -> Figure:
    """Errors and directions of the linear predictions of a trajectory, against depth.

    Read off whether a linearised block says more about the step than no block at all: a solid line has to lie below the
    dotted one of its colour (relative error, above), or above it (cosine similarity, below). On the left each step
    starts from the true stream, on the right only the first one does.

    Args:
        results: linearisations by name; or one.
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; its four Axes are relative error and cosine similarity (rows) of one step and of the compounded
        predictions (columns).

    Raises:
        ValueError: no result.
    """
    by = named(results, Linearisation)
    fig = new_figure(10.5, 6.8) if fig is None else fig
    panels = fig.subplots(2, 2, sharex=True)
    columns: list[list[tuple[Any, str, str]]] = [
        [("one_step", "-", "(I + J) x of the layer before"), ("previous", ":", "x of the layer before, unchanged")],
        [
            ("product", "-", "product of the (I + J)"),
            ("closed_form", "--", "closed form"),
            ("input", ":", "x⁰ unchanged"),
        ],
    ]
    for number, (name, result) in enumerate(by.items()):
        for col, lines in enumerate(columns):
            for prediction, style, words in lines:
                if prediction == "closed_form" and result.closed_form is None:
                    continue
                look = {"color": f"C{number}", "linestyle": style, "linewidth": 1.4, "label": f"{name}: {words}"}
                panels[0, col].plot(result.relative_error(prediction).cpu().numpy(), **look)
                panels[1, col].plot(result.cosine_similarity(prediction).cpu().numpy(), **look)
    for ax, name in zip(panels[0], ("one step from the true stream", "compounded from the input"), strict=True):
        ax.set_yscale("log", nonpositive="mask")
        ax.axhline(1, color="0.8", linewidth=1, zorder=0)
        ax.set_title(name, fontsize="medium")
    for ax in panels[1]:
        ax.axhline(0, color="0.8", linewidth=1, zorder=0)
        ax.set(xlabel="after layer")
        ax.set_ylim(top=1.03)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend = ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16))
        for text in legend.get_texts():
            text.set_parse_math(False)
    panels[0, 0].set_ylabel("relative error")
    panels[1, 0].set_ylabel("cosine similarity")
    tokens = {token_name(result.provenance, result.position) for result in by.values()}
    bases = {result.reference_layer for result in by.values() if result.closed_form is not None}
    what = "Linearised trajectory" + (f" · closed form with U of layer {bases.pop()}" if len(bases) == 1 else "")
    fig.suptitle(heading(what, [r.provenance for r in by.values()], tokens), fontsize="medium", parse_math=False)
    return fig


@checked
def plot_perturbation(results: Perturbation | Mapping[str, Perturbation], *, ax: Axes | None = None) -> Axes:
    """Similarity of a noisy token to the clean one against the size of the noise, where it enters and where it leaves.

    Read off whether the blocks undo noise (the solid line, after the last layer, lies above the dashed one, before the
    first) or spread it.

    Args:
        results: perturbations by name; or one.
        ax: where to draw; a Figure of its own by default.

    Returns:
        the Axes; for each result its lines are the means before the first layer and after the last, in this order, and
        the samples after the last as points.

    Raises:
        ValueError: no result.
    """
    by = named(results, Perturbation)
    ax = own_axes(6.4, 4.6) if ax is None else ax
    for number, (name, result) in enumerate(by.items()):
        order = np.argsort(result.scales)
        scales = np.asarray(result.scales)[order]
        mean = result.mean.cpu().numpy()[order]
        color = f"C{number}"
        ax.plot(scales, mean[:, 0], "--", color=color, label=f"{name}, before the first layer")
        ax.plot(scales, mean[:, -1], "-", color=color, marker="o", markersize=3, label=f"{name}, after the last layer")
        samples = result.cosine_similarity[..., -1].cpu().numpy()[order]
        ax.plot(np.repeat(scales, samples.shape[1]), samples.ravel(), ".", color=color, alpha=0.25, label="_samples")
    finish_lines(
        ax,
        heading(
            "Noise in a token's embedding",
            [result.provenance for result in by.values()],
            {token_name(result.provenance, result.position) for result in by.values()},
        ),
    )
    # Scale 0 has no place on a logarithmic axis.
    ax.set_xscale("log" if all(min(result.scales) > 0 for result in by.values()) else "linear")
    ax.axhline(0, color="0.8", linewidth=1, zorder=0, label="_zero")
    ax.set(xlabel="size of the noise / size of the embedding", ylabel="cosine similarity to the clean token")
    ax.set_ylim(top=1.03)
    return ax


@checked
def plot_inverse_singular_values(
    results: CouplingMap | Mapping[str, CouplingMap], *, n: Count = 3, ax: Axes | None = None
) -> Axes:
    """`1/σ_k` of the Jacobians against depth, with the least-squares line of each k.

    Read off whether singular values scale inversely with depth, as in residual networks trained to classify: then the
    points lie on their line and R² is near 1.

    Args:
        results: maps of kind "depth", by name; or one.
        n: how many singular values, from the largest; fewer where a map holds fewer.
        ax: where to draw; a Figure of its own by default.

    Returns:
        the Axes; for each result and each k its lines are the points and the fit, in this order.

    Raises:
        ValueError: no map, a map of tokens or of fewer than two layers, n below 1.
    """
    maps = by_name(results)
    ax = own_axes(7.2, 4.8) if ax is None else ax
    for number, (name, result) in enumerate(maps.items()):
        S, layers = result.singular_values[:, :n], np.asarray(result.row_layers)
        fit = inverse_singular_value_fit(S, result.row_layers)
        ends = np.array([layers.min(), layers.max()])
        for i in range(S.shape[1]):
            look: dict[str, Any] = {"color": f"C{number}", "alpha": 1 - 0.6 * i / max(1, S.shape[1] - 1)}
            label = f"{name}, σ_{i + 1}: R² = {float(fit.r_squared[i]):.2f}"
            ax.plot(layers, (1 / S[:, i]).cpu().numpy(), "osD^v"[i % 5], markersize=3.5, label=label, **look)
            line = float(fit.intercept[i]) + float(fit.slope[i]) * ends
            ax.plot(ends, line, "-", linewidth=1.2, label="_fit", **look)
    ax.set(xlabel="layer", ylabel="1 / singular value of J")
    ax.set_ylim(bottom=0)
    tokens = {token_name(result.provenance, result.row_positions[0]) for result in maps.values()}
    finish_lines(ax, heading("Inverse singular values", [result.provenance for result in maps.values()], tokens))
    return ax


def _chosen(positions: Sequence[int] | None, traces: Sequence[Trace]) -> tuple[list[int], list[int]]:
    """Positions to draw, and those that were left out as attention sinks."""
    if positions is not None:
        return [traces[0].position_index(position, "positions") for position in positions], []
    largest = torch.stack([norms(trace.residual.cpu()).amax(0) for trace in traces])
    sinks = (largest > _SINK * largest.median(1, keepdim=True).values).any(0)
    every = range(traces[0].n_pos)
    return [t for t in every if not sinks[t]], [t for t in every if sinks[t]]


def _without(left_out: list[int], trace: Trace) -> list[str]:
    """What the title says of tokens that are not there."""
    if not left_out:
        return []
    names = ", ".join(token_name(trace.provenance, t) for t in left_out)
    return [f"without attention sink{'s' if len(left_out) > 1 else ''}: token {names}"]


def _entropies(given: Tensor | Mapping[str, Tensor] | None, traces: Mapping[str, Trace]) -> dict[str, Tensor] | None:
    if given is None:
        return None
    by = dict(given) if isinstance(given, Mapping) else {next(iter(traces)): given}
    shapes = {name: (trace.n_layers + 1, trace.n_pos) for name, trace in traces.items()}
    if {name: tuple(entropy.shape) for name, entropy in by.items()} != shapes:
        raise ValueError(
            f"`entropies` must be [n_layers+1 n_pos] for each of {list(traces)}, got "
            f"{ {name: list(entropy.shape) for name, entropy in by.items()} }"
        )
    return by


def _with_mean(ax: Axes, values: Tensor, start: int, color: str, name: str) -> None:
    """The tokens' lines, faintly, and their mean, against depth from `start`."""
    y = values.detach().cpu().numpy()
    depth = np.arange(start, start + len(y))
    ax.plot(depth, y, color=color, linewidth=0.7, alpha=0.3, label="_tokens")
    ax.plot(depth, y.mean(1), color=color, linewidth=1.8, label=name)
