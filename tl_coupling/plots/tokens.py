"""Pictures of what earlier tokens do to a later one."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from tl_coupling.border import checked
from tl_coupling.influence import Influence, InfluenceMeasure
from tl_coupling.plots.labels import MAX_LAYER_TICKS, UNDEFINED, heading, name_ticks, named, new_figure, token_name

_MEASURES = {
    "frobenius_norm": "Frobenius norm of J",
    "largest_singular_value": "largest singular value σ₁ of J",
    "participation_ratio": "participation ratio of J",
    "effective_rank": "effective rank of J",
}
_WIDEST, _ROOM_FOR_A_TICK = 9.0, 0.2


@checked
def plot_influence(
    results: Influence | Mapping[str, Influence],
    *,
    measure: InfluenceMeasure = "frobenius_norm",
    fig: Figure | None = None,
) -> Figure:
    """Heat map of what every source token does to one output token, layer by layer.

    Read off which tokens a layer listens to (the two norms, on a logarithmic scale), and through how many directions
    (the two ranks). The last column is the output token's own Jacobian, its skip connection left out.

    Args:
        results: one influence, or several by name (trained and untrained); all panels share one colour scale.
        measure: a field of `Influence`: `"frobenius_norm"`, `"largest_singular_value"`, `"participation_ratio"` or
            `"effective_rank"`.
        fig: where to draw; a new figure by default.

    Returns:
        the Figure; a panel for each result, then the colour bar. Undefined values (NaN) and zeros are grey.

    Raises:
        ValueError: an unknown measure, or no result.
    """
    panels = named(results, Influence)
    values = {name: getattr(result, measure).detach().cpu().double().numpy() for name, result in panels.items()}
    most = max(len(result.source_positions) for result in panels.values())
    width = min((_WIDEST - 1) / len(panels), max(3.0, 1.2 + 0.22 * most))
    fig = new_figure(width * len(panels) + 1, 5.6) if fig is None else fig
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    known = np.concatenate([value[np.isfinite(value) & (value > 0)] for value in values.values()])
    norm = Normalize(0, known.max(initial=0) or 1)
    if len(known) and measure in ("frobenius_norm", "largest_singular_value"):
        norm = LogNorm(known.min(), known.max())
    for ax, (name, result) in zip(axes, panels.items(), strict=True):
        image = ax.imshow(np.where(values[name] > 0, values[name], np.nan), norm=norm, aspect="auto")
        ax.set_facecolor(UNDEFINED)
        names = [token_name(result.provenance, t) for t in result.source_positions]
        name_ticks(ax.xaxis, names, int(width / _ROOM_FOR_A_TICK), rotate=True)
        name_ticks(ax.yaxis, result.layers, MAX_LAYER_TICKS)
        ax.set_xlabel("source token")
        if len(panels) > 1:
            ax.set_title(name, fontsize="medium", parse_math=False)
    axes[0].set_ylabel("layer")
    fig.colorbar(image, ax=axes, label=_MEASURES[measure])
    tokens = {token_name(result.provenance, result.output_position) for result in panels.values()}
    what = f"Influence on token {tokens.pop()}" if len(tokens) == 1 else "Influence on one token"
    fig.suptitle(heading(what, [r.provenance for r in panels.values()]), fontsize="medium", parse_math=False)
    return fig
