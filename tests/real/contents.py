"""What a GGUF file holds, read without transformers: whether its weights, and no
others, are those of the model that transformers makes of it.

The other oracles start from that model, so they cannot see what its loader left out.
"""

import math
from pathlib import Path

import numpy as np
from torch import nn

# Of the head, which reads the last block's output: the base model has none.
_HEAD = "output.weight"
# HuggingFace's loader reorders the rows of Llama's queries and keys, and takes 1 from
# Gemma's norm scales. Neither changes the standard deviation of a tensor's entries, but
# for rounding.
_SPREAD_TOLERANCE = 1e-5


def tensors_not_in_model(path: Path, model: nn.Module) -> tuple[int, list[str]]:
    """Return how many tensors of the file are a parameter of the model, and a sentence
    for each tensor, and each parameter, that has no counterpart.

    Counterparts have as many entries, and the same standard deviation of them.
    """
    from gguf import GGUFReader, dequantize

    spreads = {
        name: _spread(parameter.detach().numpy())
        for name, parameter in model.named_parameters()
    }
    n_matched = 0
    sentences = []
    for tensor in GGUFReader(path).tensors:
        if tensor.name == _HEAD:
            continue
        spread = _spread(dequantize(tensor.data, tensor.tensor_type))
        counterpart = next(
            (name for name, other in spreads.items() if _is_same(spread, other)), None
        )
        if counterpart is None:
            sentences.append(f"{tensor.name} of the file is not in the model")
        else:
            del spreads[counterpart]
            n_matched += 1
    sentences += [f"{name} of the model is not in the file" for name in spreads]
    return n_matched, sentences


def _spread(entries: np.ndarray) -> tuple[int, float]:
    """Return how many entries there are, and their standard deviation."""
    return entries.size, float(np.std(entries, dtype=np.float64))


def _is_same(spread: tuple[int, float], other: tuple[int, float]) -> bool:
    same_size = spread[0] == other[0]
    return same_size and math.isclose(spread[1], other[1], rel_tol=_SPREAD_TOLERANCE)
