"""Coupling and block Jacobians with a gradient, for objectives and probes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_coupling.arguments import Count, checked, shared_changes, warn_caller
from tl_coupling.blocks import (
    BlockCall,
    BlockFunction,
    RecordedCall,
    StepError,
    autocast_off_within,
    calls_on_one_stream,
    hidden_states,
)
from tl_coupling.jacobians import Function
from tl_coupling.measures import normalized_miscoupling, safe_scale
from tl_coupling.spectra import check_matrices, fitting_k
from tl_coupling.training.measuring import undisturbed

Frames = Literal["detached", "differentiated"]
# How far a block, called again, may be from what it added before, as shares of that and
# of the stream: kernels that round otherwise are nearer, another draw of dropout is not.
_SHARE_OF_STEP = 0.1
_SHARE_OF_STREAM = 0.01


@checked
def coupling(
    blocks: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
    run: Callable[[], object],
    k: int | None = None,
    *,
    positions: Sequence[int] = (-1,),
    frames: Frames = "detached",
    activations: Frames = "differentiated",
    chunk_size: Count | None = None,
) -> Float[Tensor, ""]:
    r"""Return mean coupling of different blocks as a scalar that can be differentiated.

    .. math:: \frac{1}{L (L - 1)} \sum_{l \ne q} 1 - \tilde m(U_{q,k}^\top J^l V_{q,k})

    It is `depth_coupling(…).mean(k)` at the same inputs, averaged over positions, with
    a gradient to the parameters: add it to a loss to lower coupling, subtract it to
    raise it. Of post-norm blocks it is that of the branches before their norms, as
    there. The model runs once more, in eval mode, and the caller's graph is left alone:
    gradients accumulate as those of any other term.

    A block that adds nothing, as one with a zero-initialised output projection, has no
    singular vectors: its pairs are left out, with a warning, and so are those whose A is
    0. Gradients are finite; where no pair is left, coupling is 0 and has a gradient of
    0. (`depth_coupling` leaves out such a block's Jacobian, and compares others with
    singular vectors of it that are arbitrary, with a warning.)

    Args:
        blocks, run: as in `measure`.
        k: how many top singular vectors, 2 or more: 50, or all of a narrower model, by
            default.
        positions: the tokens; the last by default.
        frames: whether the singular vectors of the other block are constants, so that
            only `J^l` is moved into them, or are differentiated as well. A gradient
            through singular vectors holds `1 / (σ_i² − σ_j²)`: where two singular values
            are close it is large and says little, and where they are equal it is not
            finite.
        activations: whether the stream that enters each block is a constant, so that
            each block is moved for its own Jacobian alone, or carries gradients to the
            blocks before.
        chunk_size: rows of a Jacobian that are computed at a time; all by default.

    Raises:
        ValueError: fewer than two blocks, a k or position out of range, a position
            twice, a run that does not call each block once, on one input and on the
            stream that the one before gave, a stream that is not finite, a block that
            normalises the stream by something else than a module that is called on it,
            or weights that are spread over processes (FSDP, DeepSpeed's ZeRO-3).
        StepError: a block that adds something else when it is called again.
        TypeError: a model in 16 bits.

    Cost: two forward passes of each block and `d_model` backward passes of it for each
    position, whose graph is kept; then the backward pass through them. It grows with
    the prompt: a few positions of short inputs do.

    Example:
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
        >>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
        >>> objective = tlc.training.coupling(blocks, lambda: network(x), k=4)
        >>> objective.backward()
        >>> bool(network[0].linear1.weight.grad.isfinite().all())
        True
    """
    if len(list(blocks)) < 2:
        raise ValueError(f"`blocks` must be two or more, got {len(list(blocks))}")
    if k is not None:
        _check_k(k)
    J = jacobians(
        blocks,
        run,
        positions=positions,
        activations=activations,
        chunk_size=chunk_size,
        function="branches",
    )
    couplings = [_couplings_of_pairs(J_t, k, frames) for J_t in J]
    return _mean(couplings, math.perm(J.shape[1], 2))


@checked
def jacobians(
    blocks: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
    run: Callable[[], object],
    *,
    positions: Sequence[int] = (-1,),
    activations: Frames = "differentiated",
    chunk_size: Count | None = None,
    function: Function = "block",
) -> Float[Tensor, "n_positions n_blocks d_model d_model"]:
    r"""Return block Jacobians that can be differentiated, for objectives of one's own.

    .. math:: J^l_{tt} = \partial f^l(X)_t / \partial x_t

    They are `block_jacobians` at the same inputs, with a gradient to the parameters.

    Args:
        blocks, run: as in `measure`.
        positions, activations, chunk_size: as in `coupling`.
        function: as in `block_jacobian`.

    Raises:
        ValueError: no blocks, a position out of range or twice, a run that does not call
            each block once, on one input and on the stream that the one before gave, a
            stream that is not finite; "branches" as in `block_jacobian`.
        StepError: a block that adds something else when it is called again.

    Cost: as `coupling`.

    Example:
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
        >>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
        >>> J = tlc.training.jacobians(blocks, lambda: network(x))
        >>> J.shape, J.requires_grad
        (torch.Size([1, 3, 16, 16]), True)
    """
    modules = list(blocks)
    if not modules:
        raise ValueError("`blocks` is empty: wanted at least one")
    if not positions:
        raise ValueError("`positions` is empty: wanted at least one token")
    with _evaluated_with_gradients(modules):
        functions = _recorded(modules, run)
        if activations == "detached":
            functions = [replace(block, X=block.X.detach()) for block in functions]
        if function == "branches":
            with torch.no_grad():
                functions = [block.branches() for block in functions]
        n_pos = len(functions[0].X)
        tokens = [_index(position, n_pos) for position in positions]
        if len(set(tokens)) < len(tokens):
            raise ValueError(
                f"`positions` must name each token once, got {list(positions)}: one that "
                "is there twice would count as two"
            )
        of_positions = []
        for t in tokens:
            of_blocks = [_jacobian(block, t, chunk_size) for block in functions]
            of_positions.append(torch.stack(of_blocks))
        return torch.stack(of_positions)


def _index(position: int, n_pos: int) -> int:
    if not -n_pos <= position < n_pos:
        raise ValueError(
            f"`positions` must be within [{-n_pos}, {n_pos - 1}], got {position}"
        )
    return position % n_pos


@contextmanager
def _evaluated_with_gradients(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Run in eval mode, in the dtype of the weights, with attention that has second
    derivatives.
    """
    device = next(blocks[0].parameters(), torch.empty(0)).device
    with (
        undisturbed(blocks),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


def _recorded(
    blocks: Sequence[nn.Module], run: Callable[[], object]
) -> list[BlockFunction]:
    """Return what each block adds to the stream that entered it, which keeps its graph."""
    entered: list[tuple[BlockCall, Tensor]] = []
    # With its graph, and without one.
    streams: list[Tensor] = []
    calls: list[RecordedCall] = []

    def note_input(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call, residual = BlockCall.captured(module, args, kwargs)
        if not call.holds(residual):
            raise ValueError(
                "`run` must run the model on one input, got a stream of shape "
                f"{list(residual.shape)}"
            )
        if call.dropped_cache is not None:
            raise StepError(
                f"a block was called with a key/value cache (`{call.dropped_cache}`), "
                "which is left out here: run the whole sequence without it "
                "(`use_cache=False`), prefix included"
            )
        # A block may add to the stream in place.
        entered.append((call, residual.clone()))

    def note_output(_module: nn.Module, _args: object, output: object) -> None:
        call, residual = entered.pop()
        streams.append(call.rows(residual))
        Y = hidden_states(output).detach().clone()
        calls.append(RecordedCall(call, residual.detach(), Y, frozenset()))

    with autocast_off_within(blocks), shared_changes() as hooks:
        for block in dict.fromkeys(blocks):
            hooks.enter_context(
                block.register_forward_pre_hook(note_input, with_kwargs=True)
            )
            hooks.enter_context(block.register_forward_hook(note_output))
        run()
    called = [recorded.call.module for recorded in calls]
    if called != list(blocks):
        raise ValueError(
            f"`run` must call each of the {len(blocks)} blocks once, in their order, got "
            f"{len(called)} calls"
        )
    calls = calls_on_one_stream(calls, nn.ModuleList(blocks), len(blocks))
    return [
        BlockFunction(layer, recorded.call, X, step=recorded.Y - recorded.X)
        for layer, (recorded, X) in enumerate(zip(calls, streams, strict=True))
    ]


def _jacobian(
    block: BlockFunction, t: int, chunk_size: int | None
) -> Float[Tensor, "d_model d_model"]:
    """Return `∂ f(X)_t / ∂ x_t` with a graph to the parameters and to X."""
    X = block.X
    d_model = X.shape[1]
    # Zero, and a leaf: the stream itself keeps its own graph.
    moved = X.new_zeros(d_model, requires_grad=True)
    row = torch.zeros(len(X), 1, dtype=X.dtype, device=X.device)
    row[t] = 1
    y = block.added(X + row * moved)[t]
    _check_step(block, t, y.detach())
    rows = torch.eye(d_model, dtype=y.dtype, device=y.device)
    parts = [
        torch.autograd.grad(y, moved, seeds, create_graph=True, is_grads_batched=True)[
            0
        ]
        for seeds in rows.split(chunk_size or d_model)
    ]
    return torch.cat(parts)


def _check_step(block: BlockFunction, t: int, y: Float[Tensor, " d_model"]) -> None:
    """Raise StepError where a block adds something else than when `run` called it."""
    step = block.step[t]
    largest = (
        _SHARE_OF_STEP * step.norm() + _SHARE_OF_STREAM * block.X[t].detach().norm()
    )
    # Written so that NaN is no step either.
    if not (y - step).norm() <= largest:
        raise StepError(
            f"block {block.layer}, called again, adds something else at token {t} than "
            "when `run` called it: it draws random numbers in eval mode, or keeps a "
            "state from call to call"
        )


@checked
def coupling_of_jacobians(
    J: Float[Tensor, "n_blocks d_model d_model"],
    k: int | None = None,
    *,
    frames: Frames = "detached",
) -> Float[Tensor, ""]:
    """Return mean coupling of different Jacobians as a scalar that can be differentiated.

    It is the number of `coupling`, of Jacobians to which something was done first; those
    that are 0 are left out as there. It has no scale: gains of any size do.

    Args:
        J: Jacobians of two or more blocks, as `jacobians` gives for a position.
        k, frames: as in `coupling`.

    Raises:
        ValueError: fewer than two Jacobians, some that are not finite, or a k out of
            range.
        TypeError: Jacobians in 16 bits, which have no SVD: `J.float()` has.

    Cost: an SVD of each, and `2 n_blocks² k d_model²` flops.

    Example:
        >>> J = torch.randn(3, 8, 8, requires_grad=True)
        >>> tlc.training.coupling_of_jacobians(J, 4).backward()
        >>> J.grad.shape
        torch.Size([3, 8, 8])
    """
    if len(J) < 2:
        raise ValueError(f"`J` must hold two or more Jacobians, got {len(J)}")
    return _mean([_couplings_of_pairs(J, k, frames)], math.perm(len(J), 2))


def _couplings_of_pairs(
    J: Float[Tensor, "n_blocks d_model d_model"], k: int | None, frames: Frames
) -> Float[Tensor, " n_defined"]:
    """Return the coupling of every two different Jacobians that have one.

    They have none where one of them is 0, and so has no singular vectors, or where A is.
    """
    check_matrices(J)
    k = fitting_k(k, J.shape[-1])
    _check_k(k)
    J = J[_is_some(J)]
    J = J / safe_scale(J, (-2, -1))
    decomposed = J.detach() if frames == "detached" else J
    U, _, Vh = torch.linalg.svd(decomposed)
    images = einsum(J, Vh[:, :k], "row out d, column k d -> row column out k")
    A = einsum(U[..., :k], images, "column out j, row column out k -> row column j k")
    different = ~torch.eye(len(J), dtype=torch.bool, device=J.device)
    A = A[different]
    # Undefined pairs are left out of the graph: a derivative of 0/0 is NaN even when it
    # is multiplied by 0.
    return 1 - normalized_miscoupling(A[_is_some(A)])


def _mean(
    couplings: Sequence[Float[Tensor, " n_defined"]], n_pairs: int
) -> Float[Tensor, ""]:
    """Return the mean over positions of means over pairs.

    Pairs that have no coupling are left out, with a warning. Where none has one it is 0,
    with a gradient of 0: a step of training goes on, moved by the loss alone.

    Args:
        couplings: of each position, those that are defined.
        n_pairs: how many pairs a position has.
    """
    means = [of_pairs.mean() for of_pairs in couplings if len(of_pairs)]
    n_all = n_pairs * len(couplings)
    n_undefined = n_all - sum(map(len, couplings))
    if n_undefined:
        result = "the mean is over the others" if means else "0 stands for the mean"
        warn_caller(
            f"coupling is undefined for {n_undefined} of {n_all} pairs, where a "
            f"Jacobian or A is 0: {result}"
        )
    return torch.stack(means).mean() if means else torch.cat(list(couplings)).sum()


def _is_some(matrices: Float[Tensor, "n rows columns"]) -> Bool[Tensor, " n"]:
    """Say which matrices are more than 0, and than numbers that have lost their digits."""
    largest = matrices.detach().abs().amax((-2, -1))
    return largest >= torch.finfo(matrices.dtype).tiny


def _check_k(k: int) -> None:
    """Raise ValueError where the coupling of any blocks is 1."""
    if k < 2:
        raise ValueError(
            f"`k` must be at least 2, got {k}: of a single singular vector the coupling "
            "of any blocks is 1"
        )
