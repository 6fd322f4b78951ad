"""What a user would not expect of a measured trace."""

from dataclasses import dataclass, field

from tl_coupling.arguments import warn_caller


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

    def add(self, kind: str, text: str) -> None:
        """Note it, if it is new; warn if it is the first of its kind."""
        if text in self.texts:
            return
        self.texts.append(text)
        if kind not in self.warned_of:
            self.warned_of.add(kind)
            warn_caller(f"{text} (others like it: `provenance['remarks']`)")

    def add_normalising_layer(self, layer: int) -> None:
        """Note a layer whose branches were compared before their norms."""
        if layer not in self.normalising_layers:
            self.normalising_layers.append(layer)
