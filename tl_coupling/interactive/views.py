"""Draw tokens, and maps of tokens, with circuitsvis."""

import base64
import gzip
import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import circuitsvis
from circuitsvis.utils.render import RenderedHTML
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Positive, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import write_atomically
from tl_coupling.measures import AnyMeasure, measure_named
from tl_coupling.pictures import color_scale, labels

# Characters; labels stand beside the rows of a map, and above its columns.
_LONGEST_LABEL = 14
# Rows of a box that are shown before a reader asks for all.
_MOST_UNFOLDED = 10
# The ends of ColorBrewer's RdBu, which is safe for the colour-blind: red above 0, as in
# all pictures.
_POSITIVE, _NEGATIVE, _UNDEFINED = "#b2182b", "#2166ac", "#bbbbbb"
# Control characters, halves of characters, and what would turn the text after it
# around.
_NOT_SHOWN = [
    *range(0x20),
    *range(0x7F, 0xA0),
    *range(0xD800, 0xE000),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
]
_NOT_SHOWN += [0x061C, 0x200E, 0x200F]
# A word joiner keeps `<` and `&` from being read as HTML, as circuitsvis' token widgets
# would; it takes no room.
_SHOWN_AS = {code: chr(code).encode("unicode_escape").decode() for code in _NOT_SHOWN}
_SHOWN_AS |= str.maketrans(
    {"\n": "↵", "\r": "␍", "\t": "⇥", "<": "<\u2060", "&": "&\u2060"}
)
# circuitsvis was made for attention: the words that it writes on its maps, and the
# words that are meant here.
_WORDS = {
    "Destination Token": "token of J₁",
    "Source Token": "token of the singular vectors",
    "`Dest: ": "`Row: ",
    "`Src: ": "`Column: ",
    "`Val: ": "`Value: ",
}
# circuitsvis writes white on colours that are too pale for it. On a colour whose
# luminance, as WCAG defines it, is this one, white and black have the same contrast, 4.6;
# on every other one of them has more.
_CHOICE_OF_LETTERS = re.compile(r"(\w+\(\w+\))\.brightness\(\)<\.6")
_IS_DARK = """const isDark = ({r, g, b}) => {
  const linear = (v) => v <= 10.31475 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4;
  return .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b) < .179;
};"""

_HERE = Path(__file__)
VIEW_STYLE = _HERE.with_suffix(".css").read_text(encoding="utf-8")
# Of a view's own page.
_PAGE_STYLE = (
    ":root { color-scheme: light dark; } "
    "body { max-width: 1200px; margin: 1em auto; padding: 0 1em; }"
)


class View(RenderedHTML):
    """Hold a view with its data and its script.

    A notebook shows it; `save` writes it as a page. Nothing is ever loaded from a
    network.

    Attributes:
        body: the HTML of the view, without the script that draws it; the same for the
            same data. Where scripts do not run, it shows or says what it can.

    Example:
        >>> scores = tlc.line_shape_score(trace.residual)
        >>> view = tlc.interactive.show_tokens(trace.str_tokens, scores)
        >>> file = view.save("tokens.html")
    """

    def __init__(
        self,
        body: str,
        script: str | None = None,
        name: str | None = None,
        picture: bytes | None = None,
    ):
        self.body = f'<div class="tlc-view">{body}</div>'
        self._script = script
        self._name = name
        self._picture = picture

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a page that shows the view, and return its path.

        The page is one file in UTF-8. What is chosen in a map of `show_coupling` is kept
        in its address: `#k=10&pair=8,10` are layers 8 and 10 at k = 10.

        Raises:
            OSError: the file cannot be written.
        """
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self._name or 'tl_coupling')}</title>"
            f"<style>{_PAGE_STYLE}</style></head><body>"
            f"<main data-address>{self._repr_html_()}</main></body></html>"
        )
        return write_atomically(
            path, lambda unfinished: unfinished.write_text(page, encoding="utf-8")
        )

    def _repr_html_(self) -> str:
        """Return HTML that draws the view on its own.

        0.5 MB of it are circuitsvis' script, compressed, where it is one of
        circuitsvis' views.
        """
        script = self._script or circuitsvis_script()
        # A module runs once the cell's output is on the page, which a plain script may
        # not wait for.
        return (
            f'<style>{VIEW_STYLE}</style>{self.body}<script type="module">'
            f"const packed = Uint8Array.from(atob({json.dumps(_packed(script))}), c "
            "=> c.charCodeAt(0));"
            "const script = new Blob([packed]).stream().pipeThrough(new "
            'DecompressionStream("gzip"));'
            "(0, eval)(await new Response(script).text());</script>"
        )

    def _repr_png_(self) -> bytes | None:
        """Return the picture for places that show no HTML, where the view has one."""
        return self._picture

    # circuitsvis shows the first without a network, and the second with one.
    local_src = cdn_src = property(_repr_html_)

    def __repr__(self) -> str:
        if self._name is not None:
            return f"<View of {self._name}>"
        return f"<View with {self.body.count('data-circuitsvis=')} circuitsvis widgets>"

    __str__ = __repr__


@checked
def show_token_coupling(
    results: CouplingMap | Mapping[str, CouplingMap],
    *,
    k: int | Sequence[int] | None = None,
    measure: AnyMeasure = "coupling",
    vmax: Positive | None = None,
    **options: Any,
) -> View:
    """Show a measure for every pair of tokens, one map for each result and each k.

    The pointer shows a pair and its value.

    Rows are the tokens of J_1, columns those of the singular vectors. White is 0. Grey
    pairs were not compared, or their value is undefined.

    Args:
        results: maps of kind "self" or "context", by name; or one.
        k: how many top singular vectors, or several such numbers; as many as each map
            holds by default.
        measure, options: as in `CouplingMap.values`.
        vmax: the value in full colour, for all maps; what
            `tl_coupling.pictures.maps.color_scale` gives by default.

    Raises:
        ValueError: no map, a map of layers, k or measure not among those of a map.

    Cost: about 100 bytes of HTML for each pair.

    Example:
        >>> tlc.interactive.show_token_coupling(tlc.self_coupling(trace, 0, 1, k=8), k=(4, 8))
        <View with 2 circuitsvis widgets>
    """
    named = {"": results} if isinstance(results, CouplingMap) else results
    ks = k if isinstance(k, Sequence) else (k,)
    if not named or not ks:
        raise ValueError(
            f"wanted at least one map and one k, got {len(named)} and {len(ks)}"
        )
    for name, result in named.items():
        _check_of_tokens(name, result)
    maps = [
        (name, result, result.k if n is None else n)
        for name, result in named.items()
        for n in ks
    ]
    # One scale for all maps of a view, or they could not be compared.
    vmax = vmax or max(
        color_scale([result], n, measure, **options)[1] for _, result, n in maps
    )
    parts = []
    for name, result, n in maps:
        null = result.null(n, measure, **options)
        title = _title_of_map(name, result, n, null)
        values = result.values(n, measure, **options).tolist()
        parts.append(f"<div>{title}{_map_widget(result, values, vmax)}</div>")
    bar = _color_bar(0.0, vmax)
    name = measure_named(measure).name
    scale = f"{name} {bar} grey: not compared, or undefined; null: random subspaces"
    return View(
        f'<p class="scale">{scale}</p><div class="tlc-maps">{"".join(parts)}</div>'
    )


@checked
def show_tokens(
    str_tokens: Sequence[str],
    values: Float[Tensor, " n_pos"] | Mapping[str, Float[Tensor, " n_pos"]],
) -> View:
    """Show the prompt with every token coloured by a value.

    The prompt stands once for each named value; the pointer shows the value.

    White is the smallest value and full red the largest; where some are negative white
    is 0, blue is negative, and both ends are equally far from 0. Undefined values (NaN)
    are hatched.

    Args:
        str_tokens: the tokens as text, `trace.str_tokens`.
        values: one value for each token, else ValueError; or several such, by name.

    Example:
        >>> x = trace.residual
        >>> measures = {
        ...     "line-shape score": tlc.line_shape_score(x),
        ...     "expodistance": tlc.expodistance(x),
        ... }
        >>> tlc.interactive.show_tokens(trace.str_tokens, measures)
        <View with 2 circuitsvis widgets>
    """
    named = _named_values(values, [len(str_tokens)])
    parts = (
        _title(name, row) + _tokens_widget(str_tokens, row, _scale(row))
        for name, row in named.items()
    )
    return View("".join(f'<div class="tlc-tokens">{part}</div>' for part in parts))


@checked
def show_layers_by_token(
    str_tokens: Sequence[str],
    values: Float[Tensor, "n_rows n_pos"] | Mapping[str, Float[Tensor, "n_rows n_pos"]],
    *,
    layers: Sequence[int | str] | None = None,
) -> View:
    """Show a value of every layer and token, the prompt once for each layer.

    The first layer is on top. Of more than 10, some evenly spaced ones are shown, and all
    of them where a reader asks for them.

    Colours as in `show_tokens`, with one scale for everything shown. Read along a row
    how tokens differ, and down a column how a token changes with depth.

    Args:
        str_tokens: the tokens as text, `trace.str_tokens`.
        values: `[n_rows n_pos]`, else ValueError, first row first layer; or several
            such, by name, side by side.
        layers: the rows' names, one for each; 0, 1, … by default.

    Example:
        >>> lengths = {"step length": tlc.step_lengths(trace.residual)}
        >>> tlc.interactive.show_layers_by_token(trace.str_tokens, lengths)
        <View with 2 circuitsvis widgets>
    """
    named = _named_values(
        values, ["n_rows" if layers is None else len(layers), len(str_tokens)]
    )
    # One scale for all rows and all names.
    everything = [value for rows in named.values() for row in rows for value in row]
    scale, parts = _scale(everything), []
    for name, rows in named.items():
        row_names = [
            str(label) for label in (range(len(rows)) if layers is None else layers)
        ]
        lines = [
            f"<div><b>{html.escape(label)}</b>{_tokens_widget(str_tokens, row, scale)}</div>"
            for label, row in zip(row_names, rows, strict=True)
        ]
        # In characters, with room on either side.
        width = max(map(len, row_names)) + 2
        parts.append(f"<div>{_title(name, everything)}{_folded(lines, width)}</div>")
    return View(f'<div class="tlc-columns">{"".join(parts)}</div>')


def _folded(lines: Sequence[str], label_width: int) -> str:
    """Make a box of lines; of many, some evenly spaced ones, and all behind a click."""
    opening = f'<div class="tlc-layers" tabindex="0" style="--label: {label_width}ch">'
    every_line = f"{opening}{''.join(lines)}</div>"
    if len(lines) <= _MOST_UNFOLDED:
        return every_line
    # Rounded up, so that never more than `_MOST_UNFOLDED` are shown.
    step = math.ceil(len(lines) / _MOST_UNFOLDED)
    some_lines = f"{opening}{''.join(lines[::step])}</div>"
    summary = f"<summary>all {len(lines)} rows</summary>"
    return f"{some_lines}<details>{summary}{every_line}</details>"


@lru_cache(maxsize=1)
def circuitsvis_script() -> str:
    """Return circuitsvis' own JavaScript, and the lines that draw every view on a page.

    It goes into one `<script>`.

    Example:
        >>> views = [
        ...     tlc.interactive.show_tokens(trace.str_tokens, x.norm(dim=-1))
        ...     for x in trace.residual
        ... ]
        >>> body = "".join(view.body for view in views)
        >>> page = f"{body}<script>{tlc.interactive.circuitsvis_script()}</script>"
    """
    file = Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js"
    # The bundle holds "</script>" in a string, which would end the element; its map is
    # not there to be loaded.
    bundle = file.read_text(encoding="utf-8").replace("</script", "<\\/script")
    bundle = "\n".join(
        line
        for line in bundle.splitlines()
        if not line.startswith("//# sourceMappingURL=")
    )
    # The words are in the bundle alone; circuitsvis takes none as arguments.
    for theirs, ours in _WORDS.items():
        bundle = bundle.replace(theirs, ours)
    bundle = _CHOICE_OF_LETTERS.sub(r"isDark(\1.toRgb())", bundle)
    boot = _HERE.with_suffix(".js").read_text(encoding="utf-8")
    # Once on a page: its parts complain when they are registered again.
    return (
        f"window.CircuitsVis ??= (() => {{ {_IS_DARK}\n{bundle}\nreturn CircuitsVis; }})();"
        f"\n{boot}"
    )


@lru_cache(maxsize=2)
def _packed(script: str) -> str:
    # Without the time, the same script gives the same bytes.
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def visible_token(token: str) -> str:
    """Return a token as text to look at.

    Control characters are shown by signs, and nothing in it is read as HTML.
    """
    return token.translate(_SHOWN_AS) or "∅"


def _named_values(
    values: Tensor | Mapping[str, Tensor], expected_sizes: list[Any]
) -> dict[str, Any]:
    """Return the values as lists of numbers, by name.

    A wanted size that is a name may be any but 0.
    """
    named = values if isinstance(values, Mapping) else {"": values}
    if not named:
        raise ValueError("`values` is empty: wanted at least one tensor of values")
    for name, tensor in named.items():
        sizes = list(tensor.shape)
        if 0 in sizes or any(
            w not in (n, "n_rows") for n, w in zip(sizes, expected_sizes, strict=True)
        ):
            raise ValueError(
                f"wanted values of shape [{' '.join(map(str, expected_sizes))}], the last "
                f"axis for tokens, got {sizes}" + (f" for {name!r}" if name else "")
            )
    return {name: tensor.tolist() for name, tensor in named.items()}


def _check_of_tokens(name: str, result: CouplingMap) -> None:
    """Raise ValueError for a map of layers."""
    if result.kind == "depth":
        map_name = repr(name) if name else "this"
        raise ValueError(
            "wanted maps of tokens (`self_coupling`, `context_coupling`), "
            f"{map_name} is of kind 'depth': use `plot_coupling`"
        )


def _title_of_map(name: str, result: CouplingMap, k: int, null: float) -> str:
    layers = f"layers {result.row_layers[0]}, {result.col_layers[0]}"
    words = (name or result.kind, layers, f"k = {k}", f"null {null:.3g}")
    return f"<h4>{html.escape(' · '.join(words))}</h4>"


def _map_widget(result: CouplingMap, values: list[list[float]], vmax: float) -> str:
    """Return the widget of one map.

    circuitsvis wants square maps: rows and columns are all positions that occur, and
    pairs that were not compared are grey.
    """
    places = list(dict.fromkeys((*result.row_positions, *result.col_positions)))
    cells = {
        (row, col): _cell(value, value / vmax, undefined=-1.0)
        for row, row_values in zip(result.row_positions, values, strict=True)
        for col, value in zip(result.col_positions, row_values, strict=True)
    }
    # In a map values are never negative: shade −1 is the grey of `negativeColor`.
    missing = {"text": "not compared", "shade": -1.0}
    return _widget(
        "AttentionPattern",
        "An interactive map of all pairs, drawn where scripts run.",
        attention=[
            [cells.get((row, col), missing) for col in places] for row in places
        ],
        tokens=token_names(result, places),
        maskUpperTri=False,
        negativeColor=_UNDEFINED,
    )


def token_names(result: CouplingMap, places: Sequence[int]) -> list[str]:
    """Return the text of each token, short, or its position where it is not known."""
    str_tokens = result.provenance.get("str_tokens")
    if not str_tokens:
        return [str(place) for place in places]
    names = [_short_name(str_tokens[place]) for place in places]
    # The widget counts what it shows from 0; where that is not the position, the
    # position is named as well.
    if list(places) == list(range(len(places))):
        return names
    return [f"{place}:{name}" for place, name in zip(places, names, strict=True)]


def _short_name(token: str) -> str:
    name = visible_token(token).strip() or "␣"
    if len(name) <= _LONGEST_LABEL:
        return name
    return name[: _LONGEST_LABEL - 1] + "…"


def _tokens_widget(
    str_tokens: Sequence[str], values: Sequence[float], scale: tuple[float, float]
) -> str:
    # Blue down to −high where low is −high; else white at low.
    start, high = max(scale[0], 0.0), scale[1]
    cells = [
        _cell(value, (value - start) / ((high - start) or 1.0), undefined=None)
        for value in values
    ]
    tokens = [visible_token(token) for token in str_tokens]
    as_text = " · ".join(
        f"{token.strip()} {cell['text']}"
        for token, cell in zip(tokens, cells, strict=True)
    )
    return _widget(
        "ColoredTokens", as_text, tokens=tokens, values=cells, negativeColor=_NEGATIVE
    )


def _scale(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low = min(finite)
    high = max(finite)
    if low >= 0:
        return low, high
    largest = max(-low, high)
    return -largest, largest


def _title(name: str, values: Sequence[float]) -> str:
    low, high = _scale(values)
    # 1e-22 beside 10 is 0 to the eye.
    low = 0.0 if abs(low) < 1e-6 * high else low
    scale = _color_bar(low, high)
    if any(map(math.isnan, values)):
        scale += " hatched: undefined"
    return f'<h4>{html.escape(name)} <span class="scale">{scale}</span></h4>'


def _color_bar(low: float, high: float) -> str:
    """Draw a colour bar with its ends labelled.

    It runs from white to red, or from blue over white to red where `low` is negative.
    """
    colors = f"{_NEGATIVE}, white, {_POSITIVE}" if low < 0 else f"white, {_POSITIVE}"
    return (
        f'<span class="tlc-bar">{labels.signed(low, ".3g")} '
        f'<i style="background: linear-gradient(to right, {colors})"></i> '
        f"{labels.signed(high, '.3g')}</span>"
    )


def _cell(value: float, shade: float, undefined: float | None) -> dict[str, Any]:
    if math.isnan(value):
        return {"text": "undefined", "shade": undefined}
    # Four digits are more than the eye tells apart, and keep the page small.
    text = labels.signed(value, ".4g")
    return {"text": text, "shade": round(max(-1.0, min(1.0, shade)), 4)}


def _widget(element: str, as_text: str, **props: Any) -> str:
    props |= {"minValue": -1, "maxValue": 1, "positiveColor": _POSITIVE}
    # NaN is no JSON: a browser would refuse to parse all of it.
    data = json.dumps(props, allow_nan=False, separators=(",", ":"))
    return (
        f'<div data-circuitsvis="{element}" data-props="{html.escape(data)}">'
        f"{html.escape(as_text)}</div>"
    )
