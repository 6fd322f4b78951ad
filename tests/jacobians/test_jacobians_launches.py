"""What a GPU would feel of a block: operations that are dispatched, and tensors whose
values Python reads, each of which waits for all that was queued.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
import tl_coupling as tlc

# Measured: 1,054 and 8. Most operations are of the block's own code, which is run on
# all rows twice, backwards once, and on one row twice. The rest is room for other
# versions of torch and TransformerLens.
MOST_OPERATIONS = 1150
MOST_READINGS = 9


class Dispatched(TorchDispatchMode):
    """Count operations, and readings of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.readings = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        self.readings += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_block_dispatches_few_operations_and_reads_few_values(
    tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: Counter[str] = Counter()
    # Of several numbers at once: on a device that is not the CPU these wait as well.
    for name in ("tolist", "cpu"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, original=original, name=name) -> Any:
            arrays[name] += self.ndim > 0
            return original(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    tlc.depth_coupling(tlc.trace(tiny_trace.model, tiny.TOKENS), k=4, progress=False)
    counts = []
    for layers in ([0], [0, 1]):
        trace = tlc.trace(tiny_trace.model, tiny.TOKENS)
        arrays.clear()
        with Dispatched() as dispatched:
            tlc.depth_coupling(trace, k=4, layers=layers, progress=False)
        counts.append((dispatched.operations, dispatched.readings + arrays.total()))
    # Without what a map takes whatever its number of blocks.
    operations, readings = (b - a for a, b in zip(*counts, strict=True))
    assert 0 < operations <= MOST_OPERATIONS
    assert 0 < readings <= MOST_READINGS
