"""Pictures of what earlier tokens do to a later one."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from tl_coupling.border import checked
from tl_coupling.influence import Influence, InfluenceMeasure
from tl_coupling.plots.labels import heading, named, new_figure, token_name

_MEASURES = {
    "frobenius_norm": "Frobenius norm of J",
    "largest_singular_value": "largest singular value σ₁ of J",
    "participation_ratio": "participation ratio of J",
    "effective_rank": "effective rank of J",
}
_LOGARITHMIC = ("frobenius_norm", "largest_singular_value")
_MOST_TICKS = 40


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
        fig: where to draw; a new Figure by default.

    Returns:
        the Figure; a panel for each result, then the colour bar. Undefined values (NaN) and zeros are grey.

    Raises:
        ValueError: an unknown measure, or no result.
    """
    panels = named(results, Influence)
    values = {name: getattr(result, measure).detach().cpu().double().numpy() for name, result in panels.items()}
    if fig is None:
        largest = max(len(result.source_positions) for result in panels.values())
        width = min(7.0, max(3.6, 1.6 + 0.3 * largest))
        fig = new_figure(width * len(panels) + 1.0, 6.4)
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    norm = _common_scale(np.concatenate([value.ravel() for value in values.values()]), measure in _LOGARITHMIC)
    for ax, (name, result) in zip(axes, panels.items(), strict=True):
        shown = np.ma.masked_invalid(np.where(values[name] > 0, values[name], np.nan))
        image = ax.imshow(shown, norm=norm, aspect="auto", origin="lower")
        ax.set_facecolor("0.8")
        labels = [token_name(result.provenance, t) for t in result.source_positions]
        _ticks(ax.xaxis, labels, 90)
        _ticks(ax.yaxis, [str(layer) for layer in result.layers], 0)
        ax.set_xlabel("source token")
        if len(panels) > 1:
            ax.set_title(name, fontsize="medium", parse_math=False)
    axes[0].set_ylabel("layer")
    fig.colorbar(image, ax=axes, label=_MEASURES[measure])
    tokens = {token_name(result.provenance, result.output_position) for result in panels.values()}
    what = f"Influence on token {tokens.pop()}" if len(tokens) == 1 else "Influence on one token"
    fig.suptitle(heading(what, [r.provenance for r in panels.values()]), fontsize="medium", parse_math=False)
    return fig


def _common_scale(values: np.ndarray, logarithmic: bool) -> Normalize:
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return Normalize(0, 1)
    return LogNorm(positive.min(), positive.max()) if logarithmic else Normalize(0, positive.max())


def _ticks(axis: object, labels: list[str], rotation: int) -> None:
    shown = range(0, len(labels), -(-len(labels) // _MOST_TICKS))
    axis.set_ticks(list(shown), [labels[i] for i in shown], rotation=rotation, parse_math=False)  # type: ignore[attr-defined]
