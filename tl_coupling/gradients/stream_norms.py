"""Blocks that normalise the stream itself: where, and what their residual branches add
before that.

A post-norm block (BERT) computes `H = norm(X + attn(X))` and `Y = norm(H + mlp(H))`, so
`Y − X` holds `−I`: it takes away the stream that entered. What it adds, as a pre-norm
block adds `attn(norm(X)) + mlp(norm(X + …))`, is

    g(X) = attn(X) + mlp(H) = (Y − X) + Σ (input − output of each norm that the stream
    passes through).

No module is known by its name. A block normalises if its output stays small however
large its input is. A norm of the stream is a module that does the same, and that
nothing passes by: with its output held, that of the block is constant.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks import BlockCall, BlockError, map_tensors

# How far an input is moved out, and how large the output of what normalises is at most,
# both in units of the input. A stream that is added to keeps its length, 2³⁰; the
# largest known, 10⁵, is finite in float32 that far out, squared.
_FAR, _LARGEST = 2.0**30, 2.0**20
_SAME = 1e-5


class NormCall(NamedTuple):
    """The `nth` call, from 0, of a module in one pass of its block."""

    module: nn.Module
    nth: int


class _Observed(NamedTuple):
    """One call of a module with one tensor in and one of the same shape out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input: Tensor
    output: Tensor


class StreamNorms:
    """The norms that the stream passes through in a block, in order; none where they
    could not be told apart.
    """

    def __init__(self, calls: Sequence[NormCall]) -> None:
        self.calls = tuple(calls)

    def before(
        self, run: Callable[[], Float[Tensor, "*rows d_model"]]
    ) -> Float[Tensor, "*rows d_model"]:
        """`X + g(X)`, where `run` calls the block on X: its output, and all that its
        norms took away.

        Raises BlockError where `run` does not call every norm on the rows that it
        gives.
        """
        with _observing([norm.module for norm in self.calls]) as observed:
            Y = run()
        for call in self.calls:
            if call not in observed or observed[call].input.numel() != Y.numel():
                raise BlockError(
                    "a norm of the stream is not called on the rows that the block gives"
                )
            Y = Y + (observed[call].input - observed[call].output).reshape(Y.shape)
        return Y


def normalises(call: BlockCall, X: Float[Tensor, "n_pos d_model"]) -> bool:
    """Whether a block normalises the stream. Cost: one forward pass of the block."""
    return _stays_small(call(_FAR * X), X)


def stream_norms(call: BlockCall, X: Float[Tensor, "n_pos d_model"]) -> StreamNorms:
    """The norms that the stream passes through in a block that normalises it; some
    forward passes of the block.
    """
    # Nothing with a matrix: a sublayer that ends in a norm holds a branch too.
    parts = [
        part
        for part in call.module.modules()
        if all(p.ndim < 2 for p in part.parameters())
    ]
    with _observing(parts) as observed:
        call(X.clone())
    norms = [
        one
        for one, (args, kwargs, x, y) in observed.items()
        if y.numel() == X.numel()
        and _stays_small(_moved_out(one.module, args, kwargs), x)
        and _nothing_passes_by(one, y, call, X)
    ]
    # A bridge's norm wraps the original one.
    inner = [
        one
        for one in norms
        if not any(_is_within(other.module, one.module) for other in norms)
    ]
    return StreamNorms(
        inner if inner and _grows_between(inner, observed, call, X) else []
    )


def _stays_small(of_far: Tensor, x: Tensor) -> bool:
    """Whether what a function makes of x, moved far out, is not far out."""
    return bool(x.any()) and bool(of_far.norm() <= _LARGEST * x.norm())


def _moved_out(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    far_args, far_kwargs = map_tensors([args, kwargs], lambda x: _FAR * x)
    output: Tensor = module(*far_args, **far_kwargs)
    return output


def _nothing_passes_by(
    norm: NormCall, output: Tensor, call: BlockCall, X: Tensor
) -> bool:
    """Whether the block's output depends on the stream through this norm alone."""

    def held(stream: Tensor) -> Tensor:
        with _observing([norm.module], {norm: lambda _: output.clone()}):
            return call(stream)

    Y = held(X.clone())
    of_another = held(-2 * X)
    return bool((of_another - Y).norm() <= _SAME * Y.norm())


def _is_within(part: nn.Module, whole: nn.Module) -> bool:
    return part is not whole and any(module is part for module in whole.modules())


def _grows_between(
    norms: Sequence[NormCall],
    observed: Mapping[NormCall, _Observed],
    call: BlockCall,
    X: Tensor,
) -> bool:
    """Whether nothing else normalises: before the first norm, between one and the next,
    or behind the last.
    """
    modules = [norm.module for norm in norms]
    starts = [X, *(observed[norm].output for norm in norms)]
    for i, start in enumerate(starts):
        moved_out = {norms[i - 1]: partial(torch.mul, _FAR)} if i else {}
        with _observing(modules, moved_out) as seen:
            output = call(X.clone() if i else _FAR * X)
        of_far = seen[norms[i]].input if i < len(norms) else output
        if _stays_small(of_far, start):
            return False
    return True


@contextmanager
def _observing(
    modules: Sequence[nn.Module],
    changed: Mapping[NormCall, Callable[[Tensor], Tensor]] | None = None,
) -> Iterator[dict[NormCall, _Observed]]:
    """Context that notes the calls of modules, in order of their ends; the outputs of
    some are changed.
    """
    observed: dict[NormCall, _Observed] = {}
    counts: Counter[nn.Module] = Counter()

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        call = NormCall(module, counts[module])
        counts[module] += 1
        tensors = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
        ]
        if (
            len(tensors) == 1
            and isinstance(output, Tensor)
            and output.shape == tensors[0].shape
        ):
            if changed and call in changed:
                output = changed[call](output)
            # The block may add to either of them in place.
            observed[call] = _Observed(args, kwargs, tensors[0].clone(), output.clone())
        return output

    with ExitStack() as hooks:
        for module in dict.fromkeys(modules):
            hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        yield observed
