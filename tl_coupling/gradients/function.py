"""A residual block as a function, `f(X) = block(X) − X`.

How its Jacobians are evaluated is in `ways`, how they are checked in `gate`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.blocks import BlockCall, RecordedCall, is_out_of_memory
from tl_coupling.gradients.errors import StepError
from tl_coupling.gradients.gate import Gate, Reference
from tl_coupling.gradients.remarks import Remarks
from tl_coupling.gradients.rows import BlockRows, mlp_on_rows
from tl_coupling.gradients.stream_norms import StreamNorms, normalises, stream_norms
from tl_coupling.gradients.ways import (
    ComponentsEvaluation,
    Evaluation,
    Path,
    RowFunction,
    Ways,
)


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """What the block at `layer` adds to the residual stream X: `f(X) = block(X) − X`.

    With `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with
    `final_norm=True`). With `stream_norms`, through which the stream passes in a
    post-norm block, `f(X)` is what the block's residual branches add before them (see
    `branches`), and so is `step`. `X` is the stream that entered the block when it was
    traced, `step` what it added; `recorded` is that call where the model's dtype is not
    X's.

    Example:
        >>> f = trace.blocks[0]
        >>> torch.allclose(f(f.X), trace.residual[1] - trace.residual[0], atol=1e-5)
        True
    """

    layer: int
    call: BlockCall
    X: Float[Tensor, "n_pos d_model"]
    step: Float[Tensor, "n_pos d_model"] = field(repr=False)
    norm: nn.Module | None = None
    recorded: RecordedCall | None = field(default=None, repr=False)
    remarks: Remarks = field(default_factory=Remarks, repr=False)
    stream_norms: StreamNorms | None = field(default=None, repr=False)

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return `f(X)`, on the full sequence."""
        with self.evaluation():
            return self._rows.of_all(X)

    def evaluation(self) -> AbstractContextManager[None]:
        """Return the context in which the block is evaluated and differentiated.

        Its arithmetic is exact, and weights are in X's dtype.
        """
        return self._rows.evaluation()

    @cached_property
    def _rows(self) -> BlockRows:
        return BlockRows(self.call, self.X, self.norm, self.stream_norms)

    # Blocks that normalise the stream

    def remark_on_norms(self) -> bool:
        """Say whether the block normalises the stream itself, and remark on it.

        `block(X) − X` then holds `−I`. A function that includes the model's final norm
        does not count. Cost: one forward pass of the block, once; none where `refer_to`
        was called before.
        """
        if self._normalises:
            self.remarks.add(
                "normalises",
                f"layer {self.layer}: the block normalises the stream itself (as "
                "post-norm does), so block(X) − X holds −I; coupling compares what its "
                "residual branches add before their norms",
            )
        return self._normalises

    @cached_property
    def _normalises(self) -> bool:
        if self.norm is not None or self.stream_norms is not None:
            return False
        # Seen in passing; a block that seems to is looked at by itself.
        if self._gate.normalises is False:
            return False
        # Where the MLP treats each row by itself, one row of it will do: it is most of
        # the work.
        on_one_row = partial(mlp_on_rows, self.call.module, [0], len(self.X))
        contexts: list[Callable[[], AbstractContextManager[None]]]
        contexts = [on_one_row, nullcontext]
        with self.evaluation():
            for around in contexts:
                try:
                    with around():
                        return normalises(self.call, self.X)
                except Exception as error:
                    # A foreign block may raise anything, which the gate says.
                    if is_out_of_memory(error):
                        raise
        return False

    def branches(self) -> "BlockFunction":
        """Return what the block's residual branches add to the stream.

        This is the function whose Jacobians are compared. It is this one, but for a
        block that normalises the stream: of `H = norm(X + attn(X))`, `Y = norm(H +
        mlp(H))` it is `attn(X) + mlp(H)`, the analogue of `attn(norm(X)) + mlp(norm(X +
        …))` in a pre-norm block.

        Raises:
            ValueError: the block normalises the stream by something else than a module
                that is called on it.

        Cost: none after `refer_to`, else one forward pass of the block, once; a few more
        if it normalises.
        """
        return self._branches if self.remark_on_norms() else self

    @cached_property
    def _branches(self) -> "BlockFunction":
        with self.evaluation():
            norms = stream_norms(self.call, self.X)
        if not norms.calls:
            raise ValueError(
                f"layer {self.layer}: the block normalises the stream itself, not by "
                "modules that are called on it: what its branches add before that is "
                "not known, and block(X) − X, which holds −I, has no coupling; write "
                "the norm as a module, or take the Jacobian of block(X) − X from "
                "`block_jacobian`"
            )
        self.remarks.add_normalising_layer(self.layer)
        of_branches = replace(self, stream_norms=norms)
        return replace(of_branches, step=self.step + of_branches(self.X) - self(self.X))

    # The ways to evaluate its Jacobians

    def ways(
        self, input_positions: Sequence[int], output_position: int
    ) -> Iterator[tuple[Path, Evaluation]]:
        """Return every way to evaluate `J_{t1 t2}` of these t1 and one t2.

        The cheapest comes first.
        """
        return self._ways.to(input_positions, output_position)

    def ways_to_components(
        self, position: int
    ) -> Iterator[tuple[Path, ComponentsEvaluation]]:
        """Return every way to the components of `J_{tt}`; the cheapest comes first."""
        return self._ways.components(position)

    def full_sequence(self, t1: int, t2: int) -> RowFunction:
        """Return `x ↦ f(X with row t1 replaced by x)[t2]`, on all rows."""
        return self._ways.full_sequence(t1, t2)

    def token_local(self, t1: int, t2: int) -> RowFunction:
        """Return `x ↦ f(X with row t1 replaced by x)[t2]`, on one row.

        It is right if rows meet in keys and values alone.

        Raises:
            BlockError: the block does not give its keys and values, or t1 does not act
                on t2.
        """
        return self._ways.token_local(t1, t2)

    def outputs_of_each(
        self, rows: Float[Tensor, "n_rows d_model"], position: int
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return `x + f(x)` of each of several rows x, each in the place of the row at
        `position`; the other rows are as traced.

        Raises:
            BlockError: rows meet in something else than keys and values, or the block
                takes one sequence at a time.
        """
        # Its context depends on the reference, which must be made before `evaluation()`.
        self.reference(position)
        with self.evaluation():
            return self._ways.outputs_of_each(rows, position)

    @property
    def _ways(self) -> Ways:
        # Not kept: it refers to this object, which must be freed when it is let go.
        return Ways(self._rows, self._looks_ahead)

    def _looks_ahead(self, t2: int) -> bool:
        """Say whether later rows act on this one (vision, BERT)."""
        return bool(self.reference(t2).rows[t2 + 1 :].any())

    # The gate

    def reference(self, output_position: int) -> Reference:
        """Return the reference of one position, which is kept.

        The first call is subject to what `refer_to` says.
        """
        self.refer_to([output_position])
        return self._gate.references[output_position]

    def refer_to(self, output_positions: Iterable[int]) -> None:
        """Make references of several positions, with two forward passes for all.

        Older ones are forgotten. It is called outside `evaluation()` where there is a
        `recorded` call, which is made again with the model as it is.

        Raises:
            StepError: the block is not the function that was traced.
            DerivativeError: its derivative is not the function's.
        """
        self._gate.refer_to(output_positions)
        self.remark_on_norms()

    def agrees(
        self, y: Tensor, products: Iterable[Tensor], t1: Sequence[int], t2: int
    ) -> bool:
        """Say whether a way to evaluate `J_{t1 t2}` agrees with the full sequence.

        Args:
            y: its `f(X)[t2]`.
            products: its `uᵀ J_{t1 t2}` of each t1, with the u of the reference.
            t1: the input positions.
            t2: the output position.
        """
        self.refer_to([t2])
        return self._gate.agrees(y, products, t1, t2)

    @property
    def own_dtype(self) -> torch.dtype:
        """The coarsest dtype that the model itself computes the block in."""
        return self._gate.own_dtype

    def changed(self) -> StepError:
        """Return the error where the full sequence no longer agrees with itself."""
        return self._gate.changed()

    @cached_property
    def _gate(self) -> Gate:
        return Gate(self.layer, self._rows, self.step, self.recorded, self.remarks)
