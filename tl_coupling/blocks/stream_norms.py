"""Blocks that normalise the stream itself: where, and what their residual branches add
before that.

A post-norm block (BERT) computes `H = norm(X + attn(X))` and `Y = norm(H + mlp(H))`, so
`Y − X` holds `−I`: it takes away the stream that entered. What it adds, as a pre-norm
block adds `attn(norm(X)) + mlp(norm(X + …))`, is

    g(X) = attn(X) + mlp(H) = (Y − X) + Σ (input − output of each norm that the stream
    passes through).

No module is known by its name. A block normalises if its output stays small however
large its input is. A norm of the stream is a module that does the same, and through
which all of the stream passes: with its output held, that of the block is constant.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import map_tensors
from tl_coupling.blocks.calls import BlockCall
from tl_coupling.blocks.contexts import BlockError

# The factor by which an input is made very large. A stream that is added to becomes
# longer by this factor; the largest stream known, 10⁵, times this factor and squared is
# finite in float32.
LARGE_FACTOR = 2.0**30
# How large the output of what normalises is at most, in units of the input.
_LARGEST = 2.0**20
# A guard (`clamp(-65504, 65504)`) is as small for such an input, but not at sizes that a
# model meets: with an input this many times as large as its usual output, and that
# output as large as this share of the input.
_NEAR = 64
_KEPT = 0.25
# The relative difference up to which two outputs are equal.
_EQUAL = 1e-5


class NormCall(NamedTuple):
    """The `nth` call, from 0, of a module in one pass of its block."""

    module: nn.Module
    nth: int


class _Observed(NamedTuple):
    """One call of a module with one tensor in and one of the same shape out."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    input: Tensor
    output: Tensor


ObservedNorms = dict[NormCall, _Observed]


class StreamNorms:
    """The norms that the stream passes through in a block, in order.

    There are none where they could not be told apart.
    """

    def __init__(self, calls: Sequence[NormCall]) -> None:
        self.calls = tuple(calls)

    def observed(self) -> AbstractContextManager[ObservedNorms]:
        """Return the context in which the calls of these norms are noted."""
        return _observing([norm.module for norm in self.calls])

    def undone(
        self, Y: Float[Tensor, "*rows d_model"], observed: ObservedNorms
    ) -> Float[Tensor, "*rows d_model"]:
        """Return `X + g(X)`: the block's output, and all that its norms took away.

        Args:
            Y: what the block gave.
            observed: the calls of the norms on the way.

        Raises:
            BlockError: not every norm was called on the rows that the block gives.
        """
        for call in self.calls:
            norm = observed.get(call)
            if norm is None or norm.input.numel() != Y.numel():
                raise BlockError(
                    "a norm of the stream is not called on the rows that the block gives"
                )
            Y = Y + (norm.input - norm.output).reshape(Y.shape)
        return Y


def normalises(call: BlockCall, X: Float[Tensor, "n_pos d_model"]) -> bool:
    """Say whether a block normalises the stream, by one forward pass of it; two more
    where its output stays small for a very large stream.
    """
    return _stays_small(lambda scale: call(scale * X), X)


def stream_norms(call: BlockCall, X: Float[Tensor, "n_pos d_model"]) -> StreamNorms:
    """Return the norms that the stream passes through in a block that normalises it.

    Cost: some forward passes of the block.
    """
    # Nothing with a matrix: a sublayer that ends in a norm holds a branch too.
    parts = [
        part
        for part in call.module.modules()
        if all(parameter.ndim < 2 for parameter in part.parameters())
    ]
    with _observing(parts) as observed:
        call(X.clone())
    norms = [
        norm for norm, seen in observed.items() if _is_stream_norm(norm, seen, call, X)
    ]
    # A bridge's norm wraps the original one.
    innermost = [
        norm
        for norm in norms
        if not any(_is_within(inner.module, norm.module) for inner in norms)
    ]
    if innermost and _grows_between(innermost, observed, call, X):
        return StreamNorms(innermost)
    return StreamNorms([])


def _is_stream_norm(
    norm: NormCall, observed: _Observed, call: BlockCall, X: Tensor
) -> bool:
    """Say whether a module normalises, and all of the stream passes through it."""
    if observed.output.numel() != X.numel():
        return False
    output_at = partial(_output_at_scale, norm.module, observed.args, observed.kwargs)
    return _stays_small(output_at, observed.input) and _is_only_path(
        norm, observed.output, call, X
    )


def _stays_small(output_at: Callable[[float], Tensor], x: Tensor) -> bool:
    """Say whether what a function makes of x, at any scale of x, is small beside it."""
    if not stays_small(output_at(LARGE_FACTOR).flatten(), x.flatten()):
        return False
    usual = output_at(1.0).norm()
    scale = _NEAR * max(1.0, float(usual / x.norm()))
    return bool(output_at(scale).norm() <= _KEPT * scale * x.norm())


def stays_small(
    large_output: Float[Tensor, "*batch n"], x: Float[Tensor, "*batch n"]
) -> Bool[Tensor, "*batch"]:
    """Say whether the output for x times `LARGE_FACTOR` is much smaller than that."""
    return x.any(-1) & (large_output.norm(dim=-1) <= _LARGEST * x.norm(dim=-1))


def _output_at_scale(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], scale: float
) -> Tensor:
    """Return what a module gives where its inputs are multiplied by a number."""
    scaled_args, scaled_kwargs = map_tensors([args, kwargs], lambda x: scale * x)
    output: Tensor = module(*scaled_args, **scaled_kwargs)
    return output


def _is_only_path(norm: NormCall, output: Tensor, call: BlockCall, X: Tensor) -> bool:
    """Say whether the block's output depends on the stream through this norm alone."""

    def output_at_fixed_norm(stream: Tensor) -> Tensor:
        with _observing([norm.module], {norm: lambda _: output.clone()}):
            return call(stream)

    Y = output_at_fixed_norm(X.clone())
    other_output = output_at_fixed_norm(-2 * X)
    return bool((other_output - Y).norm() <= _EQUAL * Y.norm())


def _is_within(part: nn.Module, parent: nn.Module) -> bool:
    return part is not parent and any(module is part for module in parent.modules())


def _grows_between(
    norms: Sequence[NormCall],
    observed: Mapping[NormCall, _Observed],
    call: BlockCall,
    X: Tensor,
) -> bool:
    """Say whether nothing else normalises the stream.

    It could before the first norm, between one and the next, or behind the last.
    """
    modules = [norm.module for norm in norms]
    starts = [X, *(observed[norm].output for norm in norms)]

    def output_at(i: int, scale: float) -> Tensor:
        """Return what reaches the next norm, or leaves the block."""
        # Either the stream that enters is scaled, or what a norm gives.
        stream = scale * X if i == 0 else X.clone()
        scaled = {} if i == 0 else {norms[i - 1]: partial(torch.mul, scale)}
        with _observing(modules, scaled) as seen:
            output = call(stream)
        return output if i == len(norms) else seen[norms[i]].input

    return not any(
        _stays_small(partial(output_at, i), start) for i, start in enumerate(starts)
    )


@contextmanager
def _observing(
    modules: Sequence[nn.Module],
    changed: Mapping[NormCall, Callable[[Tensor], Tensor]] | None = None,
) -> Iterator[dict[NormCall, _Observed]]:
    """Note the calls of modules in order of their ends, and change some outputs.

    Calls with one tensor in and one of the same shape out are noted.
    """
    observed: dict[NormCall, _Observed] = {}
    counts: Counter[nn.Module] = Counter()

    def note(
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> object:
        call = NormCall(module, counts[module])
        counts[module] += 1
        arguments = (*args, *kwargs.values())
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            return output
        (x,) = tensors
        if output.shape != x.shape:
            return output
        if changed and call in changed:
            output = changed[call](output)
        # The block may add to either of them in place.
        observed[call] = _Observed(args, kwargs, x.clone(), output.clone())
        return output

    with shared_changes() as hooks:
        for module in dict.fromkeys(modules):
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield observed
