"""The blocks of a model that does not fit into memory: the model runs without them, and
they one after the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks.agreement import check_adds_the_same
from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.forward_passes import ForwardPass
from tl_coupling.blocks.function import BlockFunction
from tl_coupling.blocks.remarks import Remarks


class Sweep(Sequence[BlockFunction]):
    """The block functions of one pass. A block runs, once, when it or a later one is
    asked for.

    Its weights stay in memory until another's are needed: what is measured block by
    block reads every weight once.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        dtype: torch.dtype,
        remarks: Remarks,
        norm: nn.Module | None,
        own_pass: ForwardPass | None = None,
    ) -> None:
        layers = range(len(forward_pass.calls))
        self._calls = [forward_pass.call(layer, dtype) for layer in layers]
        # Those of the model that a bridge was made of.
        self._own_calls: list[BlockCall] = []
        if own_pass is not None:
            self._own_calls = [own_pass.call(layer, dtype) for layer in layers]
        self._stream = [forward_pass.calls[0].X.to(dtype)]
        self._functions: list[BlockFunction] = []
        self._remarks = remarks
        self._norm = norm

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, layer: int) -> BlockFunction: ...

    @overload
    def __getitem__(self, layer: slice) -> list[BlockFunction]: ...

    def __getitem__(self, layer: int | slice) -> BlockFunction | list[BlockFunction]:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        index = range(len(self))[layer]
        # A block needs what the one before gives, so that all before it run too.
        while len(self._functions) <= index:
            self._run(len(self._functions))
        return self._functions[index]

    @property
    def embedded(self) -> Float[Tensor, "n_pos d_model"]:
        """The residual stream that enters the first block."""
        return self._stream[0]

    def residual(self) -> Float[Tensor, "n_layers_plus_1 n_pos d_model"]:
        """Return the residual stream before every block and after the last."""
        last = self[-1]
        leaving = self._stream[-1]
        if self._norm is not None:
            leaving = last.X + last.step
        # The stream itself is kept before the final norm: the next sweep would start there.
        return torch.stack([*self._stream[:-1], leaving])

    def _run(self, layer: int) -> None:
        """Run the block at a layer, unless another thread has."""
        X = self._stream[layer]
        norm = self._norm if layer + 1 == len(self) else None
        # Its step is not known yet: X stands for it.
        block = self._block_function(layer, step=X, norm=norm)
        with block.evaluation():
            if len(self._functions) > layer:
                return
            Y = block.call(X)
            _check_finite(Y, block)
            if self._own_calls:
                check_adds_the_same(block.call, self._own_calls[layer], X, Y, layer)
            normed = Y if norm is None else norm(Y[None]).reshape(Y.shape)
            # The block before drops the values that it keeps for further Jacobians, and
            # makes them again if they are needed: a copy of the function keeps nothing.
            self._functions[layer - 1 :] = map(replace, self._functions[layer - 1 :])
            self._stream.append(Y)
            self._functions.append(
                self._block_function(layer, step=normed - X, norm=norm)
            )

    def _block_function(
        self, layer: int, step: Tensor, norm: nn.Module | None
    ) -> BlockFunction:
        return BlockFunction(
            layer,
            self._calls[layer],
            self._stream[layer],
            step,
            norm=norm,
            remarks=self._remarks,
        )


def _check_finite(Y: Tensor, block: BlockFunction) -> None:
    if bool(Y.isfinite().all()):
        return
    culprit = "all parameters of the block are finite"
    for name, parameter in block.call.module.named_parameters():
        if not parameter.isfinite().all():
            culprit = f"parameter {name!r} of the block is not finite"
            break
    raise ValueError(
        f"the residual stream at layer {block.layer + 1} has NaN or infinite entries; "
        f"{culprit}"
    )
