"""Prompts of one model that must differ, and what their traces have in common."""

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any

from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.results import check_one_model, joined_provenance

SeveralTraces = Annotated[
    Iterable[object], "a list of traced prompts: `trace(model, prompt)` makes one"
]


class DifferentPrompts:
    """Prompts that must differ: one that came twice would count as two, and intervals
    over prompts would be too narrow.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._provenances: list[dict[str, Any]] = []
        # What the next trace is compared with.
        self._reference: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._names)

    @property
    def provenance(self) -> dict[str, Any]:
        """Of a result over all traced prompts.

        Ask for it when all are measured: remarks are added until then.
        """
        return joined_provenance(self._provenances, list(self._names.values()))

    def add(self, name: str, content: Tensor) -> None:
        """Take a prompt; raise ValueError where it came before.

        Args:
            name: what the error calls it.
            content: what the model reads of it. Where that is the same it is the same
                prompt, whatever it is called.
        """
        # Every number of the model's precision is one in float64.
        values = content.detach().cpu().double().contiguous().numpy()
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        if digest in self._names:
            raise ValueError(
                f"one prompt is there twice, as {self._names[digest]!r} and {name!r}: "
                "give each once, or it would count as two"
            )
        self._names[digest] = name

    def add_traced(self, trace: Trace) -> None:
        """Take a traced prompt, as `add` does; ValueError for one of another model."""
        self._provenances.append(trace.provenance)
        self._reference = check_one_model(
            self._reference or trace.provenance, trace.provenance, "traces"
        )
        # An image is told by what the model reads of it, before any block.
        content = trace.pixels
        if content is None and trace.is_streamed:
            # Its stream would have to be read from disk first.
            content = trace.tokens
        if content is None:
            # The stream that enters the first block: two texts with the same one are
            # one prompt.
            content = trace.residual[0]
        self.add(prompt_name(trace), content)


def prompt_name(trace: Trace) -> str:
    """Return the prompt's text; of token ids their texts, of an image its name."""
    image = trace.provenance.get("image") or {}
    name = trace.provenance.get("prompt") or image.get("name")
    return name or "".join(trace.str_tokens)
