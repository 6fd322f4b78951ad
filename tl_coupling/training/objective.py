"""Coupling and block Jacobians with a gradient, for objectives and probes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_coupling.arguments import Count, checked
from tl_coupling.blocks import (
    BlockCall,
    BlockFunction,
    RecordedCall,
    StepError,
    autocast_off_within,
    hidden_states,
    on_one_stream,
)
from tl_coupling.jacobians import Function
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

    Args:
        blocks, run: as in `measure`.
        k: how many top singular vectors: 50, or all of a narrower model, by default.
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
            twice, a run that does not call each block once, on one input, a module among
            the blocks that is no residual block, a stream that is not finite, or a block
            that normalises the stream by something else than a module that is called on
            it.
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
    J = jacobians(
        blocks,
        run,
        positions=positions,
        activations=activations,
        chunk_size=chunk_size,
        function="branches",
    )
    return torch.stack(
        [coupling_of_jacobians(J_t, k, frames=frames) for J_t in J]
    ).mean()


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
            each block once, on one input, a module among them that is no residual block,
            a stream that is not finite; "branches" as in `block_jacobian`.
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
    left: list[tuple[RecordedCall, Tensor]] = []

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
        Y = hidden_states(output).detach().clone()
        # Its dtypes say when a call is made again, which these never are.
        recorded = RecordedCall(call, residual.detach(), Y, frozenset())
        left.append((recorded, residual))

    with autocast_off_within(blocks), ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(
                block.register_forward_pre_hook(note_input, with_kwargs=True)
            )
            hooks.enter_context(block.register_forward_hook(note_output))
        run()
    called = [recorded.call.module for recorded, _ in left]
    if called != list(blocks):
        raise ValueError(
            f"`run` must call each of the {len(blocks)} blocks once, in their order, got "
            f"{len(called)} calls"
        )
    calls = on_one_stream(
        [recorded for recorded, _ in left], nn.ModuleList(blocks), len(blocks)
    )
    return [
        BlockFunction(layer, call, call.rows(residual), step=Y - X)
        for layer, ((call, X, Y, _), (_, residual)) in enumerate(
            zip(calls, left, strict=True)
        )
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

    It is the number of `coupling`, of Jacobians to which something was done first.

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
    check_matrices(J)
    k = fitting_k(k, J.shape[-1])
    decomposed = J.detach() if frames == "detached" else J
    U, _, Vh = torch.linalg.svd(decomposed)
    images = einsum(J, Vh[:, :k], "row out d, column k d -> row column out k")
    A = einsum(U[..., :k], images, "column out j, row column out k -> row column j k")
    energy = A.square()
    total = energy.sum((-1, -2))
    diagonal = energy.diagonal(dim1=-2, dim2=-1).sum(-1)
    different = ~torch.eye(len(J), dtype=torch.bool, device=J.device)
    off_share = (total - diagonal)[different] / total[different]
    # Rounding may leave a share below 0, whose root has no gradient.
    return 1 - off_share.clamp_min(torch.finfo(J.dtype).eps).sqrt().mean()
