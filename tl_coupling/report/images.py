"""Pieces of the page: pictures, views and tables."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from PIL import Image

_CSS_PIXELS_PER_INCH, _PNG_DPI, _PNG_COLORS, _MARGIN = 96, 120, 256, 0.1
# Figures of one Axes are made smaller and their text is not: it must be legible on a telephone.
_SHRUNK, _STRETCHED = 0.8, 1.3


def figure(drawn: Any, alt: str, caption: str, as_png: bool = False) -> str:
    """A picture of `plot_*` with its caption (HTML); `alt` says what it shows. Many small cells are smaller as PNG."""
    picture = getattr(drawn, "figure", drawn)
    if isinstance(drawn, Axes):
        # The head of the page and the caption say what the title would.
        drawn.set_title("")
        picture.set_size_inches(_SHRUNK * picture.get_size_inches())
    data, mime = base64.b64encode(_saved(picture, as_png)).decode(), "png" if as_png else "svg+xml"
    box = picture.get_tightbbox().padded(_MARGIN)
    width, height = (round(_CSS_PIXELS_PER_INCH * inches) for inches in box.size)
    return (
        f'<figure><img src="data:image/{mime};base64,{data}" alt="{html.escape(alt)}" '
        f'width="{width}" height="{height}" style="max-width: {round(_STRETCHED * width)}px">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def view(body: str, label: str, caption: str) -> str:
    """A view of circuitsvis with its caption (HTML)."""
    return (
        f'<figure class="view"><div role="group" aria-label="{html.escape(label)}">{body}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def grid(parts: Sequence[str]) -> str:
    """Pieces side by side where there is room."""
    return f'<div class="grid">{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """A table of texts, "numbers" or "facts"; the first column names the rows."""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if headings else ""
    return f'<div class="scroll" tabindex="0"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def _saved(picture: Any, as_png: bool) -> bytes:
    buffer, small = io.BytesIO(), io.BytesIO()
    cut: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": _MARGIN}
    if not as_png:
        # Names inside an SVG are random unless salted: the same results give the same page.
        with rc_context({"svg.hashsalt": "tl_coupling"}):
            picture.savefig(buffer, format="svg", metadata={"Date": None}, **cut)
        return buffer.getvalue()
    picture.savefig(buffer, format="png", dpi=_PNG_DPI, **cut)
    # Noise in 24 bits a pixel does not compress, and a colour map has few colours. Chosen for coverage: the rare bright
    # ones matter as much as the many dark ones.
    few = Image.open(buffer).convert("RGB").quantize(_PNG_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()
