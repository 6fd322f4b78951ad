"""One forward pass of a model: every call of a block, and the residual stream before
and after it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tl_coupling.blocks.arithmetic import exact_arithmetic, hear_interrupts, map_tensors
from tl_coupling.blocks.calls import BlockCall, RecordedCall, hidden_states


@dataclass(frozen=True, eq=False)
class Passage:
    """Every call of a block in one forward pass, in order; `entered` are those that
    have not returned.

    `made` holds what modules outside the blocks produced (rotary embeddings), by the
    tensor's id: the tensor itself, its index in the output, the module and its
    arguments. `rounded` names the arguments that were cast as they are.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    entered: list[tuple[BlockCall, Tensor]] = field(default_factory=list)
    made: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        run: Callable[[], object],
        n_pos: int | None = None,
    ) -> "Passage":
        """What the blocks of a model do while `run` runs it, on `n_pos` tokens if that
        is known.

        Raises ValueError unless the blocks are called one after the other, each on the
        residual stream that the one before gave, of one input, with finite entries.
        """
        passage = cls()
        inside = {id(module) for block in blocks for module in block.modules()}
        with ExitStack() as hooks:
            for block in dict.fromkeys(blocks):
                hooks.enter_context(
                    block.register_forward_pre_hook(passage._enter, with_kwargs=True)
                )
                hooks.enter_context(block.register_forward_hook(passage._leave))
            # A bridge does not list every part of the model that it wraps.
            for module in {
                *model.modules(),
                *getattr(model, "original_model", model).modules(),
            }:
                if (
                    "rotary" in type(module).__name__.lower()
                    and id(module) not in inside
                ):
                    hooks.enter_context(
                        module.register_forward_hook(passage._make, with_kwargs=True)
                    )
            run()
        _check_calls(passage.calls, list(blocks), n_pos)
        # What a block gives lies where it lives; what it gets may lie where the one
        # before does.
        passage.calls[:] = [
            one._replace(
                X=one.call.rows(one.X).to(one.Y.device), Y=one.call.rows(one.Y)
            )
            for one in passage.calls
        ]
        _check_stream(passage.calls, model, len(blocks))
        return passage

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hear_interrupts()
        call, X = BlockCall.captured(module, args, kwargs)
        # A block may add to the stream in place.
        self.entered.append((call, X.detach().clone()))

    def _leave(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        call, X = self.entered.pop()
        dtypes = frozenset(
            p.dtype for p in module.parameters() if p.is_floating_point()
        ) | {X.dtype}
        self.calls.append(
            RecordedCall(call, X, hidden_states(output).detach().clone(), dtypes)
        )

    def _make(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        for part, tensor in (
            enumerate(output) if isinstance(output, tuple | list) else [(None, output)]
        ):
            if isinstance(tensor, Tensor) and not self.entered:
                self.made.setdefault(id(tensor), (tensor, part, module, args, kwargs))

    def stream(self, dtype: torch.dtype) -> list[Tensor]:
        """The residual stream `[n_pos d_model]` before every call and after the last,
        where the first block lives.
        """
        home = self.calls[0].X.device
        return [
            *(call.X.to(home, dtype) for call in self.calls),
            self.calls[-1].Y.to(home, dtype),
        ]

    def call(self, layer: int, dtype: torch.dtype) -> BlockCall:
        """One call, with its arguments in `dtype`."""
        call = self.calls[layer].call
        given = call.arguments.items()
        arguments = {
            name: map_tensors(value, partial(self._in_dtype, dtype, name))
            for name, value in given
        }
        return replace(call, arguments=arguments)

    def _in_dtype(self, dtype: torch.dtype, name: str, tensor: Tensor) -> Tensor:
        """A captured argument in `dtype`: computed again by its module in that
        precision, or else as it was rounded.
        """
        if tensor.dtype == dtype:
            return tensor
        if id(tensor) not in self.made:
            if "mask" not in name:  # Masks are exact.
                self.rounded.add(name)
            return tensor.to(dtype)
        _, part, module, *given = self.made[id(tensor)]
        args, kwargs = map_tensors(given, lambda one: one.to(dtype))
        with exact_arithmetic(tensor.device, [module], dtype):
            output = module(*args, **kwargs)
        again = output if part is None else output[part]
        return (again if again.shape == tensor.shape else tensor).to(dtype)


def _check_calls(
    calls: list[RecordedCall], blocks: list[nn.Module], n_pos: int | None
) -> None:
    modules = [recorded.call.module for recorded in calls]
    if not calls or modules != blocks * (len(calls) // len(blocks)):
        order = [
            next((i for i, block in enumerate(blocks) if block is module), "?")
            for module in modules
        ]
        raise ValueError(
            f"wanted a model that calls its {len(blocks)} blocks one after the other, this one called them in the "
            f"order {order}"
        )
    for layer, (call, X, Y, _) in enumerate(calls):
        rows = X.numel() // max(1, X.shape[-1])
        if (
            not call.holds(X)
            or X.shape != Y.shape
            or rows != (n_pos or calls[0].X.numel() // calls[0].X.shape[-1])
        ):
            wanted, why = (
                f" = [1 {n_pos} d_model]",
                "several parallel streams (hyper-connections, AltUp) are not X + f(X) of one",
            )
            if n_pos is None:
                wanted, why = (
                    "; run it on one input",
                    "feature maps of convolutions are not measured",
                )
            shapes = f"block {layer} takes {list(X.shape)} and gives {list(Y.shape)}"
            raise ValueError(
                f"wanted one residual stream [1 n_pos d_model]{wanted}, {shapes}: {why}"
            )


def _check_stream(calls: list[RecordedCall], model: nn.Module, n_blocks: int) -> None:
    for layer, X in enumerate([*(one.X for one in calls), calls[-1].Y]):
        if not bool(torch.isfinite(X).all()):
            culprits = [
                f"parameter {n!r} is not finite"
                for n, p in model.named_parameters()
                if not p.isfinite().all()
            ]
            found = next(iter(culprits), "all parameters are finite")
            raise ValueError(
                f"the residual stream at layer {layer} has NaN or infinite entries; {found}"
            )
    for layer, (one, after) in enumerate(pairwise(calls)):
        if not torch.equal(one.Y, after.X.to(one.Y.device)):
            again = (
                ", where the model runs its blocks again"
                if layer + 1 == n_blocks
                else ""
            )
            changed = f"the output of block {layer % n_blocks} is changed before the next block{again}"
            raise ValueError(f"{changed}: not one residual stream")
