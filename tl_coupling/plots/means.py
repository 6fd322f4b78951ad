"""Pictures of what varies from prompt to prompt."""

from matplotlib.axes import Axes

from tl_coupling.border import checked
from tl_coupling.comparisons import MeanCouplingMap
from tl_coupling.coupling import Measure
from tl_coupling.plots.labels import label_pairs, measure_label, own_axes, title


@checked
def plot_spread(
    result: MeanCouplingMap, *, k: int | None = None, measure: Measure = "coupling", ax: Axes | None = None
) -> Axes:
    """Heat map of a measure's standard deviation over prompts, for every pair of connections.

    Read off, beside `plot_coupling` of the same map, which pairs are coupled to the same degree whatever the prompt.

    Args:
        result: a mean over prompts, of `depth_coupling` on many traces.
        k: how many top singular vectors; as many as the map holds by default.
        measure: as in `CouplingMap.values`.
        ax: where to draw; a new figure by default.

    Returns:
        the Axes; the heat map is its only image.

    Raises:
        ValueError: k or measure not among those of the map; one prompt, which has no spread.
    """
    spread = result.spread(k, measure)
    if result.n_prompts < 2:
        raise ValueError("the spread over prompts takes at least two prompts, this map has one")
    k = result.k if k is None else k
    ax = own_axes(6.4, 5.8, "compressed") if ax is None else ax
    image = ax.imshow(spread.detach().cpu().numpy(), vmin=0, cmap="cividis")
    label_pairs(ax, result)
    ax.set_title(title([result], k), fontsize="medium", parse_math=False)
    label = f"standard deviation over {result.n_prompts} prompts of\n{measure_label(measure, k)}"
    ax.figure.colorbar(image, ax=ax, label=label)
    return ax
