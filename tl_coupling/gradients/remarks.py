"""What a user would not expect of a measured trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tl_coupling.arguments import warn_caller


class Remark(NamedTuple):
    """One remark, and the kind that it is of."""

    kind: str
    text: str


@dataclass(eq=False)
class Remarks:
    """What a user would not expect of a measured trace, for its provenance; the first
    of each kind is a warning too.

    `normalising_layers` are the layers whose residual branches were compared before
    their norms.
    """

    texts: list[str] = field(default_factory=list)
    normalising_layers: list[int] = field(default_factory=list)
    warned_of: set[str] = field(default_factory=set)
    _collected: "CollectedRemarks | None" = None

    def add(self, kind: str, text: str) -> None:
        """Note it, if it is new; warn if it is the first of its kind."""
        if self._collected is not None:
            self._collected.remarks.append(Remark(kind, text))
        elif text not in self.texts:
            self.texts.append(text)
            if kind not in self.warned_of:
                self.warned_of.add(kind)
                warn_caller(f"{text} (others like it: `provenance['remarks']`)")

    def add_normalising_layer(self, layer: int) -> None:
        """Note a layer whose branches were compared before their norms."""
        if self._collected is not None:
            self._collected.normalising_layers.append(layer)
        elif layer not in self.normalising_layers:
            self.normalising_layers.append(layer)

    @contextmanager
    def collected(self) -> "Iterator[CollectedRemarks]":
        """Collect what would be noted in this context: no warning is given.

        A fork's remarks are lost with it: it sends them, and they are added here.
        """
        self._collected = CollectedRemarks([], [])
        try:
            yield self._collected
        finally:
            self._collected = None

    def add_collected(self, collected: "CollectedRemarks") -> None:
        """Note what was collected, as if it had been noted at once."""
        for remark in collected.remarks:
            self.add(*remark)
        for layer in collected.normalising_layers:
            self.add_normalising_layer(layer)


class CollectedRemarks(NamedTuple):
    """Remarks and normalising layers that are not noted yet."""

    remarks: list[Remark]
    normalising_layers: list[int]
