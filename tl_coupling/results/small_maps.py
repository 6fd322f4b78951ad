"""Small pictures of maps, a pixel for each pair, made of the numbers alone."""

import base64
import html
import io
from collections.abc import Sequence

import numpy as np
import PIL.Image
from jaxtyping import Float

Values = Float[np.ndarray, "n_rows n_cols"]
# Red, green and blue, each of 0 to 255.
Color = tuple[int, int, int]
# Nine stops of matplotlib's viridis, and three of ColorBrewer's RdBu: red is above 0.
SEQUENTIAL: tuple[Color, ...] = (
    (68, 1, 84),
    (71, 45, 123),
    (59, 82, 139),
    (44, 114, 142),
    (33, 145, 140),
    (40, 174, 128),
    (94, 201, 98),
    (173, 220, 48),
    (253, 231, 37),
)
DIVERGING: tuple[Color, ...] = ((33, 102, 172), (247, 247, 247), (178, 24, 43))
UNDEFINED: Color = (187, 187, 187)
# More make the file larger, and no eye tells them apart. Odd: there is a middle.
_N_COLORS = 63
# As tall as the table beside it.
_SHOWN_PIXELS = 160
# Beyond this many rows or columns a pixel is less than one of the screen.
_MOST_ROWS = 2 * _SHOWN_PIXELS


def small_map(
    values: Values, ends: tuple[float, float], colors: Sequence[Color]
) -> bytes:
    """Return a map as PNG, a pixel for each pair; grey where a value is NaN.

    Args:
        values: of every pair.
        ends: which values have the first and the last colour; others beyond them too.
        colors: from the first to the last.
    """
    low, high = ends
    shares = np.clip((np.nan_to_num(values) - low) / (high - low), 0, 1)
    steps = np.rint(shares * (_N_COLORS - 1))
    codes = np.where(np.isnan(values), _N_COLORS, steps)
    stops = np.linspace(0, _N_COLORS - 1, len(colors))
    channels = [
        np.interp(np.arange(_N_COLORS), stops, channel)
        for channel in zip(*colors, strict=True)
    ]
    palette = np.rint(np.stack(channels, axis=-1)).astype(int).ravel().tolist()
    picture = PIL.Image.fromarray(codes.astype(np.uint8))
    picture.putpalette([*palette, *UNDEFINED])
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def small_map_html(
    values: Values, ends: tuple[float, float], colors: Sequence[Color], caption: str
) -> str:
    """Return a map as an image in HTML with a line below it; nothing of a map that is
    too large to be seen small.
    """
    n_rows, n_cols = values.shape
    if max(n_rows, n_cols) > _MOST_ROWS:
        return ""
    picture = base64.b64encode(small_map(values, ends, colors)).decode()
    height = round(_SHOWN_PIXELS * n_rows / max(n_rows, n_cols))
    width = round(_SHOWN_PIXELS * n_cols / max(n_rows, n_cols))
    text = html.escape(caption)
    return (
        f'<img src="data:image/png;base64,{picture}" width="{width}" '
        f'height="{height}" alt="{text}" style="image-rendering: pixelated">'
        f"<p><small>{text}</small></p>"
    )
