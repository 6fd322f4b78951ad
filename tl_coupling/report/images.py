"""Pieces of the page: pictures, views and tables, each in a box of its own that scrolls where it is too wide."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib import rc_context
from PIL import Image

# Names inside an SVG are random unless salted: the same results give the same page.
_REPRODUCIBLE: Any = {"svg.hashsalt": "tl_coupling"}
_CSS_PIXELS_PER_INCH, _PNG_DPI, _PNG_COLORS = 96, 120, 256


def figure(drawn: Any, alt: str, caption: str, kind: Literal["svg", "png"] = "svg", wide: bool = False) -> str:
    """A matplotlib figure with its caption (HTML); `alt` says what it shows. Many panels are smaller as PNG."""
    picture = getattr(drawn, "figure", drawn)
    data = _svg(picture) if kind == "svg" else _png(picture)
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    width, height = (round(_CSS_PIXELS_PER_INCH * inches) for inches in picture.get_size_inches())
    return (
        f'<figure class="{"wide" if wide else "plot"}"><div class="scroll" tabindex="0">'
        f'<img src="data:{mime};base64,{base64.b64encode(data).decode()}" alt="{html.escape(alt)}" '
        f'width="{width}" height="{height}"></div><figcaption>{caption}</figcaption></figure>'
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


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: Literal["numbers", "facts"] = "numbers") -> str:
    """A table of texts; the first column names the rows."""
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">'
        f"{f'<thead><tr>{head}</tr></thead>' if headings else ''}<tbody>{body}</tbody></table></div>"
    )


def _svg(picture: Any) -> bytes:
    buffer = io.BytesIO()
    with rc_context(_REPRODUCIBLE):
        picture.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _png(picture: Any) -> bytes:
    buffer, small = io.BytesIO(), io.BytesIO()
    picture.savefig(buffer, format="png", dpi=_PNG_DPI)
    # Noise in 24 bits a pixel does not compress, and a colour map has few colours. Chosen for coverage: the rare bright
    # ones matter as much as the many dark ones.
    few = Image.open(buffer).convert("RGB").quantize(_PNG_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()
