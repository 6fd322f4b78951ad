"""Values of a vision model's tokens, over the picture that it read."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.patches import Rectangle
from torch import Tensor

from tl_coupling.arguments import Finite, checked
from tl_coupling.plots import labels
from tl_coupling.traces import Trace

# Of the values' colours, and what is left of the picture's contrast below them: both
# must be seen.
_ALPHA, _DARKEST = 0.6, 0.4
_MAX_TICKS = 8


@checked
def plot_patches(
    trace: Trace,
    values: Float[Tensor, " n_pos"],
    *,
    label: str = "",
    position: int | None = None,
    vmin: Finite | None = None,
    vmax: Finite | None = None,
    cmap: str | Colormap | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A value of every patch as a coloured square over the picture, which is shown in
    grey.

    The class token has no place in the picture: its value stands below it. Patches
    whose value is undefined (NaN) stay grey.

    Args:
        trace: of an image.
        values: one for each token, in their order.
        label: what the values are, beside the colour bar.
        position: the token that they are about, if any, for the title; a patch is
            outlined.
        vmin, vmax: ends of the colour scale; by default the least and the largest value
            of a patch.
        cmap: a colour map; matplotlib's default unless given.

    Returns the Axes; its images are the picture and the values, in units of patches.
    Raises ValueError for a trace that is not of an image in patches, other than one
    value for each token, and a position out of range.

    Example:
        >>> ax = tlc.plots.plot_patches(image_trace, tlc.line_shape_score(image_trace.residual), label="line shape")
    """
    if (grid := patches_of(trace)) is None:
        raise ValueError(
            "wanted the trace of an image whose patches are its tokens, such as a ViT's"
        )
    rows, columns = grid
    if len(values) != trace.n_pos:
        raise ValueError(
            f"`values` must hold one for each of the {trace.n_pos} tokens, got {len(values)}"
        )
    numbers = values.detach().cpu().double().numpy()
    n_others = trace.n_pos - rows * columns
    over = numbers[n_others:].reshape(rows, columns)
    known = over[np.isfinite(over)]
    low = (
        float(known.min(initial=np.inf if known.size else 0)) if vmin is None else vmin
    )
    high = (
        float(known.max(initial=-np.inf if known.size else 1)) if vmax is None else vmax
    )
    if vmin is not None and vmax is not None and low >= high:
        raise ValueError(f"`vmin` must lie below `vmax`, got {low} and {high}")
    if isinstance(cmap, str) and cmap not in colormaps:
        raise ValueError(
            f"`cmap` must be a colour map that matplotlib knows, got {cmap!r}"
        )
    ax = ax or labels.new_figure(4.6, 4.2, "compressed").subplots()
    picture = picture_of(trace)
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    height, width = picture.shape[0] / rows, picture.shape[1] / columns
    how: dict[str, Any] = {"extent": extent, "aspect": height / width}
    ax.imshow(
        _DARKEST + (1 - _DARKEST) * picture.mean(-1), cmap="gray", vmin=0, vmax=1, **how
    )
    colors = colormaps.get_cmap(cmap or rcParams["image.cmap"])
    drawn = ax.imshow(over, cmap=colors, alpha=_ALPHA, vmin=low, vmax=high, **how)
    lines: dict[str, Any] = {
        "color": "white",
        "linewidth": min(1.0, 4 / max(rows, columns)),
    }
    for where, n in ((ax.axhline, rows), (ax.axvline, columns)):
        for at in range(1, n):
            where(at - 0.5, **lines)
    for axis, n in ((ax.yaxis, rows), (ax.xaxis, columns)):
        labels.name_ticks(axis, range(n), _MAX_TICKS)
    provenance, about = trace.provenance, []
    if position is not None:
        about = [trace.position_index(position)]
        row, column = divmod(about[0] - n_others, columns)
        if row >= 0:
            ax.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5),
                    1,
                    1,
                    fill=False,
                    edgecolor="C3",
                    linewidth=2,
                    zorder=3,
                )
            )
    others = zip(trace.str_tokens, numbers[:n_others], strict=False)
    said = ", ".join(
        f"{name}: {value:.3g}" for name, value in others if np.isfinite(value)
    )
    ax.set_ylabel("row of patches")
    ax.set_xlabel(
        "\n".join(filter(None, ("column of patches", said))), parse_math=False
    )
    labels.entitle(ax, labels.heading("Patches of the picture", [provenance], about))
    ax.figure.colorbar(drawn, ax=ax, label=label)
    return ax


def patches_of(trace: Trace) -> tuple[int, int] | None:
    """Rows and columns of the patches, which are the trace's last tokens; None where
    there are none that are known.
    """
    rows, columns = trace.provenance.get("patch_grid") or (0, 0)
    return (
        (rows, columns)
        if trace.pixels is not None and 0 < rows * columns <= trace.n_pos
        else None
    )


def picture_of(trace: Trace) -> Float[np.ndarray, "height width 3"]:
    """The picture that the model read, between 0 and 1: what its processor did to the
    colours is undone.

    Pixels that were given as such have no known scale: theirs goes from their least to
    their largest value.
    """
    if trace.pixels is None:
        raise ValueError("wanted the trace of an image")
    x, how = (
        trace.pixels[0].detach().cpu().double(),
        trace.provenance["image"]["preprocessing"],
    )
    if isinstance(how, dict):
        if how.get("do_normalize"):
            mean, std = (
                torch.tensor(how[name], dtype=x.dtype).reshape(-1, 1, 1)
                for name in ("image_mean", "image_std")
            )
            x = x * std + mean
        x = x / (255 * how["rescale_factor"] if how.get("do_rescale") else 255)
    else:
        x = (x - x.min()) / (x.max() - x.min()).clamp_min(torch.finfo(x.dtype).tiny)
    three = x[:3] if len(x) >= 3 else x[:1].expand(3, -1, -1)
    return three.clamp(0, 1).permute(1, 2, 0).numpy()
