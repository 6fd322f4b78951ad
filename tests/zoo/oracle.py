"""`J_{t1 t2}` by plain autograd over the whole original model: neither a bridge nor
tl_coupling has a part in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# The names that a block's first argument goes by.
_STREAM = ("hidden_states", "x", "resid_pre")


class OracleError(Exception):
    """The model has no residual stream of which Jacobians could be taken."""


class Oracle:
    """The original model, run once for each layer; `J[t1, t2]` of any pair of positions
    from then on.

    With `residual`, what enters each of its blocks is replaced by that (a bfloat16
    model's own stream, in a model with the same weights in float32).
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        inputs: Mapping[str, Any],
        residual: Tensor | None = None,
    ) -> None:
        self.model, self.inputs, self.residual = model, inputs, residual
        self.blocks: Any = model.get_submodule(path)
        # The other way to run a mixture is grouped, in float32 or less.
        if hasattr(model, "set_experts_implementation"):
            mixture: Any = model
            mixture.set_experts_implementation("eager")

    def jacobians(
        self, layer: int, pairs: list[tuple[int, int]]
    ) -> dict[tuple[int, int], Tensor]:
        """`J_{t1 t2}` of one block for each `(t1, t2)`, one output entry at a time, the
        skip left out.
        """
        [(X, Y)] = self.steps([layer])
        jacobians = {}
        for t2 in {t2 for _, t2 in pairs}:
            rows = [
                torch.autograd.grad(y, X, retain_graph=True)[0][0] for y in Y[0, t2]
            ]
            for t1 in {t1 for t1, t2_ in pairs if t2_ == t2}:
                J = torch.stack([row[t1] for row in rows])
                jacobians[t1, t2] = (
                    J - torch.eye(len(J), dtype=J.dtype) if t1 == t2 else J
                )
        return jacobians

    def steps(self, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """`(X, Y)` of each of these blocks from one run of the model; X is a leaf, so Y
        depends on no other block.
        """
        steps: list[dict[str, Tensor]] = [{} for _ in self.blocks]
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                if index in layers or self.residual is not None:
                    stack.enter_context(self._patched(block, index, steps[index]))
                    stack.enter_context(_output_kept(block, steps[index]))
            self.model(**self.inputs)
        chosen = [(steps[layer]["X"], steps[layer]["Y"]) for layer in layers]
        for X, _ in chosen:
            if X.ndim != 3:
                raise OracleError(
                    f"what enters its blocks has the shape {list(X.shape)}, not [1 n_pos d_model]"
                )
        return chosen

    @contextmanager
    def _patched(
        self, block: nn.Module, index: int, kept: dict[str, Tensor]
    ) -> Iterator[None]:
        """Make what enters the block a leaf, and put it into `kept`."""

        def patch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else next(name for name in _STREAM if name in kwargs)
            X = args[0] if name is None else kwargs[name]
            X = X if self.residual is None else self.residual[index][None]
            kept["X"] = X = X.detach().clone().requires_grad_()
            return (
                ((X, *args[1:]), kwargs)
                if name is None
                else (args, {**kwargs, name: X})
            )

        handle = block.register_forward_pre_hook(patch, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _output_kept(block: nn.Module, kept: dict[str, Tensor]) -> Iterator[None]:
    """Put what leaves the block into `kept`."""

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept["Y"] = output[0] if isinstance(output, tuple | list) else output

    handle = block.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def to_float32(model: Any) -> Any:
    """Return the model itself, its weights in float32 from now on."""
    # HookedTransformer reads its precision from its config as well.
    if getattr(getattr(model, "cfg", None), "dtype", None) is not None:
        model.cfg.dtype = torch.float32
    return model.to(torch.float32)
