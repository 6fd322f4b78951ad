"""One forward pass of a model, with every block's input and output."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tl_coupling.blocks.calls import BlockCall, RecordedCall, hidden_states, with_tensors
from tl_coupling.blocks.differentiation import is_out_of_memory
from tl_coupling.blocks.evaluation import exact_arithmetic, hear_interrupts, own_arithmetic
from tl_coupling.blocks.functions import BlockFunction
from tl_coupling.blocks.gate import Remarks
from tl_coupling.blocks.tails import runnable
from tl_coupling.models import is_bridge


@dataclass(frozen=True, eq=False)
class Passage:
    """Every call of a block in one forward pass, in order.

    `again` computes tensors among their arguments in another dtype, by the tensor's id: what modules outside the blocks
    produced (rotary embeddings). `rounded` names the arguments that block functions took as rounded to another dtype.
    """

    calls: list[RecordedCall]
    again: dict[int, Callable[[torch.dtype], Tensor]]
    rounded: set[str] = field(default_factory=set)

    def block_function(self, layer: int, dtype: torch.dtype, remarks: Remarks, norm: nn.Module | None) -> BlockFunction:
        """The block function of one call, in `dtype`."""
        recorded = self.calls[layer]
        X, Y = recorded.X[0].to(dtype), recorded.Y[0].to(dtype)
        if norm is not None:
            with exact_arithmetic(X.device, [norm], dtype):
                Y = norm(Y[None]).reshape(Y.shape)
        call = recorded.call.changed(partial(self._in_dtype, dtype))
        other = recorded if recorded.dtypes - {dtype} else None
        return BlockFunction(layer, call, X, step=Y - X, norm=norm, recorded=other, remarks=remarks)

    def _in_dtype(self, dtype: torch.dtype, name: str, tensor: Tensor) -> Tensor:
        """A captured argument in `dtype`: computed again by its module in that precision, or else as it was rounded."""
        if tensor.dtype == dtype:
            return tensor
        if id(tensor) not in self.again:
            if "mask" not in name:  # Masks are exact.
                self.rounded.add(name)
            return tensor.to(dtype)
        again = self.again[id(tensor)](dtype)
        return (again if again.shape == tensor.shape else tensor).to(dtype)


def _again(
    tensor: Tensor, part: int | None, module: nn.Module, args: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> Tensor:
    """A module's output, or its entry `part`, in `dtype`. `tensor` is the recorded one, kept alive for its id."""
    args, kwargs = with_tensors((args, kwargs), lambda given: given.to(dtype))
    with exact_arithmetic(tensor.device, [module], dtype):
        output = module(*args, **kwargs)
    return output if part is None else output[part]


def record(model: Any, tokens: Int[Tensor, "1 n_pos"]) -> Passage:
    """Run the model on token ids, up to its unembedding.

    Raises:
        ValueError: its blocks do not add, in order, to one residual stream; or the model itself fails.
    """
    passage = Passage([], {})
    arguments = {"use_cache": False} if is_bridge(model) else {}
    with own_arithmetic(model), runnable(model), _recording(model, passage), suppress(_BlocksDone):
        try:
            model(tokens, return_type=None, **arguments)
        except (RuntimeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:300]
            given = "".join(f", {name}={value}" for name, value in arguments.items())
            raise ValueError(
                f"the model itself fails when called as `model(tokens{given})` ({type(error).__name__}: {said}): try "
                "another dtype, or another version of TransformerLens"
            ) from error
    _check_calls(passage.calls, list(model.blocks), tokens.shape[1])
    return passage


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not needed."""


@contextmanager
def _recording(model: Any, passage: Passage) -> Iterator[None]:
    entered: list[tuple[BlockCall, Tensor]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear_interrupts()
        call, X = BlockCall.captured(module, args, kwargs)
        # A block may add to the stream in place.
        entered.append((call, X.detach().clone()))

    def leave(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        call, X = entered.pop()
        dtypes = frozenset(p.dtype for p in module.parameters() if p.is_floating_point()) | {X.dtype}
        passage.calls.append(RecordedCall(call, X, hidden_states(output).detach().clone(), dtypes))

    def made(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        parts = enumerate(output) if isinstance(output, tuple | list) else [(None, output)]
        for part, tensor in parts:
            if isinstance(tensor, Tensor) and not entered:
                passage.again.setdefault(id(tensor), partial(_again, tensor, part, module, args, kwargs))

    def unembed(*_: Any) -> None:
        raise _BlocksDone

    inside = {id(module) for block in model.blocks for module in block.modules()}
    with ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(leave))
        # A bridge does not list every part of the model that it wraps.
        for module in {*model.modules(), *getattr(model, "original_model", model).modules()}:
            if "rotary" in type(module).__name__.lower() and id(module) not in inside:
                hooks.enter_context(module.register_forward_hook(made, with_kwargs=True))
        if isinstance(getattr(model, "unembed", None), nn.Module):
            hooks.enter_context(model.unembed.register_forward_pre_hook(unembed))
        yield


def _check_calls(calls: list[RecordedCall], blocks: list[nn.Module], n_pos: int) -> None:
    modules = [recorded.call.module for recorded in calls]
    if not calls or modules != (blocks * len(calls))[: len(calls)] or len(calls) % len(blocks):
        order = [next((i for i, block in enumerate(blocks) if block is module), "?") for module in modules]
        raise ValueError(
            f"wanted a model that calls its {len(blocks)} blocks one after the other, this one called them in the "
            f"order {order}"
        )
    for layer, (_, X, Y, _) in enumerate(calls):
        if X.ndim != 3 or X.shape[:2] != (1, n_pos) or X.shape != Y.shape:
            raise ValueError(
                f"wanted one residual stream [1 n_pos d_model] = [1 {n_pos} d_model], block {layer} takes "
                f"{list(X.shape)} and gives {list(Y.shape)}: several parallel streams (hyper-connections, AltUp), or "
                "patches, are not X + f(X) of one"
            )


def user_hooks(model: nn.Module) -> list[str]:
    """Names of the hook points and modules with a forward hook of the user's; it is part of what is measured."""
    found = []
    for name, module in model.named_modules():
        plain = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if getattr(module, "fwd_hooks", None) or not all(map(_is_of_a_library, plain)):
            found.append(name)
    return found


def _is_of_a_library(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to how the model is built."""
    made_in = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return made_in.split(".")[0] in ("transformer_lens", "transformers", "accelerate", "torch")
