"""Draw a coupling map that is explored by pointer and keyboard: every pair's value beside
its null, its matrix A, and each k.

The numbers are in the page, in 16 bits each, and a short script draws them. Plotting
libraries that could be embedded are many times longer, and none of their maps is used by
keyboard.
"""

import base64
import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import PIL.Image

from tl_coupling.arguments import Count, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.directions import Decoded
from tl_coupling.interactive.explorer_data import ExplorerData
from tl_coupling.interactive.views import View

_HERE = Path(__file__)


@checked
def show_coupling(
    results: CouplingMap | Mapping[str, CouplingMap],
    *,
    k: int | None = None,
    matrix_k: Count = 16,
    decoded: Decoded | Sequence[Decoded] = (),
) -> View:
    """Show coupling of every pair as a map to explore, with the matrix A behind each.

    Up to four results stand side by side on one scale, which ends at the largest value
    of two different connections at the first `k` and stays for every k; chance is marked
    on it. The pointer, or the arrow keys, choose a pair in all maps at once: its values,
    how many times its null the first is, its matrix A of every result on one colour
    scale, and its coupling at every k beside the null. A click keeps the pair. A slider
    goes through every k. Of two results their difference can be shown; more than four,
    such as checkpoints, are gone through by a slider of their own. Where scripts do not
    run, a picture of the maps stands in their place.

    Args:
        results: maps of the same pairs, of layers or of tokens, by name; or one.
        k: the number of top singular vectors to begin with: 10, or all of a smaller map,
            by default.
        matrix_k: how many rows of each A are shown at most.
        decoded: of `directions.decode`: what the directions of some layers write is
            shown where one of these is chosen.

    Raises:
        ValueError: no result, maps of different pairs, or a k that they do not hold.

    Cost: `2 k + 2 matrix_k²` bytes for each pair and result, and a third more for the
    page: about 1.5 MB for 30 layers, k = 50 and two results.

    Example:
        >>> result = tlc.depth_coupling(trace, k=4)
        >>> tlc.interactive.show_coupling({"trained": result, "untrained": result})
        <View of the coupling of 2 × 2 layers, k ≤ 4: trained, untrained>
    """
    data = ExplorerData.of(results, k, matrix_k, decoded)
    text = html.escape(json.dumps(data.numbers, allow_nan=False, separators=(",", ":")))
    width, height = PIL.Image.open(io.BytesIO(data.picture)).size
    still = (
        f'<img src="data:image/png;base64,{base64.b64encode(data.picture).decode()}" '
        f'width="{width}" height="{height}" '
        f'alt="{html.escape(data.name)}: an interactive map where scripts run">'
    )
    body = f'<div class="tlc-explorer" data-map="{text}">{still}</div>'
    return View(body, explorer_script(), data.name, data.picture)


@checked
def explore(
    results: CouplingMap | Mapping[str, CouplingMap],
    *,
    k: int | None = None,
    matrix_k: Count = 16,
    decode: Callable[[int], Decoded] | None = None,
) -> Any:
    """Show a map to explore as a widget of a notebook, which Python and its reader share.

    It is the map of `show_coupling`, as a widget of ipywidgets. `widget.pair` and
    `widget.k` say what the reader has chosen, and choose when they are set;
    `widget.observe(function, "pair")` calls a function at each change.

    Args:
        results, k, matrix_k: as in `show_coupling`.
        decode: a function of a layer, such as `partial(tlc.directions.decode, trace, k=5)`
            of functools: what the directions of both layers of the pair write is shown
            with it.

    Raises:
        ImportError: anywidget is not installed.
        ValueError: as `show_coupling`.

    Cost: the numbers of `show_coupling` are sent to the browser once; each layer that is
    chosen is decoded once.

    Example:
        >>> widget = tlc.explore(tlc.depth_coupling(trace, k=4))
        >>> widget.pair = (1, 0)
        >>> widget
        <Explorer of the coupling of 2 × 2 layers, k ≤ 4; pair (1, 0), k = 4>
    """
    try:
        from tl_coupling.interactive.widget import Explorer
    except ImportError as error:
        raise ImportError(
            '`explore` needs anywidget: pip install "tl-coupling[notebook]", or use '
            f"`tl_coupling.interactive.show_coupling`, which needs nothing ({error})"
        ) from error

    return Explorer(ExplorerData.of(results, k, matrix_k), decode)


@lru_cache(maxsize=1)
def explorer_script() -> str:
    """Return the script that draws every map of `show_coupling` on a page."""
    files = [_HERE.with_name(name) for name in ("explorer.js", "explorer_page.js")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
