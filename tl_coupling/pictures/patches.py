"""Values of a vision model's tokens, over the picture that it read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.patches import Rectangle
from torch import Tensor

from tl_coupling.arguments import Finite, checked
from tl_coupling.blocks import Trace
from tl_coupling.pictures import labels

# The opacity of the values' colours, and the brightness of the darkest pixel of the
# picture below them: both must be seen.
_ALPHA = 0.6
_DARKEST = 0.4
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
    """Draw a value of every patch as a coloured square over the picture.

    The picture is shown in grey. The class token has no place in it: its value stands
    below. Patches whose value is undefined (NaN) stay grey.

    Args:
        trace: of an image.
        values: one for each token, in their order.
        label: what the values are, beside the colour bar.
        position: the token that they are about, if any, for the title; a patch is
            outlined.
        vmin, vmax: ends of the colour scale; by default the least and the largest value
            of a patch.
        cmap: a colour map; matplotlib's default unless given.
        ax: the Axes to draw in; new ones by default.

    Returns the Axes; its images are the picture and the values, in units of patches.

    Raises:
        ValueError: a trace that is not of an image in patches, other than one value for
            each token, or a position out of range.

    Example:
        >>> straightness = tlc.line_shape_score(image_trace.residual)
        >>> ax = tlc.plots.plot_patches(image_trace, straightness, label="line shape")
    """
    grid = patches_of(trace)
    if grid is None:
        raise ValueError(
            "wanted the trace of an image whose patches are its tokens, such as a ViT's"
        )
    if len(values) != trace.n_pos:
        raise ValueError(
            f"`values` must hold one for each of the {trace.n_pos} tokens, "
            f"got {len(values)}"
        )
    colors = labels.color_map(cmap)
    rows, columns = grid
    # The class token, and registers if there are any, come before the patches.
    n_before = trace.n_pos - rows * columns
    numbers = values.detach().cpu().double().numpy()
    patch_values = numbers[n_before:].reshape(rows, columns)
    low, high = _ends(patch_values, vmin, vmax)
    ax = ax or labels.new_figure(4.6, 4.2, "compressed").subplots()
    picture = picture_of(trace)
    patch_units = _units_of_patches(picture, rows, columns)
    # The picture without its blacks, under which colours would not be seen.
    grey = _DARKEST + (1 - _DARKEST) * picture.mean(-1)
    ax.imshow(grey, cmap="gray", vmin=0, vmax=1, **patch_units)
    squares = ax.imshow(
        patch_values, cmap=colors, alpha=_ALPHA, vmin=low, vmax=high, **patch_units
    )
    _draw_grid(ax, rows, columns)
    title_positions = []
    if position is not None:
        title_positions = [trace.position_index(position)]
        # A token before the patches has a negative row: it is named in the title alone.
        row, column = divmod(title_positions[0] - n_before, columns)
        if row >= 0:
            _outline(ax, row, column)
    other_tokens = _format_values(trace.str_tokens[:n_before], numbers[:n_before])
    _label_sides(ax, other_tokens)
    title = labels.heading(
        "Patches of the picture", [trace.provenance], title_positions
    )
    labels.entitle(ax, title)
    ax.figure.colorbar(squares, ax=ax, label=label)
    return ax


def _ends(
    values: Float[np.ndarray, "rows columns"], vmin: float | None, vmax: float | None
) -> tuple[float, float]:
    """Return the ends of the colour scale; 0 and 1 where no value is known."""
    finite_values = values[np.isfinite(values)]
    low, high = vmin, vmax
    if low is None:
        low = float(finite_values.min()) if finite_values.size else 0.0
    if high is None:
        high = float(finite_values.max()) if finite_values.size else 1.0
    # Ends that come from the data may coincide, where all values are the same.
    if vmin is not None and vmax is not None and low >= high:
        raise ValueError(f"`vmin` must lie below `vmax`, got {low} and {high}")
    return low, high


def _units_of_patches(
    picture: Float[np.ndarray, "height width 3"], rows: int, columns: int
) -> dict[str, Any]:
    """Return what `imshow` takes to put patch 0, 0 around the origin."""
    height = picture.shape[0] / rows
    width = picture.shape[1] / columns
    # Left, right, bottom, top: rows grow downwards as in the picture.
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    return {"extent": extent, "aspect": height / width}


def _label_sides(ax: Axes, other_tokens: str) -> None:
    """Name rows and columns; below them stand the tokens that are no patch."""
    ax.set_ylabel("row of patches")
    x_label = "column of patches"
    if other_tokens:
        x_label += f"\n{other_tokens}"
    ax.set_xlabel(x_label, parse_math=False)


def _draw_grid(ax: Axes, rows: int, columns: int) -> None:
    """Draw white lines between the patches, and number them."""
    look: dict[str, Any] = {
        "color": "white",
        # Many patches are small: lines of full width would cover them.
        "linewidth": min(1.0, 4 / max(rows, columns)),
    }
    for row in range(1, rows):
        ax.axhline(row - 0.5, **look)
    for column in range(1, columns):
        ax.axvline(column - 0.5, **look)
    labels.name_ticks(ax.yaxis, range(rows), _MAX_TICKS)
    labels.name_ticks(ax.xaxis, range(columns), _MAX_TICKS)


def _outline(ax: Axes, row: int, column: int) -> None:
    corner = (column - 0.5, row - 0.5)
    square = Rectangle(
        corner, 1, 1, fill=False, edgecolor=labels.VERMILION, linewidth=2, zorder=3
    )
    ax.add_patch(square)


def _format_values(
    str_tokens: Sequence[str], values: Float[np.ndarray, " n_tokens"]
) -> str:
    """Write the values of tokens that have no place in the picture."""
    return ", ".join(
        f"{token}: {labels.signed(value, '.3g')}"
        for token, value in zip(str_tokens, values, strict=True)
        if np.isfinite(value)
    )


def patches_of(trace: Trace) -> tuple[int, int] | None:
    """Return the rows and columns of the patches, which are the trace's last tokens.

    Returns None where there are no patches, or none that are known.
    """
    rows, columns = trace.provenance.get("patch_grid") or (0, 0)
    if trace.pixels is None or not 0 < rows * columns <= trace.n_pos:
        return None
    return rows, columns


def picture_of(trace: Trace) -> Float[np.ndarray, "height width 3"]:
    """Return the picture that the model read, between 0 and 1.

    What the processor did to the colours is undone. Pixels that were given as such have
    no known scale: theirs goes from their least to their largest value.
    """
    if trace.pixels is None:
        raise ValueError("wanted the trace of an image")
    # `[channels height width]`, as the model read it.
    x = trace.pixels[0].detach().cpu().double()
    preprocessing = trace.provenance["image"]["preprocessing"]
    if isinstance(preprocessing, dict):
        if preprocessing.get("do_normalize"):
            x = x * _per_channel(preprocessing["image_std"], x) + _per_channel(
                preprocessing["image_mean"], x
            )
        # Processors of HuggingFace first multiply by `rescale_factor` (1/255), then
        # normalise: the inverse, in reverse order.
        brightest = 255.0
        if preprocessing.get("do_rescale"):
            brightest = 255 * preprocessing["rescale_factor"]
        x = x / brightest
    else:
        smallest_range = torch.finfo(x.dtype).tiny
        x = (x - x.min()) / (x.max() - x.min()).clamp_min(smallest_range)
    # One or two channels are no colours: the first is drawn in grey.
    is_grey = len(x) < 3
    rgb = x[:1].expand(3, -1, -1) if is_grey else x[:3]
    return rgb.clamp(0, 1).permute(1, 2, 0).numpy()


def _per_channel(
    numbers: Sequence[float], x: Float[Tensor, "channels height width"]
) -> Float[Tensor, "channels 1 1"]:
    return torch.tensor(numbers, dtype=x.dtype).reshape(-1, 1, 1)
