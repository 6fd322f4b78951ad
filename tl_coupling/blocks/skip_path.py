"""How much of the stream that enters a block leaves it unchanged.

Of `block(X) = X + f(X)` the stream passes whole. Where it is cut (a block without a
skip, a hook that projects directions out of the stream, one that puts another stream in
its place), `f(X) = block(X) − X` holds a part of −I, and couples by it.

To a very large stream, a block that normalises what it reads adds next to nothing: what
leaves it is what entered, if the stream passes whole. That is known without a further
pass. Where it is another, the block's own additions are followed: of each entry of the
stream, with which factor it is added to the same entry of what leaves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.calls import BlockCall, hidden_states
from tl_coupling.blocks.stream_norms import LARGE_FACTOR, StreamNorms, stays_small

# The relative difference up to which a very large stream leaves as it entered.
_WHOLE = 1e-3
# Singular values of I + J below this share of the largest are zeros: J has some 1e-6.
_NOTHING = 3e-6
# The change over which the slope of a function is taken, relative to 1 and its input.
_STEP = 1e-4
# Seeds the direction in which the large stream departs from X: no cut is in its way.
_SEED = 0x5_717

# Operations of which factors are what they make of the factors.
_LINEAR = {
    "add",
    "cat",
    "clone",
    "copy",
    "flip",
    "gather",
    "index",
    "index_put",
    "index_select",
    "neg",
    "repeat",
    "roll",
    "scatter",
    "select_scatter",
    "slice_scatter",
    "stack",
    "sub",
    "where",
}
# Operations whose first argument is added to what they compute of the others.
_ADDED_TO = {"addmm", "baddbmm", "addmv", "addbmm", "addr", "addcmul", "addcdiv"}
# Operations that keep what is within bounds (guards against overflow).
_GUARDS = {"clamp", "clamp_min", "clamp_max", "hardtanh", "nan_to_num"}


class LargeResponse(NamedTuple):
    """What a block makes of a very large stream (`large_stream`).

    Attributes:
        stays_small: whether what leaves is small: the block seems to normalise.
        passes_whole: whether what leaves is what entered.
        share: how much of what entered is in what leaves, by least squares.
    """

    stays_small: bool
    passes_whole: bool
    share: float

    @classmethod
    def of(cls, output: Tensor, stream: Tensor) -> "LargeResponse":
        """Judge what a block made of a large stream."""
        return cls.read(*cls.numbers(output, stream).tolist())

    @classmethod
    def read(
        cls, stays_small: float, passes_whole: float, share: float
    ) -> "LargeResponse":
        """Return what `numbers` say."""
        return cls(bool(stays_small), bool(passes_whole), share)

    @staticmethod
    def numbers(
        output: Float[Tensor, "*batch n_pos d_model"],
        stream: Float[Tensor, "*batch n_pos d_model"],
    ) -> Float[Tensor, "*batch 3"]:
        """Return what is judged, to be read together: a device waits once."""
        error = (output - stream).norm(dim=-1)
        is_same = (error <= _WHOLE * stream.norm(dim=-1)).all(-1)
        share = (output * stream).sum((-2, -1)) / stream.square().sum((-2, -1))
        is_small = stays_small(output.flatten(-2), (stream / LARGE_FACTOR).flatten(-2))
        return torch.stack([is_small.to(share), is_same.to(share), share], -1)


def large_stream(
    X: Float[Tensor, "*batch n_pos d_model"],
) -> Float[Tensor, "*batch n_pos d_model"]:
    """Return the stream and noise of its size, `LARGE_FACTOR` times as large.

    The noise has a part in every direction.
    """
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(X.shape[-2:], generator=generator, dtype=torch.float64).to(X)
    size = X.norm(dim=-1, keepdim=True) / X.shape[-1] ** 0.5
    return LARGE_FACTOR * (X + size * noise)


def passed_shares(
    call: BlockCall,
    X: Float[Tensor, "n_pos d_model"],
    norms: StreamNorms | None = None,
) -> Float[Tensor, " n_pos"]:
    """Return with which factor each row of the stream is added to what leaves the
    block, mean over its entries: 1 where it passes whole, 0 where nothing does.

    Norms of the stream count as passed through; products with matrices are not followed.
    Functions of single entries are none of the stream, `x + tanh(x)` passes it once,
    unless nothing passes without them (a soft cap of the stream).
    Cost: one forward pass of the block, two where nothing passes in the first.
    """
    shares = _followed_shares(call, X, norms, _Factors())
    if shares.any():
        return shares
    return _followed_shares(call, X, norms, _Factors(follows_functions=True))


def _followed_shares(
    call: BlockCall,
    X: Float[Tensor, "n_pos d_model"],
    norms: StreamNorms | None,
    factors: "_Factors",
) -> Float[Tensor, " n_pos"]:
    factors.note(X, torch.ones_like(X))
    with shared_changes() as hooks:
        for norm in () if norms is None else norms.calls:
            hook = norm.module.register_forward_hook(factors.pass_through)
            hooks.enter_context(hook)
        with factors:
            leaving = call(X)
    factor = factors.of(leaving)
    if factor is None:
        return X.new_zeros(len(X))
    return factor.reshape(X.shape).mean(1)


def n_directions_cut(J: Float[Tensor, "d_model d_model"]) -> int:
    """Return how many directions of the stream do not pass a block at all: the nullity
    of I + J.
    """
    identity = torch.eye(len(J), dtype=torch.float64)
    values = torch.linalg.svdvals(J.detach().cpu().double() + identity)
    return int((values <= _NOTHING * values.max().clamp_min(1)).sum())


class _Factors(TorchDispatchMode):
    """Context in which the stream's own factor is followed through operations: the
    diagonal of their derivative that additions, copies and multiples have.

    Factors are kept by storage, so that a view of a tensor has a view of its factors,
    whatever is changed in place.

    Args:
        follows_functions: of functions of single entries follow the derivative as well.
    """

    def __init__(self, *, follows_functions: bool = False) -> None:
        super().__init__()
        self._follows_functions = follows_functions
        self._by_storage: dict[int, Tensor] = {}
        # Held, so that no other tensor gets a storage.
        self._held: list[Tensor] = []

    def note(self, tensor: Tensor, factor: Tensor) -> None:
        """Note the factor of each entry of a tensor."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._by_storage:
            n_entries = storage.nbytes() // tensor.element_size()
            self._by_storage[key] = tensor.new_zeros(n_entries)
            self._held.append(tensor)
        kept = self.of(tensor)
        assert kept is not None
        kept.copy_(factor)

    def of(self, tensor: object) -> Tensor | None:
        """Return the factor of each entry; None of a tensor without the stream."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return None
        flat = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if flat is None:
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def pass_through(
        self, _: nn.Module, args: tuple[object, ...], output: object
    ) -> None:
        """Give a norm's output the factor of its input."""
        factor = self.of(args[0]) if args else None
        stream = hidden_states(output)
        if factor is not None and factor.numel() == stream.numel():
            self.note(stream, factor.reshape(stream.shape))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operation, and follow the factor of the stream through it."""
        options = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        operation = name
        out_of_place = func
        if func._schema.is_mutable:
            operation = name.removesuffix("_")
            packet = getattr(torch.ops.aten, operation, None)
            out_of_place = getattr(packet, func._overloadname, None)
        factors = self._followed(operation, out_of_place, args, options)
        output = func(*args, **options)
        if operation in _GUARDS and factors is not None:
            factors = [factors[0] * (output == args[0])]
        self._note_outputs(output, factors, is_in_place=func._schema.is_mutable)
        return output

    def _followed(
        self, name: str, func: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Sequence[Tensor] | None:
        """Return the factors of what an operation gives; None where it keeps none, and
        of views, which share them.
        """
        if func is None or not args:
            return None
        first = self.of(args[0])
        if name in _LINEAR:
            replaced = self._factors_for(args, is_sum=name in ("add", "sub"))
            if replaced is None:
                return None
            factors = func(*replaced, **options)
            return factors if isinstance(factors, tuple | list) else [factors]
        if name == "mul" and first is None:
            second = self.of(args[1])
            return None if second is None else [func(args[0], second)]
        if first is None:
            return None
        if name in ("mul", "div"):
            is_other_constant = self.of(args[1]) is None
            return [func(first, *args[1:], **options)] if is_other_constant else None
        if name in _ADDED_TO:
            return [options.get("beta", 1) * first]
        if name == "masked_fill":
            return [first.masked_fill(args[1], 0)]
        if name in _GUARDS or name in ("_to_copy", "native_layer_norm"):
            return [first.clone()]
        if self._follows_functions and torch.Tag.pointwise in func.tags:
            return [_moved(func, args, options, first)]
        return None

    def _factors_for(
        self, args: Sequence[Any], *, is_sum: bool = False
    ) -> list[Any] | None:
        """Return arguments with factors in the places of tensors, zeros of those without
        the stream, and conditions and indices as they are; None where none has it.
        """
        if not any(self.of(tensor) is not None for tensor in _tensors(args)):
            return None
        replaced: list[Any] = []
        for argument in args:
            if isinstance(argument, Tensor) and argument.is_floating_point():
                factor = self.of(argument)
                replaced.append(
                    torch.zeros_like(argument) if factor is None else factor
                )
            elif isinstance(argument, list | tuple):
                inner = self._factors_for(argument)
                replaced.append(argument if inner is None else inner)
            else:
                replaced.append(argument)
        if is_sum and isinstance(replaced[1], int | float):
            # A number that is added to all entries is none of the stream's.
            replaced[1] = 0
        return replaced

    def _note_outputs(
        self, output: Any, factors: Sequence[Tensor] | None, *, is_in_place: bool
    ) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        if factors is None:
            # Written over, in place, by what has nothing of the stream.
            current = self.of(outputs[0]) if is_in_place and outputs else None
            if current is not None:
                current.zero_()
            return
        for tensor, factor in zip(outputs, factors, strict=False):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.note(tensor, factor.to(tensor.dtype))


def _moved(
    func: Any, args: tuple[Any, ...], options: dict[str, Any], factor: Tensor
) -> Tensor:
    """Return a function's slope in its first argument, times a factor.

    From two values: below autograd there is no other derivative.
    """
    x = args[0].double()
    step = _STEP * (1 + x.abs())
    rise = func(x + step, *args[1:], **options) - func(x - step, *args[1:], **options)
    return (rise / (2 * step)).to(factor) * factor


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found
