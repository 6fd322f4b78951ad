"""One forward pass of a model, with what every block was handed and what it returned."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tl_coupling.blocks.calls import BlockCall, hidden_states, with_tensors
from tl_coupling.blocks.differentiation import is_out_of_memory
from tl_coupling.blocks.evaluation import exact_arithmetic, hear_interrupts, own_arithmetic
from tl_coupling.blocks.functions import BlockFunction
from tl_coupling.blocks.gate import Recording, Remarks
from tl_coupling.blocks.tails import runnable
from tl_coupling.models import is_bridge


class _Origin(NamedTuple):
    """A tensor, which part of a module's output it is (`None`: all), and what the module was called with."""

    tensor: Tensor
    part: int | None
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A block's call, the residual stream that entered it and the one that left it, as the model made them."""

    call: BlockCall
    X: Tensor
    Y: Tensor


@dataclass(frozen=True, eq=False)
class Passage:
    """Every call of a block in one forward pass, in order, and where the tensors that they were handed came from.

    `origins` has, by the tensor's id, the module outside the blocks whose output it is (rotary embeddings).
    """

    calls: list[RecordedCall]
    origins: dict[int, _Origin]

    def block_function(self, layer: int, dtype: torch.dtype, remarks: Remarks, norm: nn.Module | None) -> BlockFunction:
        """The block function of one call, in `dtype`."""
        made = self.calls[layer]
        X, Y = made.X[0].to(dtype), made.Y[0].to(dtype)
        if norm is not None:
            with exact_arithmetic(X.device, [norm], dtype):
                Y = norm(Y[None]).reshape(Y.shape)
        weights = {p.dtype for p in made.call.module.parameters() if p.is_floating_point()}
        recording = None
        # The stream may be in another dtype than the weights (Mamba's is in float32).
        if others := {made.X.dtype, *weights} - {dtype}:
            coarsest = max(others, key=lambda other: torch.finfo(other).eps)
            recording = Recording(lambda: _repeated(made), made.Y[0], coarsest)
        return BlockFunction(
            layer=layer,
            call=made.call.changed(lambda tensor: self._in_dtype(tensor, dtype)),
            X=X,
            step=Y - X,
            norm=norm,
            recording=recording,
            remarks=remarks,
        )

    def rounded_arguments(self, dtype: torch.dtype) -> list[str]:
        """Names of what blocks were handed, rounded to another dtype, that cannot be made anew. Masks are exact."""
        names: set[str] = set()

        def look(name: str, tensor: Tensor) -> Tensor:
            if tensor.dtype != dtype and id(tensor) not in self.origins and "mask" not in name:
                names.add(name)
            return tensor

        for made in self.calls:
            for name, value in made.call.arguments.items():
                with_tensors(value, partial(look, name))
        return sorted(names)

    def _in_dtype(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A captured argument in `dtype`: made anew by the module that made it, or else as it was rounded."""
        if tensor.dtype == dtype or id(tensor) not in self.origins:
            return tensor.to(dtype)
        made = self.origins[id(tensor)]
        args, kwargs = with_tensors((made.args, made.kwargs), lambda given: given.to(dtype))
        with exact_arithmetic(tensor.device, [made.module], dtype):
            output = made.module(*args, **kwargs)
        anew = output if made.part is None else output[made.part]
        return anew.to(dtype) if anew.shape == tensor.shape else tensor.to(dtype)


def _repeated(made: RecordedCall) -> Tensor:
    with own_arithmetic(made.call.module):
        return made.call(made.X[0])


def record(model: nn.Module, tokens: Int[Tensor, "1 n_pos"]) -> Passage:
    """Run the model on token ids, up to its unembedding.

    Raises:
        ValueError: it is not one residual stream that its blocks, in order, add to; what the model raises itself.
    """
    calls: list[RecordedCall] = []
    origins: dict[int, _Origin] = {}
    arguments = {"use_cache": False} if is_bridge(model) else {}
    with (
        own_arithmetic(model),
        runnable(model),
        _recording(model, calls, origins),
        suppress(_BlocksDone),
    ):
        try:
            model(tokens, return_type=None, **arguments)
        except (RuntimeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:300]
            given = "".join(f", {name}={value}" for name, value in arguments.items())
            raise ValueError(
                f"the model itself fails, run as `model(tokens{given})` ({type(error).__name__}: {said}): try another "
                "dtype, or another version of TransformerLens"
            ) from error
    _check_calls(calls, list(cast(nn.ModuleList, model.blocks)), tokens.shape[1])
    return Passage(calls, origins)


class _BlocksDone(Exception):
    """Raised at the unembedding, the largest matrix of a small model: it is not needed."""


@contextmanager
def _recording(model: Any, calls: list[RecordedCall], origins: dict[int, _Origin]) -> Iterator[None]:
    entered: list[tuple[BlockCall, Tensor]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hear_interrupts()
        call, X = BlockCall.captured(module, args, kwargs)
        # A block may add to the stream in place.
        entered.append((call, X.detach().clone()))

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        call, X = entered.pop()
        calls.append(RecordedCall(call, X, hidden_states(output).detach().clone()))

    def made(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        parts = enumerate(output) if isinstance(output, tuple | list) else [(None, output)]
        for part, tensor in parts:
            if isinstance(tensor, Tensor) and not entered:
                origins.setdefault(id(tensor), _Origin(tensor, part, module, args, kwargs))

    def unembed(*_: Any) -> None:
        raise _BlocksDone

    inside = {id(module) for block in model.blocks for module in block.modules()}
    with ExitStack() as hooks:

        def hook(handle: Any) -> None:
            hooks.callback(handle.remove)

        for block in model.blocks:
            hook(block.register_forward_pre_hook(enter, with_kwargs=True))
            hook(block.register_forward_hook(leave))
        # A bridge does not list every part of the model that it wraps.
        parts = {*model.modules(), *getattr(model, "original_model", model).modules()}
        for module in parts:
            if "rotary" in type(module).__name__.lower() and id(module) not in inside:
                hook(module.register_forward_hook(made, with_kwargs=True))
        if isinstance(getattr(model, "unembed", None), nn.Module):
            hook(model.unembed.register_forward_pre_hook(unembed))
        yield


def _check_calls(calls: list[RecordedCall], blocks: list[nn.Module], n_pos: int) -> None:
    modules = [made.call.module for made in calls]
    if not calls or modules != (blocks * len(calls))[: len(calls)] or len(calls) % len(blocks):
        order = [next((i for i, block in enumerate(blocks) if block is module), "?") for module in modules]
        raise ValueError(
            f"wanted a model that calls its {len(blocks)} blocks one after the other, this one called them in the "
            f"order {order}"
        )
    for layer, made in enumerate(calls):
        if made.X.ndim != 3 or made.X.shape[:2] != (1, n_pos) or made.X.shape != made.Y.shape:
            raise ValueError(
                f"wanted one residual stream [1 n_pos d_model] = [1 {n_pos} d_model], block {layer} takes "
                f"{list(made.X.shape)} and gives {list(made.Y.shape)}: several parallel streams (hyper-connections, "
                "AltUp), or patches, are not X + f(X) of one"
            )


def user_hooks(model: nn.Module) -> list[str]:
    """Names of the hook points and modules on which somebody left a forward hook; they are part of what is measured."""
    found = []
    for name, module in model.named_modules():
        plain = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if getattr(module, "fwd_hooks", None) or any(not _is_of_a_library(hook) for hook in plain):
            found.append(name)
    return found


def _is_of_a_library(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to how the model is built, not to what a user does with it."""
    made_in = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return made_in.split(".")[0] in ("transformer_lens", "transformers", "accelerate", "torch")
