"""Views to hover over, drawn by circuitsvis: couplings of tokens, values of tokens, values of layers and tokens.

Every function takes results and returns a `View`, which shows itself in Jupyter and Colab and asks no network for
anything. `str(view)` is its HTML; a page with several views takes `circuitsvis_script()` once and `view.body` of each.

>>> view = show_tokens(trace.str_tokens, tlc.line_shape_score(trace.residual))
"""

import html
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import circuitsvis
from circuitsvis.utils.render import RenderedHTML
from jaxtyping import Float
from torch import Tensor

from tl_coupling.border import Positive, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.coupling import BOUNDED_BY_1, Measure

__all__ = ["show_layers_by_token", "show_token_coupling", "show_tokens"]

_LONGEST_LABEL = 14
_POSITIVE, _NEGATIVE, _UNDEFINED = "#2166ac", "#b2182b", "#bbbbbb"
# Keeps `<` and `&` from being read as HTML, as circuitsvis' token widgets would, and takes no room as text.
_WORD_JOINER = "\u2060"
_SHOWN_AS = {"\n": "↵", "\r": "␍", "\t": "⇥", "<": f"<{_WORD_JOINER}", "&": f"&{_WORD_JOINER}"}
# They would turn the text after them around.
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# A widget colours by a value and prints the same value: this array prints as its text and counts as its shade.
_BOOT = """
const cell = (text, shade) => Object.assign([text], {valueOf: () => shade ?? NaN});
const revive = (key, value) => value?.text === undefined ? value : cell(value.text, value.shade);
for (const div of document.querySelectorAll("[data-circuitsvis]:not([id])")) {
  div.id = "circuits-vis-" + Math.random().toString(36).slice(2);
  CircuitsVis.render(div.id, CircuitsVis[div.dataset.circuitsvis], JSON.parse(div.dataset.props, revive));
}
"""
# The maps' own margins would spill out of a page. A transparent token (white on white) is one whose value is undefined.
# Boxes that scroll stay unpositioned, or they would cut tooltips off.
VIEW_STYLE = """
.tlc-view { background: white; color: #111; color-scheme: light; font: 14px/1.5 system-ui, sans-serif; }
.tlc-view h4 { margin: 0 0 .25em; font-size: 1em; font-weight: 600; }
.tlc-view .scale { color: #555; font-size: .9em; font-weight: 400; }
.tlc-maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22em), 1fr)); gap: 1.5em; }
.tlc-maps > div { max-width: 36em; min-width: 0; }
.tlc-maps [data-circuitsvis] div { margin-inline: 0 !important; }
.tlc-tokens { margin-bottom: 1em; }
.tlc-layers { overflow-x: auto; padding-bottom: 1em; }
.tlc-layers > div { display: flex; width: max-content; }
.tlc-layers > div > b { flex: none; width: var(--label); font-weight: 400; color: #555; }
.tlc-columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24em), 1fr)); gap: 0 1.5em; }
.tlc-columns > div { min-width: 0; }
.tlc-layers .colored-tokens { white-space: nowrap; }
.tlc-view .colored-tokens > span > span[style*="rgba(0, 0, 0, 0)"] {
  background: repeating-linear-gradient(45deg, #ccc 0 3px, white 3px 6px) !important; color: #111 !important; }
"""


class View(RenderedHTML):
    """Widgets of circuitsvis, with their data and nothing else.

    A `circuitsvis.utils.render.RenderedHTML` that never asks whether there is a network and never loads from one.

    Attributes:
        body: the HTML of the widgets, without the script that draws them; the same for the same data.
    """

    def __init__(self, body: str):
        self.body = f'<div class="tlc-view">{body}</div>'

    @property
    def local_src(self) -> str:
        """HTML that draws the widgets on its own, 1.3 MB of it circuitsvis' script."""
        # A module runs once the cell's output is on the page, which a plain script may not wait for.
        return f'<style>{VIEW_STYLE}</style>{self.body}<script type="module">{circuitsvis_script()}</script>'

    @property
    def cdn_src(self) -> str:
        """`local_src`: a view loads nothing."""
        return self.local_src

    def _repr_html_(self) -> str:
        return self.local_src

    def __repr__(self) -> str:
        return f"<View with {self.body.count('data-circuitsvis=')} circuitsvis widgets>"


@checked
def show_token_coupling(
    results: CouplingMap | Mapping[str, CouplingMap],
    *,
    k: int | Sequence[int] | None = None,
    measure: Measure = "coupling",
    vmax: Positive | None = None,
    **options: Any,
) -> View:
    """Token-by-token maps of a measure, one for each result and each k; the pointer shows a pair and its value.

    Rows (which circuitsvis calls destination) are the tokens of J_1, columns (source) those that gave the singular
    vectors. White is 0. Grey pairs were not compared, or their value is undefined.

    Args:
        results: maps of kind "self" or "context", by name; or one.
        k: how many top singular vectors, or several such numbers; as many as each map holds by default.
        measure: as in `CouplingMap.values`.
        vmax: the value in full colour; 1 for the measures bounded by 1, else the largest value of all maps.
        options: `p` and `absolute`, for `spectral_miscoupling`.

    Raises:
        TypeError: results that are no maps.
        ValueError: no map, a map of layers, k or measure not among those of a map.

    Cost: a page of about 100 bytes for each pair.

    Example:
        >>> show_token_coupling(tlc.self_coupling(trace, 0, 1, k=8), k=(4, 8))
        <View with 2 circuitsvis widgets>
    """
    named = {"": results} if isinstance(results, CouplingMap) else results
    ks = k if isinstance(k, Sequence) else (k,)
    if not named or not ks:
        raise ValueError(f"wanted at least one map and one k, got {len(named)} and {len(ks)}")
    maps = [(name, result, result.k if n is None else n) for name, result in named.items() for n in ks]
    for name, result, _ in maps:
        if result.kind == "depth":
            raise ValueError(
                f"wanted maps of tokens (`self_coupling`, `context_coupling`), {repr(name) if name else 'this'} "
                "is of kind 'depth': use `plot_coupling`"
            )
    values = [_numbers(result.values(n, measure, **options)) for _, result, n in maps]
    if vmax is None:
        finite = [v for grid in values for row in grid for v in row if math.isfinite(v)]
        vmax = 1.0 if measure in BOUNDED_BY_1 else max(finite, default=1.0)
    parts = [
        f"<div><h4>{html.escape(_map_title(name, result, n))}</h4>{_map_widget(result, grid, vmax)}</div>"
        for (name, result, n), grid in zip(maps, values, strict=True)
    ]
    scale = f'<p class="scale">{measure}: white 0, blue {vmax:.3g}; grey: not compared, or undefined</p>'
    return View(f'{scale}<div class="tlc-maps">{"".join(parts)}</div>')


@checked
def show_tokens(
    str_tokens: Sequence[str], values: Float[Tensor, " n_pos"] | Mapping[str, Float[Tensor, " n_pos"]]
) -> View:
    """The prompt with every token coloured by a value, once for each named value; the pointer shows the value.

    White is the smallest value and full blue the largest; where some are negative white is 0, red is negative, and both
    ends lie equally far. Undefined values (NaN) are hatched.

    Args:
        str_tokens: the tokens as text, `trace.str_tokens`.
        values: one value for each token; or several such, by name.

    Raises:
        ValueError: no values, or not one for each token.

    Example:
        >>> x = trace.residual
        >>> measures = {"line-shape score": tlc.line_shape_score(x), "expodistance": tlc.expodistance(x)}
        >>> show_tokens(trace.str_tokens, measures)
        <View with 2 circuitsvis widgets>
    """
    named = values if isinstance(values, Mapping) else {"": values}
    if not named:
        raise ValueError("`values` is empty: wanted at least one value for each token")
    parts = []
    for name, of_tokens in named.items():
        if of_tokens.shape != (len(str_tokens),):
            raise ValueError(
                f"wanted one value for each of the {len(str_tokens)} tokens, got shape {list(of_tokens.shape)}"
                + (f" for {name!r}" if name else "")
            )
        numbers = _numbers(of_tokens)
        low, high = _scale(numbers)
        title = _title(name, numbers)
        parts.append(f'<div class="tlc-tokens">{title}{_tokens_widget(str_tokens, numbers, low, high)}</div>')
    return View("".join(parts))


@checked
def show_layers_by_token(
    str_tokens: Sequence[str],
    values: Float[Tensor, "n_rows n_pos"] | Mapping[str, Float[Tensor, "n_rows n_pos"]],
    *,
    layers: Sequence[int | str] | None = None,
) -> View:
    """A value for every layer and token: the prompt once for each layer, coloured by it; the deepest layer on top.

    Colours as in `show_tokens`, but one scale for all that is shown. Read along a row how tokens differ, and up a
    column how a token changes with depth.

    Args:
        str_tokens: the tokens as text, `trace.str_tokens`.
        values: `[n_rows n_pos]`, first row first layer; or several such, by name, side by side.
        layers: the rows' names; 0, 1, … by default.

    Raises:
        ValueError: no values, values that are not `[n_rows n_pos]`, or not one name for each row.

    Example:
        >>> show_layers_by_token(trace.str_tokens, {"step length": tlc.step_lengths(trace.residual)})
        <View with 2 circuitsvis widgets>
    """
    named = values if isinstance(values, Mapping) else {"": values}
    if not named:
        raise ValueError("`values` is empty: wanted at least one value for each layer and token")
    for name, grid in named.items():
        n_rows = len(grid) if layers is None else len(layers)
        if n_rows == 0 or grid.shape != (n_rows, len(str_tokens)):
            raise ValueError(
                f"wanted values of shape [{n_rows or 'n_rows'} {len(str_tokens)}], a row for each layer and a column "
                f"for each token, got {list(grid.shape)}" + (f" for {name!r}" if name else "")
            )
    numbers = {name: _numbers(grid) for name, grid in named.items()}
    everything = [value for rows in numbers.values() for row in rows for value in row]
    low, high = _scale(everything)
    parts = []
    for name, rows in numbers.items():
        labels = [str(label) for label in (range(len(rows)) if layers is None else layers)]
        lines = [
            f"<div><b>{html.escape(label)}</b>{_tokens_widget(str_tokens, row, low, high)}</div>"
            for label, row in zip(labels, rows, strict=True)
        ]
        parts.append(
            f'<div>{_title(name, everything)}<div class="tlc-layers" tabindex="0" style="--label: '
            f'{max(map(len, labels)) + 2}ch">{"".join(reversed(lines))}</div></div>'
        )
    return View(f'<div class="tlc-columns">{"".join(parts)}</div>')


@lru_cache(maxsize=1)
def circuitsvis_script() -> str:
    """circuitsvis' own JavaScript, and the lines that draw every view on the page; goes into one `<script>`."""
    file = Path(circuitsvis.__file__).parent / "dist" / "cdn" / "iife.js"
    # The bundle holds "</script>" in a string, which would end the element; its map is not there to be loaded.
    bundle = file.read_text(encoding="utf-8").replace("</script", "<\\/script")
    bundle = "\n".join(line for line in bundle.splitlines() if not line.startswith("//# sourceMappingURL="))
    # Once on a page: its parts complain when they are registered again.
    return f"window.CircuitsVis ??= (() => {{ {bundle}\nreturn CircuitsVis; }})();{_BOOT}"


def visible_token(token: str) -> str:
    """A token as text to look at: controls have signs of their own, and nothing in it is read as HTML."""
    shown = "".join(_visible(character) for character in token)
    return shown or "∅"


def _visible(character: str) -> str:
    if character in _SHOWN_AS:
        return _SHOWN_AS[character]
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _BIDIRECTIONAL:
        return character.encode("unicode_escape").decode()
    return character


def _short(token: str) -> str:
    """Room for the map beside its labels."""
    token = token.strip() or "␣"
    return token if len(token) <= _LONGEST_LABEL else token[: _LONGEST_LABEL - 1] + "…"


def _map_title(name: str, result: CouplingMap, k: int) -> str:
    layers = f"layers {result.row_layers[0]}, {result.col_layers[0]}"
    return " · ".join(filter(None, (name or result.kind, layers, f"k = {k}")))


def _map_widget(result: CouplingMap, values: list[list[float]], vmax: float) -> str:
    """circuitsvis wants square maps: rows and columns are all positions that occur, pairs that do not stay grey."""
    places = list(dict.fromkeys((*result.row_positions, *result.col_positions)))
    known = {
        (row, col): value
        for row, of_row in zip(result.row_positions, values, strict=True)
        for col, value in zip(result.col_positions, of_row, strict=True)
    }
    attention = [
        [
            _cell(known[row, col], known[row, col] / (vmax or 1.0), undefined=-1.0)
            if (row, col) in known
            else {"text": "not compared", "shade": -1.0}
            for col in places
        ]
        for row in places
    ]
    str_tokens = result.provenance.get("str_tokens")
    tokens = [str(place) if str_tokens is None else _short(visible_token(str_tokens[place])) for place in places]
    # The widget counts what it shows from 0; where that is not the position, the position is named as well.
    if str_tokens is not None and places != list(range(len(places))):
        tokens = [f"{place}:{token}" for place, token in zip(places, tokens, strict=True)]
    return _widget(
        "AttentionPattern",
        attention=attention,
        tokens=tokens,
        maskUpperTri=False,
        minValue=-1,
        maxValue=1,
        positiveColor=_POSITIVE,
        negativeColor=_UNDEFINED,
    )


def _tokens_widget(str_tokens: Sequence[str], values: Sequence[float], low: float, high: float) -> str:
    # Red down to −high where low is −high; else white at low.
    start = 0.0 if low < 0 else low
    return _widget(
        "ColoredTokens",
        tokens=[visible_token(token) for token in str_tokens],
        values=[_cell(value, (value - start) / ((high - start) or 1.0), undefined=None) for value in values],
        minValue=-1,
        maxValue=1,
        positiveColor=_POSITIVE,
        negativeColor=_NEGATIVE,
    )


def _scale(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return (-max(-low, high), max(-low, high)) if low < 0 else (low, high)


def _title(name: str, values: Sequence[float]) -> str:
    low, high = _scale(values)
    # 1e-22 beside 10 is 0 to the eye.
    low = 0.0 if abs(low) < 1e-6 * high else low
    scale = f"red {low:.3g}, white 0, blue {high:.3g}" if low < 0 else f"white {low:.3g}, blue {high:.3g}"
    scale += ", hatched: undefined" if any(map(math.isnan, values)) else ""
    return f'<h4>{html.escape(name)} <span class="scale">{scale}</span></h4>'


def _cell(value: float, shade: float, undefined: float | None) -> dict[str, Any]:
    if math.isnan(value):
        return {"text": "undefined", "shade": undefined}
    return {"text": f"{value:.4g}", "shade": round(max(-1.0, min(1.0, shade)), 4)}


def _widget(element: str, **props: Any) -> str:
    data = json.dumps(props, allow_nan=False, separators=(",", ":"))
    return f'<div data-circuitsvis="{element}" data-props="{html.escape(data)}"></div>'


def _numbers(values: Tensor) -> Any:
    return values.detach().cpu().double().tolist()
