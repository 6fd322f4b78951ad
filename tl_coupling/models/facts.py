"""What is remembered of a model, in one place, as long as the model lives."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tl_coupling.models.made_of import MadeOf
from tl_coupling.models.stored import holds_stored_weights


class LoadedAs(TypedDict, total=False):
    """How a model was loaded, as its provenance says it; empty for other models.

    `head` says why a head is random, of which the checkpoint lacks weights; `adapter`
    which adapter was applied to the weights.
    """

    model: str
    checkpoint: int | str | None
    untrained: bool
    quantization: str
    quantized: str
    weights: str
    n_params: int
    head: str
    seed: int
    trust_remote_code: bool
    memory: str
    adapter: str


class BlockOutputs(NamedTuple):
    """What the blocks of a model return: `lengths` of their tuples (0 for a tensor),
    and an empty residual stream.

    Known for the `dtype` that the model's first parameter had at the time.
    """

    dtype: torch.dtype
    lengths: tuple[int, ...]
    empty_stream: Tensor


@dataclass(eq=False)
class ModelFacts:
    """What was found out about a model, or a part of one, and holds as long as it lives.

    Attributes:
        is_streamed: whether weights are in files and are read block by block.
        loaded_as: how `load_model` loaded it.
        is_filled_when_called: whether its parts have their weights while they are
            called, within a measurement that goes on.
        block_outputs: what its blocks return, once its logits were seen to follow from
            what leaves the last of them.
        has_final_norm: whether `ln_final` was seen to be the norm between the last
            block and the last hidden state.
        output_length: how long the tuples are that its blocks return, 0 for a tensor,
            as a run without the blocks has shown.
        made_of: what a bridge was made of, with which it is compared on each prompt;
            None where that is not known.
        path_of_blocks: of the list of blocks of a HuggingFace model; None where nobody
            has looked for it.
    """

    is_streamed: bool
    loaded_as: LoadedAs = field(default_factory=LoadedAs)
    is_filled_when_called: bool = False
    block_outputs: BlockOutputs | None = None
    has_final_norm: bool = False
    output_length: int | None = None
    made_of: MadeOf | None = None
    path_of_blocks: str | None = None


# Beside the models: nothing of a model is another after it was measured.
_facts: WeakKeyDictionary[nn.Module, ModelFacts] = WeakKeyDictionary()


def facts_of(model: nn.Module) -> ModelFacts:
    """Return what is remembered of a model, or of a part of one.

    A copy of a model, and one that was saved, has facts of its own.
    """
    facts = _facts.get(model)
    if facts is None:
        facts = _facts[model] = ModelFacts(is_streamed=holds_stored_weights(model))
    return facts
