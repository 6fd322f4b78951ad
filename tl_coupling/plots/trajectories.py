"""Trajectories: in two dimensions, their shape against depth, and how far linear blocks
and noise explain them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tl_coupling.arguments import Count, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.plots import labels
from tl_coupling.spectra import inverse_singular_value_fit
from tl_coupling.traces import Trace
from tl_coupling.trajectories import (
    Linearisation,
    Perturbation,
    TrajectoryResult,
    attention_sinks,
    trajectory_pca,
)
from tl_coupling.trajectories.result import measure_trajectory

_MAX_LEGEND_TOKENS = 16
# Relative errors beyond say no more than that a prediction is useless.
_MOST_ERROR = 100.0
_BELOW = labels.BELOW | {"borderaxespad": 4}
_Paths = Trace | Float[Tensor, "n_layers_plus_1 n_pos d_model"]
_Linear = Linearisation | TrajectoryResult
_Noisy = Perturbation | TrajectoryResult
_Inverted = CouplingMap | _Linear


@checked
def plot_trajectories(
    trace: _Paths | Mapping[str, _Paths],
    *,
    views: Sequence[Literal["all", "shallow", "deep"]] = ("all", "shallow", "deep"),
    positions: Sequence[int] | None = None,
    black: int = -1,
    fig: Figure | None = None,
) -> Figure:
    """Tokens' paths through the residual stream in the two principal components of the
    last depth.

    Shows whether tokens leave on straight lines, and where they part: a ring is where a
    token enters the panel's layers, a dot where it leaves them; one token is black. All
    panels of one model have the same axes, at different scales.

    Args:
        trace: a traced prompt, or its residual stream; or several by name, of models or
            checkpoints: a column each.
        views: a panel for each: "all" depths, the "shallow" half of them, the "deep"
            half.
        positions: which tokens; by default all but the `attention_sinks`, which the
            title names.
        black: which token is drawn in black; the last by default.

    Returns the Figure; in the Axes of each view the lines are the tokens in their
    order, each followed by its marks. Of several, the Axes are by view, then by name.
    Raises ValueError for an unknown view or none, a position out of range, and fewer
    than two tokens. Source: Aubry et al. 2025, figures 16 and 17.

    Example:
        >>> fig = tlc.plot_trajectories(trace, views=["all"])
        >>> several = {"first": tlc.trace(model, "w1 w2 w3"), "second": tlc.trace(model, "w4 w5 w6")}
        >>> fig = tlc.plot_trajectories(several)
    """
    if not views:
        raise ValueError("`views` is empty: wanted at least one")
    by = trace if isinstance(trace, Mapping) else {"": trace}
    if not by:
        raise ValueError("`trace` is empty: wanted at least one traced prompt")
    is_alone = not isinstance(trace, Mapping)
    shape = (1, len(views)) if is_alone else (len(views), len(by))
    fig = fig or labels.new_figure(
        2.7 * shape[1] + 0.6, 3.9 if is_alone else 2.3 * shape[0] + 1.2
    )
    grid = fig.subplots(*shape, squeeze=False)
    sinks = []
    for (name, one), panels in zip(
        by.items(), grid if is_alone else grid.T, strict=True
    ):
        shades, left_out = _draw_paths(panels, one, views, positions, black)
        sinks.append(left_out)
        if not is_alone:
            panels[0].set_title(
                f"{name}\n{panels[0].get_title()}", fontsize="medium", parse_math=False
            )
    provenances = [
        one.provenance if isinstance(one, Trace) else {} for one in by.values()
    ]
    words = {tuple(provenance.get("str_tokens") or ()) for provenance in provenances}
    named_lines = grid[-1, -1].get_legend_handles_labels()
    if len(words) == 1 and len(named_lines[0]) <= _MAX_LEGEND_TOKENS:
        labels.plain_legend(
            fig,
            *named_lines,
            loc="outside lower center",
            ncols=2 * shape[1],
            fontsize="small",
        )
    else:
        # As many names would be longer than the picture is high, and other tokenizers
        # have others.
        n_pos = len(shades)
        scale = ScalarMappable(Normalize(0, n_pos - 1), ListedColormap(shades))
        at = black % n_pos
        bar = fig.colorbar(
            scale,
            ax=grid,
            label=f"token position ({'the last' if at == n_pos - 1 else at}: black)",
        )
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    depth = (
        f"depth {len(_stream(next(iter(by.values())))) - 1}"
        if is_alone
        else "the last depth"
    )
    said = sinks[0] if is_alone else " · without attention sinks" * any(sinks)
    labels.entitle(
        fig, labels.heading(f"Trajectories, components of {depth}{said}", provenances)
    )
    return fig


def _stream(one: _Paths) -> Tensor:
    return one.residual if isinstance(one, Trace) else one


def _draw_paths(
    panels: np.ndarray,
    one: _Paths,
    views: Sequence[str],
    positions: Sequence[int] | None,
    black: int,
) -> tuple[np.ndarray, str]:
    """One model's paths, a panel for each view; the colours of its positions, and which
    tokens were left out.
    """
    x, provenance = _stream(one), one.provenance if isinstance(one, Trace) else {}
    n, n_pos = len(x) - 1, x.shape[1]
    chosen, left_out = _chosen(positions, n_pos, set(attention_sinks(x)), provenance)
    if not -n_pos <= black < n_pos:
        raise ValueError(f"`black` must lie in [{-n_pos}, {n_pos - 1}], got {black}")
    if len(chosen) < 2:
        raise ValueError(
            f"principal components want at least 2 tokens, got positions {chosen}: give a longer prompt"
        )
    pca = trajectory_pca(x[:, chosen])
    path, shares = (
        pca.projected.detach().cpu().numpy(),
        pca.explained_variance_ratio.tolist(),
    )
    spans = {"all": (0, n), "shallow": (0, max(1, n // 2)), "deep": (n // 2, n)}
    # The palest shades of the map are lost on white.
    shades = colormaps["viridis"](np.linspace(0, 0.9, n_pos))
    for ax, view in zip(panels, views, strict=True):
        first, last = spans[view]
        for i, t in enumerate(chosen):
            look = (
                {"color": "black", "zorder": 4}
                if t == black % n_pos
                else {"color": tuple(shades[t]), "zorder": 3}
            )
            along = path[first : last + 1, i]
            ax.plot(
                *along.T, linewidth=1.2, label=labels.token_name(provenance, t), **look
            )
            ax.plot(*along[0], "o", markerfacecolor="none", markersize=5, **look)
            ax.plot(*along[-1], "o", markersize=4, **look)
        ax.set_title(f"{view}: depth {first} to {last}", fontsize="medium")
        ax.set_xlabel(f"PC 1 ({shares[0]:.0%} of variance)", fontsize="small")
        ax.set_ylabel(f"PC 2 ({shares[1]:.0%})", fontsize="small")
        ax.tick_params(labelsize="small")
        ax.locator_params(nbins=4)
    return shades, left_out


@checked
def plot_trajectory_metrics(
    results: TrajectoryResult | Trace | Mapping[str, TrajectoryResult | Trace],
    *,
    positions: Sequence[int] | None = None,
    fig: Figure | None = None,
) -> Figure:
    """Norms, step lengths, line-shape scores and logit-lens entropy against depth: each
    token, and their mean.

    Shows how the stream grows, and how straight tokens go: a line-shape score of 1 is a
    straight line, the dashed line is what steps in random directions score, √(number of
    steps).

    Args:
        results: results or traces by name, of one prompt; or one. Of a trace,
            `measure_trajectory` makes the shapes.
        positions: which tokens; by default all but the `attention_sinks` of any result,
            which the title names.

    Returns the Figure; its Axes are norm, step length, windowed score, score of the
    first steps, and entropy if there is one. Raises ValueError for no result, results
    of different prompts, and a position out of range.

    Example:
        >>> fig = tlc.plots.plot_trajectory_metrics(trace)
    """
    by = {
        name: result
        if isinstance(result, TrajectoryResult)
        else measure_trajectory(result, linear=False, noise=False)
        for name, result in labels.named(results, TrajectoryResult).items()
    }
    first = next(iter(by.values()))
    provenance, n_pos = first.provenance, first.norm.shape[1]
    prompt = [n_pos, provenance.get("tokens"), provenance.get("str_tokens")]
    if any(
        [one.norm.shape[1], *map(one.provenance.get, ("tokens", "str_tokens"))]
        != prompt
        for one in by.values()
    ):
        raise ValueError(
            "`results` must be of one prompt, so that tokens and their means compare; got different ones"
        )
    sinks = {t for one in by.values() for t in attention_sinks(one.norm[..., None])}
    chosen, left_out = _chosen(positions, n_pos, sinks, provenance)
    if not chosen:
        raise ValueError("`positions` is empty: wanted at least one token")
    widths = sorted({one.window for one in by.values()})
    measures = {
        "norm": ("norm", "depth", "‖x‖"),
        "step_length": ("step length", "layer", "‖step‖"),
        "line_shape_score_windowed": (
            f"line-shape score, {', '.join(map(str, widths))} steps",
            "middle layer",
            "LSS",
        ),
        "line_shape_score_by_depth": ("line-shape score so far", "up to layer", "LSS"),
        "logit_lens_entropy": ("logit-lens entropy", "depth", "nats"),
    }
    shown = [
        name
        for name in measures
        if any(getattr(one, name) is not None for one in by.values())
    ]
    fig = fig or labels.new_figure(8.4, 5.4)
    panels = {name: fig.add_subplot(2, 3, place) for place, name in enumerate(shown, 1)}
    for name, ax in panels.items():
        for run, one, color in labels.in_colors(by):
            if (values := getattr(one, name)) is None:
                continue
            y = values[:, chosen].detach().cpu().numpy()
            depth = np.arange(len(y)) + (
                one.window // 2 if name == "line_shape_score_windowed" else 0
            )
            ax.plot(depth, y, color=color, linewidth=0.7, alpha=0.3, label="_tokens")
            ax.plot(depth, y.mean(1), color=color, linewidth=1.8, label=run)
        text, below, left = measures[name]
        ax.set_title(text, fontsize="medium")
        ax.set(xlabel=below, ylabel=left)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if left == "LSS":
            ax.set_ylim(bottom=1)
        elif name != "logit_lens_entropy":
            ax.set_yscale("log", nonpositive="mask")
    for width in widths:
        panels["line_shape_score_windowed"].axhline(width**0.5, **labels.NULL_LINE)
    n_steps = np.arange(1, max(one.n_layers for one in by.values()) + 1)
    panels["line_shape_score_by_depth"].plot(
        n_steps - 1, n_steps**0.5, label="random steps", **labels.NULL_LINE
    )
    named_lines = panels["line_shape_score_by_depth"].get_legend_handles_labels()
    labels.plain_legend(fig, *named_lines, loc="outside lower center", ncols=4)
    what = f"Trajectories, mean over tokens and each token{left_out}"
    labels.entitle(fig, labels.heading(what, [one.provenance for one in by.values()]))
    return fig


@checked
def plot_linearisation(
    results: _Linear | Mapping[str, _Linear], *, fig: Figure | None = None
) -> Figure:
    """Errors and directions of the linear predictions of a trajectory, against depth.

    Shows whether a linearised block predicts the step better than no block at all: a
    solid line has to lie below the dotted one of its colour (relative error, above), or
    above it (cosine similarity, below). On the left each step starts from the true
    stream, on the right only the first one does. Relative errors above 100 are clipped,
    and the title of their panel says how large they become. `results` are
    linearisations or hold one, by name; or one.

    Returns the Figure; its four Axes are relative error and cosine similarity (rows) of
    one step and of the compounded predictions (columns). Raises ValueError for no
    result, and for one without a linearisation.

    Example:
        >>> fig = tlc.plots.plot_linearisation(tlc.trajectories.linearisation(trace))
    """
    by = _parts(results, Linearisation, "linearisation")
    fig = fig or labels.new_figure(8.4, 6.4)
    panels = fig.subplots(2, 2, sharex=True, sharey="row")
    columns = {
        "one step from the true stream": {
            "one_step": ("-", "(I + J) x"),
            "previous": (":", "x, no step"),
        },
        "compounded from the input": {
            "product": ("-", "product of (I + J)"),
            "closed_form": ("--", "closed form"),
            "input": (":", "x⁰, no step"),
        },
    }
    for (above, below), (title, lines) in zip(panels.T, columns.items(), strict=True):
        largest = 0.0
        for name, result, color in labels.in_colors(by):
            for prediction, (style, text) in lines.items():
                if prediction == "closed_form" and result.closed_form is None:
                    continue
                look = {
                    "color": color,
                    "linestyle": style,
                    "linewidth": 1.4,
                    "label": f"{name}: {text}",
                }
                error = result.relative_error(prediction).cpu().numpy()
                largest = max(largest, error.max())
                above.plot(error, **look)
                below.plot(result.cosine_similarity(prediction).cpu().numpy(), **look)
        clipped = (
            f"\nerrors above {_MOST_ERROR:g} clipped; largest: {largest:.0e}"
            if largest > _MOST_ERROR
            else ""
        )
        above.set_title(title + clipped, fontsize="medium")
        above.axhline(1, color="0.8", linewidth=1, zorder=0)
        below.axhline(0, color="0.8", linewidth=1, zorder=0)
        below.set_xlabel("after layer")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        labels.plain_legend(below, **_BELOW)
    errors, cosines = panels[:, 0]
    errors.set_yscale("log", nonpositive="mask")
    errors.set(
        ylabel="relative error", ylim=(None, min(errors.get_ylim()[1], _MOST_ERROR))
    )
    cosines.set(ylabel="cosine similarity", ylim=(None, 1.03))
    bases = {
        result.reference_layer
        for result in by.values()
        if result.closed_form is not None
    }
    what = "Linearised trajectory" + (
        f" · closed form with U of layer {bases.pop()}" if len(bases) == 1 else ""
    )
    labels.entitle(fig, _heading(what, by))
    return fig


@checked
def plot_perturbation(
    results: _Noisy | Mapping[str, _Noisy], *, ax: Axes | None = None
) -> Axes:
    """Similarity of a noisy token to the clean one against the size of the noise,
    before the first block and after all.

    Shows whether the blocks undo noise (the solid line, after the last layer, lies
    above the dashed one, before the first) or amplify it. `results` are perturbations
    or hold one, by name; or one.

    Returns the Axes; the lines of each result are the means before the first layer and
    after the last, then the samples after the last as points. Raises ValueError for no
    result, for one without a perturbation, and for relative noise beside absolute.

    Example:
        >>> ax = tlc.plots.plot_perturbation(tlc.trajectories.perturbation(trace, (0.1, 1.0), n_samples=2))
    """
    by = _parts(results, Perturbation, "perturbation")
    if len({result.relative for result in by.values()}) > 1:
        raise ValueError(
            "the noise of some results is relative, of others absolute: these have no axis in common"
        )
    ax = ax or labels.new_figure(6.4, 4.6).subplots()
    for name, result, color in labels.in_colors(by):
        order = np.argsort(result.scales)
        scales, mean = (
            np.asarray(result.scales)[order],
            result.mean.cpu().numpy()[order],
        )
        samples = result.cosine_similarity[..., -1].cpu().numpy()[order]
        ax.plot(
            scales,
            mean[:, 0],
            "--",
            color=color,
            label=f"{name}, before the first layer",
        )
        ax.plot(
            scales,
            mean[:, -1],
            "-",
            color=color,
            marker="o",
            markersize=3,
            label=f"{name}, after the last layer",
        )
        ax.plot(
            np.repeat(scales, samples.shape[1]),
            samples.ravel(),
            ".",
            color=color,
            alpha=0.25,
            label="_samples",
        )
    labels.finish_lines(
        ax, _heading("Noise in a token's embedding", by), ncols=len(by), **_BELOW
    )
    # Scale 0 has no place on a logarithmic axis.
    ax.set_xscale(
        "log" if all(min(result.scales) > 0 for result in by.values()) else "linear"
    )
    ax.axhline(0, color="0.8", linewidth=1, zorder=0, label="_zero")
    size = (
        "size of the noise / size of the embedding"
        if result.relative
        else "standard deviation of noise entries"
    )
    ax.set(xlabel=size, ylabel="cosine similarity to the clean token")
    ax.set_ylim(top=1.03)
    return ax


@checked
def plot_inverse_singular_values(
    results: _Inverted | Mapping[str, _Inverted],
    *,
    n: Count = 3,
    ax: Axes | None = None,
) -> Axes:
    """`1/σ_k` of the Jacobians against depth, with the least-squares line of each k
    (`inverse_singular_value_fit`).

    Shows whether singular values scale inversely with depth, as in residual networks
    trained to classify: then the points lie on their line and R² is near 1.

    Args:
        results: maps of kind "depth", linearisations with their closed form, or results
            that hold one, by name; or one.
        n: how many singular values, from the largest; fewer where a result holds fewer.

    Returns the Axes; the lines of each result and each k are the points, then the fit.
    Raises ValueError for no result, one without singular values or of fewer than two
    layers, a map of tokens, and n below 1.

    Example:
        >>> ax = tlc.plots.plot_inverse_singular_values(tlc.depth_coupling(trace, k=8))
    """
    by = _parts(results, CouplingMap, "linearisation")
    ax = ax or labels.new_figure(6.4, 4.8).subplots()
    for name, result, color in labels.in_colors(by):
        if result.singular_values is None:
            raise ValueError(
                f"{name!r} has no singular values: measure with `closed_form=True`"
            )
        layers = (
            result.row_layers
            if isinstance(result, CouplingMap)
            else range(len(result.one_step))
        )
        S = result.singular_values[:, :n]
        fit = inverse_singular_value_fit(S, layers)
        ends = np.array([min(layers), max(layers)])
        for i in range(S.shape[1]):
            look: dict[str, Any] = {
                "color": color,
                "alpha": 1 - 0.6 * i / max(1, S.shape[1] - 1),
            }
            label = f"{name}, σ_{i + 1}: R² = {float(fit.r_squared[i]):.2f}"
            ax.plot(
                layers,
                (1 / S[:, i]).cpu().numpy(),
                "osD^v"[i % 5],
                markersize=3.5,
                label=label,
                **look,
            )
            ax.plot(
                ends,
                float(fit.intercept[i]) + float(fit.slope[i]) * ends,
                label="_fit",
                **look,
            )
    ax.set(xlabel="layer", ylabel="1 / singular value of J", ylim=(0, None))
    labels.finish_lines(
        ax, _heading("Inverse singular values", by), ncols=len(by), **_BELOW
    )
    return ax


def _chosen(
    positions: Sequence[int] | None,
    n_pos: int,
    sinks: set[int],
    provenance: Mapping[str, Any],
) -> tuple[list[int], str]:
    """Positions to draw, and what the title says of the attention sinks that were left
    out.
    """
    if positions is not None:
        if wrong := [t for t in positions if not -n_pos <= t < n_pos]:
            raise ValueError(
                f"`positions` must lie in [{-n_pos}, {n_pos - 1}] for {n_pos} tokens, got {wrong[0]}"
            )
        return [t % n_pos for t in positions], ""
    names = ", ".join(labels.token_name(provenance, t) for t in sorted(sinks))
    left_out = (
        f" · without attention sink{'s' if len(sinks) > 1 else ''}: token {names}"
        if sinks
        else ""
    )
    return [t for t in range(n_pos) if t not in sinks], left_out


def _parts(results: Any, kind: type, name: str) -> dict[str, Any]:
    """Results by name; of a `TrajectoryResult` the part of that name."""
    by: dict[str, Any] = labels.named(results, kind)
    by |= {
        run: getattr(one, name)
        for run, one in by.items()
        if isinstance(one, TrajectoryResult)
    }
    if missing := [run for run, one in by.items() if one is None]:
        raise ValueError(f"{missing[0]!r} was measured without its {name}")
    return by


def _heading(what: str, by: Mapping[str, Any]) -> str:
    """With the token that the results are of."""
    positions = [
        r.row_positions[0] if isinstance(r, CouplingMap) else r.position
        for r in by.values()
    ]
    return labels.heading(
        what, [result.provenance for result in by.values()], positions
    )
