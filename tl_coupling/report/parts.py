"""Make pieces of a page: tokens, sentences, tables, pictures with captions."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tl_coupling.blocks import Trace
from tl_coupling.interactive import visible_token
from tl_coupling.portraits import Portrait

# As CSS defines them.
_CSS_PIXELS_PER_INCH = 96
_PNG_DPI = 120
_PNG_COLORS = 256
# In inches.
_MARGIN = 0.1
# Figures of one Axes are made smaller and their text is not: it must be legible on a
# telephone.
_SHRUNK = 0.8
_STRETCHED = 1.3


# Everything that is not `Markup` is escaped: a name, a token or a prompt may hold
# anything.
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def piece(name: str, **facts: object) -> Markup:
    """Write a piece of `pieces.html`."""
    written: Markup = getattr(TEMPLATES.get_template("pieces.html").module, name)(
        **facts
    )
    return written


def named_token(run: Portrait, position: int) -> Markup:
    """Write a position and its token."""
    token = visible_token(run.trace.str_tokens[position]).strip() or "␣"
    return Markup("<code><small>{}</small> {}</code>").format(position, token)


def spaced_tokens(trace: Trace) -> list[str]:
    """Return tokens to be shown one after another.

    They are the text itself, or names with room between them.
    """
    return [
        token if trace.tokens is not None else f"\u00a0{token}\u00a0"
        for token in trace.str_tokens
    ]


def sentence(parts: Iterable[str]) -> Markup:
    """Join parts to one sentence."""
    text = Markup("; ").join(parts)
    return text[0].upper() + text[1:] + "." if text else text


def grid(parts: Iterable[Markup], kind: Literal["", " small"] = "") -> Markup:
    """Set pieces side by side where there is room."""
    return Markup('<div class="grid{}">{}</div>').format(kind, Markup("").join(parts))


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers"
) -> Markup:
    """Make a table of texts, "numbers" or "facts"; the first column names the rows."""
    return piece("table", headings=headings, rows=rows, kind=kind)


def figure(
    drawn: Axes | Figure, alt: str, lead: str, text: str = "", as_png: bool = False
) -> Markup:
    """Make an `image` with its caption, which begins in bold."""
    return piece("figure", image=image(drawn, alt, as_png), lead=lead, text=text)


def image(drawn: Axes | Figure, alt: str, as_png: bool = False) -> Markup:
    """Make an image of a picture of `plot_*`; `alt` says what it shows.

    Many small cells are smaller as PNG.
    """
    picture: Any = drawn
    if isinstance(drawn, Axes):
        picture = drawn.figure
        # The head of the page and the caption say what the title would.
        drawn.set_title("")
        picture.set_size_inches(_SHRUNK * picture.get_size_inches())
    mime = "png" if as_png else "svg+xml"
    data = base64.b64encode(_saved(picture, as_png)).decode()
    # The size that `savefig` crops to: an image without its size moves the page while
    # it loads.
    inches = picture.get_tightbbox().padded(_MARGIN).size
    width, height = (round(_CSS_PIXELS_PER_INCH * side) for side in inches)
    return piece(
        "image",
        mime=mime,
        data=data,
        alt=alt,
        width=width,
        height=height,
        widest=round(_STRETCHED * width),
    )


def _saved(picture: Figure, as_png: bool) -> bytes:
    """Return the file of a picture: the same results give the same bytes."""
    buffer = io.BytesIO()
    # Names inside an SVG are random unless salted.
    with rc_context({"svg.hashsalt": "tl_coupling"}):
        if as_png:
            form: dict[str, Any] = {"format": "png", "dpi": _PNG_DPI}
        else:
            # The date of drawing would make every file another one.
            form = {"format": "svg", "metadata": {"Date": None}}
        picture.savefig(buffer, bbox_inches="tight", pad_inches=_MARGIN, **form)
    return _reduce_colors(buffer) if as_png else buffer.getvalue()


def _reduce_colors(png: io.BytesIO) -> bytes:
    """Return a PNG with few colours.

    Noise in 24 bits a pixel does not compress, and a colour map has few colours. They
    are chosen for coverage: the rare bright ones matter as much as the many dark ones.
    """
    picture = Image.open(png).convert("RGB")
    picture = picture.quantize(
        _PNG_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    small = io.BytesIO()
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()
