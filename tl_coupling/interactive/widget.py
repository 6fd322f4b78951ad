"""The map to explore as a widget of notebooks, which Python and the reader share."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from tl_coupling.directions import Decoded
from tl_coupling.interactive.explorer_data import ExplorerData, written_directions
from tl_coupling.interactive.views import VIEW_STYLE

_HERE = Path(__file__)


def _widget_script() -> str:
    files = [_HERE.with_name(name) for name in ("explorer.js", "explorer_widget.js")]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


class Explorer(anywidget.AnyWidget):
    """Hold what is chosen in a map to explore, of which `explore` makes one.

    Attributes:
        pair: whose Jacobian and whose singular vectors, as numbers of layers, or of
            positions where tokens are compared.
        k: the number of top singular vectors.
        run: which of the results, by its number, where more than four are gone through
            by a slider.

    All are read, set and observed: `widget.observe(function, "pair")`.
    """

    pair = traitlets.Tuple(traitlets.Int(), traitlets.Int()).tag(sync=True)
    k = traitlets.Int().tag(sync=True)
    run = traitlets.Int(0).tag(sync=True)
    numbers = traitlets.Dict().tag(sync=True)
    directions = traitlets.Dict().tag(sync=True)

    _esm = _widget_script()
    _css = VIEW_STYLE

    def __init__(
        self, data: ExplorerData, decode: Callable[[int], Decoded] | None = None
    ):
        self._picture = data.picture
        self._name = data.name
        self._decoded: dict[int, Decoded] = {}
        numbers = data.numbers
        row, column = numbers["pair"]
        super().__init__(
            numbers=numbers,
            directions=numbers["directions"],
            k=numbers["first_k"],
            pair=(numbers["row_keys"][row], numbers["col_keys"][column]),
        )
        if decode is not None:
            self._decode_pair(decode)
            self.observe(lambda change: self._decode_pair(decode), "pair")

    @traitlets.validate("pair")
    def _check_pair(self, proposal: Any) -> tuple[int, int]:
        row, column = proposal["value"]
        rows, columns = self.numbers["row_keys"], self.numbers["col_keys"]
        if row not in rows or column not in columns:
            side = self.numbers["side"]
            raise traitlets.TraitError(
                f"`pair` must be two {side}s of the map, rows {_range(rows)} and columns "
                f"{_range(columns)}, got {proposal['value']}"
            )
        return row, column

    @traitlets.validate("k")
    def _check_k(self, proposal: Any) -> int:
        k = int(proposal["value"])
        largest_k = self.numbers["ks"][-1]
        if not 1 <= k <= largest_k:
            raise traitlets.TraitError(f"`k` must be 1 to {largest_k}, got {k}")
        return k

    @traitlets.validate("run")
    def _check_run(self, proposal: Any) -> int:
        run = int(proposal["value"])
        last = len(self.numbers["runs"]) - 1
        if not 0 <= run <= last:
            raise traitlets.TraitError(f"`run` must be 0 to {last}, got {run}")
        return run

    def _decode_pair(self, decode: Callable[[int], Decoded]) -> None:
        """Decode what the layers of the pair write, each once."""
        numbers = self.numbers
        row, column = self.pair
        layers = (
            numbers["row_layers"][numbers["row_keys"].index(row)],
            numbers["col_layers"][numbers["col_keys"].index(column)],
        )
        for layer in layers:
            if layer not in self._decoded:
                self._decoded[layer] = decode(layer)
        # In the browser, names of a dictionary are texts.
        texts = written_directions(list(self._decoded.values()))
        self.directions = {str(layer): each for layer, each in texts.items()}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Add the picture, for places that show no widget."""
        shown = super()._repr_mimebundle_(**options)
        data, metadata = shown if isinstance(shown, tuple) else (shown or {}, {})
        data = {**data, "image/png": base64.b64encode(self._picture).decode()}
        return data, metadata

    def __repr__(self) -> str:
        row, column = self.pair
        return f"<Explorer of {self._name}; pair ({row}, {column}), k = {self.k}>"


def _range(keys: Sequence[int]) -> str:
    if list(keys) == list(range(keys[0], keys[-1] + 1)):
        return f"{keys[0]} to {keys[-1]}"
    return ", ".join(map(str, keys))
