"""Make pieces of a page: tokens, sentences, tables, pictures with captions."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from PIL import Image

from tl_coupling.interactive import visible_token
from tl_coupling.portraits import Portrait
from tl_coupling.traces import Trace

_CSS_PIXELS_PER_INCH, _PNG_DPI, _PNG_COLORS, _MARGIN = 96, 120, 256, 0.1
# Figures of one Axes are made smaller and their text is not: it must be legible on a
# telephone.
_SHRUNK, _STRETCHED = 0.8, 1.3


def named_token(run: Portrait, position: int) -> str:
    """Write a position and its token."""
    token = visible_token(run.trace.str_tokens[position]).strip() or "␣"
    return f"<code><small>{position}</small> {html.escape(token)}</code>"


def spaced_tokens(trace: Trace) -> list[str]:
    """Return tokens to be shown one after another.

    They are the text itself, or names with room between them.
    """
    return [
        token if trace.tokens is not None else f"\u00a0{token}\u00a0"
        for token in trace.str_tokens
    ]


def sentence(parts: Iterable[str]) -> str:
    """Join parts to one sentence."""
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def grid(parts: Iterable[str], kind: Literal["", " small"] = "") -> str:
    """Set pieces side by side where there is room."""
    return f'<div class="grid{kind}">{"".join(parts)}</div>'


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers"
) -> str:
    """Make a table of texts, "numbers" or "facts"; the first column names the rows."""
    head = "".join(
        f'<th scope="col">{html.escape(heading)}</th>' for heading in headings
    )
    body = "".join(
        "<tr><th "
        f'scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if headings else ""
    return f'<div class="scroll" tabindex="0"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def figure(drawn: Any, alt: str, caption: str, as_png: bool = False) -> str:
    """Make an `image` with its caption."""
    return f"<figure>{image(drawn, alt, as_png)}<figcaption>{caption}</figcaption></figure>"


def image(drawn: Any, alt: str, as_png: bool = False) -> str:
    """Make an image of a picture of `plot_*`; `alt` says what it shows.

    Many small cells are smaller as PNG.
    """
    picture = getattr(drawn, "figure", drawn)
    if isinstance(drawn, Axes):
        # The head of the page and the caption say what the title would.
        drawn.set_title("")
        picture.set_size_inches(_SHRUNK * picture.get_size_inches())
    data, mime = (
        base64.b64encode(_saved(picture, as_png)).decode(),
        "png" if as_png else "svg+xml",
    )
    width, height = (
        round(_CSS_PIXELS_PER_INCH * inches)
        for inches in picture.get_tightbbox().padded(_MARGIN).size
    )
    return (
        f'<img src="data:image/{mime};base64,{data}" alt="{html.escape(alt)}" '
        f'width="{width}" height="{height}" style="max-width: {round(_STRETCHED * width)}px">'
    )


def _saved(picture: Any, as_png: bool) -> bytes:
    buffer, small = io.BytesIO(), io.BytesIO()
    form = (
        {"format": "png", "dpi": _PNG_DPI}
        if as_png
        else {"format": "svg", "metadata": {"Date": None}}
    )
    # Names inside an SVG are random unless salted: the same results give the same page.
    with rc_context({"svg.hashsalt": "tl_coupling"}):
        picture.savefig(buffer, bbox_inches="tight", pad_inches=_MARGIN, **form)
    if not as_png:
        return buffer.getvalue()
    # Noise in 24 bits a pixel does not compress, and a colour map has few colours.
    # Chosen for coverage: the rare bright ones matter as much as the many dark ones.
    few = (
        Image.open(buffer)
        .convert("RGB")
        .quantize(_PNG_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    few.save(small, "PNG", optimize=True)
    return small.getvalue()
