"""A residual block as a function, `f(X) = block(X) − X`, and the ways to evaluate its
Jacobians `J_{t1 t2}`.

How the function is evaluated is in `rows`, how it is checked in `gate`. For one
`J_{t1 t2}` there are, the cheapest first:

* **token_local_recorded**: the block on one row, from the record of its operations
  (`records`);
* **token_local**: reverse mode through the block on one row, with the keys and values
  of the rows that act on it as constants;
* **full_sequence**: reverse mode through the block on all rows. Always right, and costs
  the whole prompt.

For many t1 and one t2, **query_local_recorded** and **query_local** cost little more
than one token: what the block makes of the output row's attention is computed once, and
each input row has its own keys and values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import cached_property
from tl_coupling.blocks.applied import Applied
from tl_coupling.blocks.arithmetic import is_out_of_memory
from tl_coupling.blocks.components import (
    Components,
    recorded_components,
)
from tl_coupling.blocks.contexts import BlockError, Context
from tl_coupling.blocks.evaluation import PullBack, reverse_mode, vjp
from tl_coupling.blocks.gate import CheckedBlock
from tl_coupling.blocks.records import Recorded
from tl_coupling.blocks.skip_path import n_directions_cut
from tl_coupling.models import left_as_found

# The name of a way to a Jacobian; what variables and provenance call its path.
Path = Literal[
    "token_local_recorded",
    "query_local_recorded",
    "token_local",
    "query_local",
    "span_linearised",
    "span_local",
    "full_sequence",
]
# Those that do not differentiate by autograd.
_RECORDED = ("token_local_recorded", "query_local_recorded")
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]
Result = TypeVar("Result")
# A stream may pass a block by a product with a matrix. A projection to less than this
# share of all directions cannot be told from a block without a skip connection.
_SMALLEST_SHARE = 0.25
# A share that differs from one by at most this is one.
_SAME_SHARE = 5e-3
_SAFE = (
    'compare with `without="identity"`, and change what blocks read or write '
    "(`Subspace.hooks`, or hooks at `hook_attn_out`, `hook_mlp_out`, `ln1`, `ln2`) "
    "instead of the stream itself"
)
# `f(X)[t2]`, and what was evaluated beside it.
Evaluated = tuple[Float[Tensor, " d_model"], Result]
# Its name, and what evaluates it.
Way = tuple[Path, Callable[[], Evaluated[Result]]]
# `J_{t1 t2}` of each t1.
Jacobians = Sequence[Float[Tensor, "d_model d_model"]]


@dataclass(eq=False)
class BlockFunction(CheckedBlock):
    """What the block at `layer` adds to the residual stream X: `f(X) = block(X) − X`.

    With `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with
    `final_norm=True`). With `stream_norms`, through which the stream passes in a
    post-norm block, `f(X)` is what the block's residual branches add before them (see
    `branches`), and so is `step`. `X` is the stream that entered the block when it was
    traced, `step` what it added; `recorded` is that call where the model's dtype is not
    X's.

    Of the ways to a Jacobian the cheapest that agrees with the full sequence is taken.

    Example:
        >>> f = trace.blocks[0]
        >>> torch.allclose(f(f.X), trace.residual[1] - trace.residual[0], atol=1e-5)
        True
    """

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return `f(X)`, on the full sequence.

        It is differentiable in X once, by reverse and by forward mode: `torch.func`,
        `torch.autograd` and `backward` see the block, whose weights are constants.
        """
        value: Tensor = Applied.apply(X, self)
        return value

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
        if self.remark_on_norms():
            return self._branches
        if not self.passes_whole:
            self._check_skip_path()
        return self

    @property
    def passes_whole(self) -> bool:
        """Whether all of the stream that enters is in what leaves, as far as is known."""
        # With the model's final norm, f holds −I as the paper's code has it.
        if self.norm is not None or self.stream_norms is not None:
            return True
        large_response = self._response_to_large_stream()
        return large_response is None or large_response.passes_whole

    def _check_skip_path(self) -> None:
        """Remark on a block that scales the stream, or multiplies it by a matrix.

        Raises:
            ValueError: nothing of the stream passes the block.
        """
        shares = self.passed_shares
        large_response = self._response_to_large_stream()
        if not bool(shares.any()):
            # A product with a matrix may be a projection: most of the stream passes.
            share = 0.0 if large_response is None else large_response.share
            if not share >= _SMALLEST_SHARE:
                raise ValueError(
                    f"layer {self.layer}: nothing of the stream that enters the block is "
                    "in what leaves it: it is no X + f(X), and block(X) − X, which holds "
                    "−I, has no coupling; give blocks with their skip connection, or "
                    "take the Jacobian of block(X) − X from `block_jacobian`"
                    f"{self._active_hooks()}"
                )
            self._remark_on_cut(f"{share:.2g} of the stream passes the block")
            return
        is_other = (shares - 1).abs() > _SAME_SHARE
        if bool(is_other.any()):
            share = float(shares[is_other].mean())
            self._remark_on_cut(f"the block multiplies the stream by {share:.3g}")

    def _remark_on_cut(self, cut: str) -> None:
        self.remarks.add(
            "skip path",
            f"layer {self.layer}: {cut}, so block(X) − X holds a part of −I, which "
            f"couples with itself; {_SAFE}",
        )

    def _remark_on_directions_cut(self, J: Float[Tensor, "d_model d_model"]) -> None:
        """Remark on directions of the stream that do not pass the block."""
        n_cut = n_directions_cut(J)
        if n_cut:
            self._remark_on_cut(
                f"{n_cut} of {len(J)} directions of the stream do not pass the block"
            )

    @cached_property
    def _branches(self) -> "BlockFunction":
        norms = self.norms_of_stream
        if not norms.calls:
            raise ValueError(
                f"layer {self.layer}: the block normalises the stream itself, not by "
                "modules that are called on it: what its branches add before that is "
                "not known, and block(X) − X, which holds −I, has no coupling; write "
                "the norm as a module, or take the Jacobian of block(X) − X from "
                "`block_jacobian`"
            )
        self.remarks.add_normalising_layer(self.layer)
        branches = replace(self, stream_norms=norms)
        # The traced step, in the trace's own arithmetic, with what the norms took away.
        return replace(branches, step=self.step + branches(self.X) - self(self.X))

    def ways(
        self,
        input_positions: Sequence[int],
        output_position: int,
        chunk_size: int | None = None,
    ) -> Iterator[Way[Jacobians]]:
        """Yield every way to evaluate `J_{t1 t2}` of these t1 and one t2.

        The cheapest comes first.
        """
        t1s = list(input_positions)
        arguments = (t1s, output_position, chunk_size)
        recorded: Path = "query_local_recorded"
        if len(t1s) == 1:
            recorded = "token_local_recorded"
        for is_apart in (True, False):
            yield recorded, partial(self._recorded, t1s, output_position, is_apart)
        # The output row of several inputs is pulled back once for all of them.
        if len(t1s) == 1:
            yield "token_local", partial(self._token_local, *arguments)
        else:
            yield "query_local", partial(self._query_local, *arguments)
        yield "full_sequence", partial(self._full_sequence, *arguments)

    def jacobian(
        self, t1: int, t2: int, chunk_size: int | None = None
    ) -> tuple[Float[Tensor, "d_model d_model"], Path]:
        """Return `J_{t1 t2}`, and the way in which it was evaluated."""
        J, path = self.jacobians([t1], t2, chunk_size)
        return J[0], path

    def jacobians(
        self, t1s: Sequence[int], t2: int, chunk_size: int | None = None
    ) -> tuple[Sequence[Float[Tensor, "d_model d_model"]], Path]:
        """Return `J_{t1 t2}` for several t1 ≤ t2, or any one t1, and the way to them.

        They cost little more than one.
        """
        # Once for all: entering it looks through all modules.
        with self.evaluation() if self.recorded is None else nullcontext():
            reference = self.reference(t2)
            is_later = min(t1s) > t2
            if is_later and not bool(reference.rows[list(t1s)].any()):
                # In a causal model no later row moves an earlier one: these products
                # with J are exact zeros.
                d_model = len(reference.u)
                zeros = [reference.u.new_zeros(d_model, d_model) for _ in t1s]
                return zeros, "full_sequence"
            ways = self.ways(t1s, t2, chunk_size)
            jacobians, path = self.cheapest(
                ways, t1s, t2, lambda matrices: [reference.u @ J for J in matrices]
            )
        if t2 in t1s and not self.passes_whole:
            self._remark_on_directions_cut(jacobians[t1s.index(t2)])
        return jacobians, path

    def cheapest(
        self,
        ways: Iterable[Way[Result]],
        t1s: Sequence[int],
        t2: int,
        products: Callable[[Result], Sequence[Tensor]],
        refusal: Callable[[], Exception] | None = None,
    ) -> tuple[Result, Path]:
        """Return the result of the first way that agrees with the full sequence.

        A way that the block does not allow (`BlockError`) is skipped; so is one that
        fails otherwise, with a remark, because a foreign block may raise anything when
        it is called with our cache.

        Args:
            ways: pairs of a name and what evaluates it, tried in this order, the cheapest
                first; the full sequence last, unless `refusal` is given.
            t1s: the input positions.
            t2: the output position.
            products: gives `uᵀ J_{t1 t2}` of each t1 from a result, where u is that of
                `reference(t2)`, which was made before.
            refusal: makes the error where no way agrees; by default it says that the
                block changed.

        Returns:
            the result, and the name of the way.

        Raises:
            DerivativeError: the derivative that autograd gives is not the function's.
            StepError, or what `refusal` makes: no way agrees.
        """
        with self.evaluation():
            for path, evaluate in ways:
                try:
                    # The next way must not see what this one does to buffers (tables of
                    # rotary embeddings).
                    with left_as_found([self.call.module]):
                        y, result = evaluate()
                    uJ = products(result)
                except BlockError:
                    continue
                except Exception as error:
                    if path == "full_sequence" or is_out_of_memory(error):
                        raise
                    self.remark_on_failure(path, error)
                    continue
                if self.agrees(y, uJ, t1s, t2):
                    return result, path
                if path in _RECORDED:
                    self.check_gradient(y, uJ, t1s, t2)
        raise self.changed() if refusal is None else refusal()

    def remark_on_failure(self, path: Path, error: Exception) -> None:
        """Remark on a cheap way that failed."""
        kind = type(error).__name__
        message = " ".join(str(error).split())[:200]
        text = f"{path} failed ({kind}: {message}), so a more expensive way was used"
        self.remarks.add(f"{path}: {kind}", f"layer {self.layer}: {text}")

    # As functions of one row

    def full_sequence(self, t1: int, t2: int) -> RowFunction:
        """Return `x ↦ f(X with row t1 replaced by x)[t2]`, on all rows."""
        X = self.X

        def function(x: Tensor) -> Tensor:
            replaced = torch.cat([X[:t1], x[None], X[t1 + 1 :]])
            return self.added(replaced)[t2]

        return function

    def token_local(self, t1: int, t2: int) -> RowFunction:
        """Return `x ↦ f(X with row t1 replaced by x)[t2]`, on one row.

        It is right if rows meet in keys and values alone.

        Raises:
            BlockError: the block does not give its keys and values, or t1 does not act
                on t2.
        """
        context = self.context_of(t2)
        if t1 == t2:
            return lambda x: self.added_to_row(x, t2, context)
        input_row = self._rows_in(context, [t1], t2)

        def function(x: Tensor) -> Tensor:
            keys_and_values = self.call.keys_and_values(x[None], t1)
            replaced = input_row.context_with(*keys_and_values)
            return self.added_to_row(self.X[t2], t2, replaced)

        return function

    def outputs_in_place(
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
            context = self.call.context(position, self.context_of(position))
            return self.row_outputs(rows, context)

    # As Jacobians

    def _full_sequence(
        self, t1s: list[int], t2: int, chunk_size: int | None
    ) -> Evaluated[Jacobians]:
        """Evaluate by reverse mode through the block on all rows."""
        X = self.X

        def function(X: Tensor) -> Tensor:
            return self.added(X)[t2]

        def row_jacobians(
            gradient: Float[Tensor, "n_seeds n_pos d_model"],
        ) -> Sequence[Tensor]:
            return gradient[:, t1s].unbind(1)

        return reverse_mode(function, (X,), row_jacobians, 4 * len(X), chunk_size)

    def _recorded(
        self, t1s: list[int], t2: int, is_apart: bool
    ) -> Evaluated[Jacobians]:
        """Evaluate from a record."""
        recorded = self._record(t1s, t2, is_apart)
        return recorded.y, recorded.jacobians()

    def _record(self, t1s: list[int], t2: int, is_apart: bool) -> Recorded:
        """Record the block's operations on one row, and those that make the keys and
        values of other input rows.

        If `is_apart`, all keys and values are constants, and those of the input rows are
        added to attention's two products as terms of their own; a block with other
        products is a BlockError. If not, they are written among all keys and values,
        which have a tangent then.
        """
        keys_and_values = self.context_of(t2)
        added, context = self.function_of_rows(t1s, t2, keys_and_values, is_apart)
        inputs = [self.X[t1] for t1 in t1s]
        return Recorded(self.recordable(added), inputs, lambda: context.attended)

    def function_of_rows(
        self,
        t1s: list[int],
        t2: int,
        keys_and_values: tuple[Tensor, ...],
        is_apart: bool,
    ) -> tuple[Callable[..., Tensor], Context]:
        """Return a function, and the context that it uses.

        `function(*rows, record)` is `f(X)[t2]` where X has these rows at `t1s`; the
        record is the one that is being made, and says what is constant. The context
        holds keys and values of the rows that act on t2, without its own; a call of the
        function sets `context.attended`. If `is_apart`, keys and values of the input
        rows are added to attention's two products as terms of their own; if not, they
        are written among the others.
        """
        others = [t1 for t1 in t1s if t1 != t2]
        other_rows = self._rows_in(keys_and_values, others, t2)
        context = self.call.context(t2, keys_and_values)

        def added(*arguments: Any) -> Tensor:
            *inputs, record = arguments
            rows = dict(zip(t1s, inputs, strict=True))
            x = rows.get(t2, self.X[t2])
            of_others = {
                t1: self.call.keys_and_values(rows[t1][None], t1) for t1 in others
            }
            apart: AbstractContextManager[None] = nullcontext()
            if is_apart:
                apart = context.rows_apart(record.constant, of_others)
            elif others:
                context.rows = other_rows.context_with(
                    *_concatenated(of_others.values(), self.call.position_dim)
                )
            with apart:
                y = self.row_output(x[None].clone(), context).reshape(-1)
            return y - x

        return added, context

    def recordable(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function of inputs and a record, as it is to be recorded."""
        return function

    def _token_local(
        self, t1s: list[int], t2: int, chunk_size: int | None
    ) -> Evaluated[Jacobians]:
        """Evaluate by reverse mode through the block on one row."""
        (t1,) = t1s
        function = self.token_local(t1, t2)
        x = self.X[t1]
        # The MLP, usually four times as wide as the stream, is the widest activation.
        return reverse_mode(function, (x,), lambda J: [J], 4, chunk_size)

    def _query_local(
        self, t1s: list[int], t2: int, chunk_size: int | None
    ) -> Evaluated[Jacobians]:
        """Evaluate by reverse mode to the output row, and to its context.

        From keys and values there, gradients are pulled back to the other input rows.
        """
        context_positions = [t1 for t1 in t1s if t1 != t2]
        context_rows = self._rows_in(self.context_of(t2), context_positions, t2)
        pull_back = context_rows.pull_back()

        def function(x: Tensor, *keys_and_values: Tensor) -> Tensor:
            return self.added_to_row(x, t2, context_rows.context_with(*keys_and_values))

        def jacobian_rows(own: Tensor, *context_gradients: Tensor) -> Iterator[Tensor]:
            row_jacobians = pull_back(*context_gradients)
            return (own if t1 == t2 else next(row_jacobians) for t1 in t1s)

        inputs = (self.X[t2], *context_rows.keys_and_values())
        width = max(4, 2 * len(context_positions))
        return reverse_mode(function, inputs, jacobian_rows, width, chunk_size)

    # As components

    def ways_to_components(self, t: int) -> Iterator[Way[Components]]:
        """Yield the ways to the components of `J_{tt}`: attention meets the row apart
        from others, or among them.
        """
        for is_apart in (True, False):
            evaluate = partial(self._recorded_components, t, is_apart)
            yield "token_local_recorded", evaluate

    def _recorded_components(self, t: int, is_apart: bool) -> Evaluated[Components]:
        """Evaluate from the record of the block's operations on one row."""
        recorded = self._record([t], t, is_apart)
        return recorded.y, recorded_components(recorded)

    def looks_ahead(self, t2: int) -> bool:
        """Say whether later rows act on this one (vision, BERT)."""
        later = self.reference(t2).rows[t2 + 1 :]
        return len(later) > 0 and bool(later.any())

    def context_of(self, t2: int) -> tuple[Tensor, ...]:
        """Return keys and values of the rows that act on t2, without its own.

        Those are the rows before, or all others.
        """
        dim = self.call.position_dim
        looks_ahead = self.looks_ahead(t2)
        return tuple(
            other_rows(rows, t2, dim, looks_ahead) for rows in self.keys_and_values()
        )

    def _rows_in(
        self, context: tuple[Tensor, ...], t1s: list[int], t2: int
    ) -> "_ContextRows":
        """Return these rows of t2's context."""
        if max(t1s, default=0) > t2 and not self.looks_ahead(t2):
            raise BlockError("a later row is not in the context")
        # The output row itself is not in its context.
        # Later rows move up by one there.
        places = [t1 - (t1 > t2) for t1 in t1s]
        index = torch.tensor(places, dtype=torch.long, device=self.X.device)
        return _ContextRows(self, t1s, context, index)


@dataclass(frozen=True, eq=False)
class _ContextRows:
    """Rows that act on an output row through their keys and values.

    `context` holds the keys and values of all rows that do, and `index` where these
    stand in it.
    """

    block: CheckedBlock
    positions: list[int]
    context: tuple[Tensor, ...]
    index: Tensor

    def keys_and_values(self) -> tuple[Tensor, ...]:
        """Return the keys and values of these rows."""
        dim = self.block.call.position_dim
        return tuple(tensor.index_select(dim, self.index) for tensor in self.context)

    def context_with(self, *keys_and_values: Tensor) -> tuple[Tensor, ...]:
        """Return the context with other keys and values in these rows' place."""
        dim = self.block.call.position_dim
        return tuple(
            tensor.index_copy(dim, self.index, replacement)
            for tensor, replacement in zip(self.context, keys_and_values, strict=True)
        )

    def pull_back(self) -> Callable[..., Iterator[Tensor]]:
        """Return what turns gradients of keys and values into those of these rows.

        It takes them for a chunk of seeds, and gives those of one row after the other.
        """
        # The seeds stand in front: a position axis counted from the front moves up by
        # one.
        axis = self.block.call.position_dim
        if axis >= 0:
            axis += 1
        pull_backs = [self._pull_back_of(t1) for t1 in self.positions]

        def row_jacobians(*gradients: Tensor) -> Iterator[Tensor]:
            for place, pull_back in enumerate(pull_backs):
                row_gradients = tuple(
                    gradient.narrow(axis, place, 1) for gradient in gradients
                )
                yield pull_back.batched(row_gradients)[0]

        return row_jacobians

    def _pull_back_of(self, t1: int) -> PullBack:
        """Return the pull-back from the keys and values of one row to that row."""

        def keys_and_values(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.block.call.keys_and_values(x[None], t1)

        pull_back: PullBack = vjp(keys_and_values, self.block.X[t1])[1]
        return pull_back


def _concatenated(
    keys_and_values: Iterable[tuple[Tensor, ...]], dim: int
) -> list[Tensor]:
    """Return keys, and values, of several rows along their axis of positions."""
    return [torch.cat(parts, dim) for parts in zip(*keys_and_values, strict=True)]


def other_rows(rows: Tensor, position: int, dim: int, looks_ahead: bool) -> Tensor:
    """Return the keys or values before a position along `dim`, or all but its own."""
    earlier = rows.narrow(dim, 0, position)
    if not looks_ahead:
        return earlier
    later = rows.narrow(dim, position + 1, rows.shape[dim] - position - 1)
    return torch.cat([earlier, later], dim)
