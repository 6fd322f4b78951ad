"""The blocks of a model that does not fit into memory: the model runs without them, and
they one after the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tl_coupling.blocks.passages import Passage
from tl_coupling.gradients.function import BlockFunction
from tl_coupling.gradients.remarks import Remarks


class Sweep(Sequence[BlockFunction]):
    """The block functions of one pass. A block runs, once, when it or a later one is
    asked for.

    Its weights stay in memory until another's are wanted: what is measured block by
    block reads every weight once.
    """

    def __init__(
        self,
        passage: Passage,
        dtype: torch.dtype,
        remarks: Remarks,
        norm: nn.Module | None,
    ) -> None:
        self._calls = [
            passage.call(layer, dtype) for layer in range(len(passage.calls))
        ]
        self._stream, self._functions = (
            [passage.calls[0].X.to(dtype)],
            list[BlockFunction](),
        )
        self._remarks, self._norm = remarks, norm

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, layer: Any) -> Any:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        layer = range(len(self))[layer]
        while len(self._functions) <= layer:
            self._run(len(self._functions))
        return self._functions[layer]

    @property
    def embedded(self) -> Tensor:
        """The residual stream `[n_pos d_model]` that enters the first block."""
        return self._stream[0]

    def residual(self) -> Tensor:
        """The residual stream `[n_layers+1 n_pos d_model]` before every block and after
        the last.
        """
        last = self[-1]
        return torch.stack(
            [*self._stream[:-1], last.X + last.step if self._norm else self._stream[-1]]
        )

    def _run(self, layer: int) -> None:
        """Run the block at a layer, unless another thread has."""
        X, norm = self._stream[layer], self._norm if layer + 1 == len(self) else None
        f = BlockFunction(layer, self._calls[layer], X, X, norm, None, self._remarks)
        with f.evaluation():
            if len(self._functions) > layer:
                return
            Y = f.call(X)
            if not bool(Y.isfinite().all()):
                named = f.call.module.named_parameters()
                culprits = (
                    f"parameter {name!r} of the block is not finite"
                    for name, p in named
                    if not p.isfinite().all()
                )
                found = next(culprits, "all parameters of the block are finite")
                raise ValueError(
                    f"the residual stream at layer {layer + 1} has NaN or infinite entries; {found}"
                )
            step = Y - X if norm is None else norm(Y[None]).reshape(Y.shape) - X
            # What the block before keeps for further Jacobians is made again if it is
            # wanted.
            self._functions[layer - 1 :] = map(replace, self._functions[layer - 1 :])
            self._stream.append(Y)
            self._functions.append(
                BlockFunction(layer, f.call, X, step, norm, None, self._remarks)
            )
