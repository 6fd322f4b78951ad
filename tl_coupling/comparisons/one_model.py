"""Whether results are of one model that was traced in one way, and of prompts that
differ.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tl_coupling.blocks import Trace

# What provenances of one model, traced in one way, have in common.
_MODEL_FACTS = (
    "model",
    "checkpoint",
    "untrained",
    "quantization",
    "architecture",
    "weight_processing",
    "weights_digest",
    "spliced",
    "final_norm",
    "hooks",
    # Of a block: what `part_coupling` compares.
    "part",
)
# None where it is not known: of streamed models, and of results of earlier versions.
_UNKNOWN_IS_NONE = ("weights_digest",)


def check_one_model(
    first: Mapping[str, Any], other: Mapping[str, Any], name: str
) -> None:
    """Raise ValueError unless two provenances are of one model, traced in one way.

    Args:
        first: the provenance of the first result.
        other: that of another one.
        name: the argument that holds both, for the error.
    """
    for fact in _MODEL_FACTS:
        values = (first.get(fact), other.get(fact))
        # A digest that is not known contradicts no other.
        if fact in _UNKNOWN_IS_NONE and None in values:
            continue
        if values[0] != values[1]:
            raise ValueError(
                f"`{name}` must be of one model, traced in one way: of the same {fact}, "
                f"got {values[0]!r} and {values[1]!r}"
            )


def common_facts(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a provenance that another one holds too, and alike."""
    return {
        name: fact
        for name, fact in first.items()
        if name in other and other[name] == fact
    }


class DifferentPrompts:
    """Prompts that must differ: one that came twice would count as two, and intervals
    over prompts would be too narrow.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

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
        """Take a traced prompt, as `add` does."""
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
