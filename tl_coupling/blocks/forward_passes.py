"""One forward pass of a model: every call of a block, and the residual stream before
and after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import exact_arithmetic, map_tensors
from tl_coupling.blocks.calls import BlockCall, RecordedCall, hidden_states
from tl_coupling.models import CallState


class _MadeOutside(NamedTuple):
    """A tensor that a module outside the blocks produced, and how.

    `entry` is its index in the output, None where it is the output itself.

    The tensor is held so that no other gets its id.
    """

    tensor: Tensor
    entry: int | None
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self, dtype: torch.dtype) -> Tensor:
        """Produce it again, in another precision."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype)

        args, kwargs = map_tensors([self.args, self.kwargs], cast)
        with exact_arithmetic(self.tensor.device, [self.module], dtype):
            output = self.module(*args, **kwargs)
        # Rotary modules give cosines and sines as a pair.
        again = output if self.entry is None else output[self.entry]
        return (again if again.shape == self.tensor.shape else self.tensor).to(dtype)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """Every call of a block in one forward pass, in order; `entered` are those that
    have not returned, `states` how their modules were called.

    `made` holds what modules outside the blocks produced (rotary embeddings), by the
    tensor's id. `rounded` names the arguments that were cast as they are.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    entered: list[tuple[BlockCall, Tensor]] = field(default_factory=list)
    states: list[CallState] = field(default_factory=list)
    made: dict[int, _MadeOutside] = field(default_factory=dict)
    rounded: set[str] = field(default_factory=set)

    @classmethod
    def record(
        cls,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        run: Callable[[], object],
        n_pos: int | None = None,
    ) -> "ForwardPass":
        """Return what the blocks of a model do while `run` runs it, on `n_pos` tokens if
        that is known.

        Raises:
            ValueError: the blocks are not called one after the other, each on the
                residual stream that the one before gave, of one input, with finite
                entries.
        """
        forward_pass = cls()
        with shared_changes() as hooks:
            # A block that runs several times gets one hook, which is called each time.
            for block in dict.fromkeys(blocks):
                # Before hooks of the user's, which are part of the block.
                hooks.enter_context(
                    block.register_forward_pre_hook(
                        forward_pass._enter, with_kwargs=True, prepend=True
                    )
                )
                hooks.enter_context(block.register_forward_hook(forward_pass._leave))
            for module in _rotary_modules_outside(model, blocks):
                hooks.enter_context(
                    module.register_forward_hook(forward_pass._make, with_kwargs=True)
                )
            run()
        forward_pass._keep_states()
        _check_order(forward_pass.calls, list(blocks))
        forward_pass.calls[:] = calls_on_one_stream(
            forward_pass.calls, model, len(blocks), n_pos
        )
        return forward_pass

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call, X = BlockCall.captured(module, args, kwargs)
        self.states.append(CallState(module))
        # A block may add to the stream in place.
        self.entered.append((call, X.detach().clone()))

    def _keep_states(self) -> None:
        """Give each call the state of its modules, where it is another by now."""
        for layer, (recorded, state) in enumerate(
            zip(self.calls, self.states, strict=False)
        ):
            changes = state.changes()
            if changes:
                call = replace(recorded.call, state=changes)
                self.calls[layer] = recorded._replace(call=call)

    def _leave(self, module: nn.Module, _: tuple[Any, ...], output: object) -> None:
        call, X = self.entered.pop()
        Y = hidden_states(output).detach().clone()
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        self.calls.append(RecordedCall(call, X, Y, frozenset({*dtypes, X.dtype})))

    def _make(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        # Within a block it is the block's own.
        if self.entered:
            return
        tensors: list[tuple[int | None, object]] = [(None, output)]
        if isinstance(output, tuple | list):
            tensors = list(enumerate(output))
        for index, tensor in tensors:
            if isinstance(tensor, Tensor):
                source = _MadeOutside(tensor, index, module, args, kwargs)
                # The first module that gave a tensor made it; others pass it on.
                self.made.setdefault(id(tensor), source)

    def stream(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the residual stream `[n_pos d_model]` before every call and after the
        last, where the first block lives.
        """
        home = self.calls[0].X.device
        entering = [call.X.to(home, dtype) for call in self.calls]
        return [*entering, self.calls[-1].Y.to(home, dtype)]

    def call(self, layer: int, dtype: torch.dtype) -> BlockCall:
        """Return one call, with its arguments in `dtype`."""
        call = self.calls[layer].call
        arguments = {
            name: map_tensors(value, partial(self._cast_argument, dtype, name))
            for name, value in call.arguments.items()
        }
        return replace(call, arguments=arguments)

    def _cast_argument(self, dtype: torch.dtype, name: str, tensor: Tensor) -> Tensor:
        """Return a captured argument in `dtype`: computed again by its module in that
        precision, or else as it was rounded.
        """
        if tensor.dtype == dtype:
            return tensor
        source = self.made.get(id(tensor))
        if source is not None:
            return source.again(dtype)
        if "mask" not in name:  # Masks are exact.
            self.rounded.add(name)
        return tensor.to(dtype)


def calls_on_one_stream(
    calls: list[RecordedCall],
    model: nn.Module,
    n_blocks: int,
    n_pos: int | None = None,
) -> list[RecordedCall]:
    """Return calls of blocks, in order, with their streams as `[n_pos d_model]`.

    Raises:
        ValueError: they are not each on the residual stream that the one before gave, of
            one input of `n_pos` tokens if that is known, with finite entries.
    """
    _check_shapes(calls, n_pos)
    calls = list(map(_flatten_streams, calls))
    _check_finite(calls, model)
    _check_unchanged_between(calls, n_blocks)
    return calls


def _rotary_modules_outside(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> set[nn.Module]:
    """Return the modules that make rotary embeddings for all blocks."""
    block_module_ids = {id(module) for block in blocks for module in block.modules()}
    # A bridge does not list every part of the model that it wraps.
    wrapped = getattr(model, "original_model", model)
    return {
        module
        for module in {*model.modules(), *wrapped.modules()}
        if "rotary" in type(module).__name__.lower()
        and id(module) not in block_module_ids
    }


def _flatten_streams(recorded: RecordedCall) -> RecordedCall:
    """Return a call with its streams as `[n_pos d_model]`, both where the block lives.

    What it gets may lie where the block before does.
    """
    call = recorded.call
    X = call.rows(recorded.X).to(recorded.Y.device)
    return recorded._replace(X=X, Y=call.rows(recorded.Y))


def _check_order(calls: list[RecordedCall], blocks: list[nn.Module]) -> None:
    modules = [recorded.call.module for recorded in calls]
    # A model may run its blocks several times.
    if calls and modules == blocks * (len(calls) // len(blocks)):
        return
    if not calls:
        raise ValueError(
            f"wanted a model that calls its {len(blocks)} blocks one after the other, "
            "this one called none of them: give the modules that it runs itself, not "
            "copies or wrappers of them"
        )
    layers = {id(block): layer for layer, block in reversed(list(enumerate(blocks)))}
    order = [layers.get(id(module), "?") for module in modules]
    raise ValueError(
        f"wanted a model that calls its {len(blocks)} blocks one after the other, this "
        f"one called them in the order {order}"
    )


def _check_shapes(calls: list[RecordedCall], n_pos: int | None) -> None:
    first = calls[0].X
    n_rows = n_pos or first.numel() // max(1, first.shape[-1])
    for layer, (call, X, Y, _) in enumerate(calls):
        has_all_rows = X.numel() // max(1, X.shape[-1]) == n_rows
        if call.holds(X) and X.shape == Y.shape and has_all_rows:
            continue
        shapes = f"block {layer} takes {list(X.shape)} and gives {list(Y.shape)}"
        if n_pos is None and X.shape != Y.shape and X.ndim < 4:
            raise ValueError(
                "wanted blocks that add to the residual stream that they take, "
                f"{shapes}: leave it out, a {type(call.module).__name__} of these sizes "
                "is no residual block"
            )
        if n_pos is None:
            # Of a batch it says enough to run the model on one input.
            of_convolutions = ": feature maps of convolutions are not measured"
            raise ValueError(
                "wanted one residual stream [1 n_pos d_model]; run it on one input, "
                f"{shapes}{of_convolutions if X.ndim > 3 else ''}"
            )
        raise ValueError(
            f"wanted one residual stream [1 n_pos d_model] = [1 {n_pos} d_model], "
            f"{shapes}: several parallel streams (hyper-connections, AltUp) are not "
            "X + f(X) of one"
        )


def _check_finite(calls: list[RecordedCall], model: nn.Module) -> None:
    streams = [*(recorded.X for recorded in calls), calls[-1].Y]
    # The largest entry of each, which is NaN where one is.
    largest = [stream.norm(float("inf")) for stream in streams]
    is_finite = read_together(largest).isfinite().tolist()
    if all(is_finite):
        return
    culprit = "all parameters are finite"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            culprit = f"parameter {name!r} is not finite"
            break
    raise ValueError(
        f"the residual stream at layer {is_finite.index(False)} has NaN or infinite "
        f"entries; {culprit}"
    )


def _check_unchanged_between(calls: list[RecordedCall], n_blocks: int) -> None:
    differs = [
        (following.X.to(recorded.Y.device) != recorded.Y).any()
        for recorded, following in pairwise(calls)
    ]
    is_changed = read_together(differs).tolist()
    if not any(is_changed):
        return
    layer = is_changed.index(True)
    again = ""
    if layer + 1 == n_blocks:
        again = ", where the model runs its blocks again"
    raise ValueError(
        f"the output of block {layer % n_blocks} is changed before the next block"
        f"{again}: not one residual stream"
    )


def read_together(values: list[Tensor]) -> Tensor:
    """Return numbers of all blocks on the CPU, in one reading.

    Each by itself makes a GPU wait.
    """
    if not values:
        return torch.zeros(0, device="cpu")
    home = values[0].device
    return torch.stack([value.to(home) for value in values]).cpu()
