"""A residual block as a function, `f(X) = block(X) − X`: the ways to evaluate one row
of it, and their checks.

For one `J_{t1 t2}`, cheapest first:

* **token_local_linearised**: the block on one row, as parts whose Jacobians are known
  (`linearisation`);
* **token_local**: reverse mode through the block on one row, with the keys and values
  of the rows that act on it as constants;
* **full_sequence**: reverse mode through the block on all rows. Always right, and costs
  the whole prompt.

For many t1 and one t2, **query_local_linearised** and **query_local** cost little more
than one token: the output row is pulled back once, to its own input and to every row's
keys and values, and each row of those to its input.

Three checks, from one forward and one backward pass of the block and one or two forward
passes more (at most 22, where a block is stiff):

* **the step**: called again, the block adds to the stream what it added when it was
  traced;
* **the slope**: moved along a random direction, its output changes as its derivative
  predicts. A function without a derivative (rounding, integer layers) has zero or none
  for every kind of AD, so only the function itself can tell (`slopes`);
* **the full sequence**: a cheaper way gives its forward value and one random
  vector–Jacobian product.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tl_coupling.blocks.arithmetic import exact_arithmetic, own_arithmetic
from tl_coupling.blocks.calls import BlockCall, RecordedCall
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.gradients.evaluation import for_seeds, reverse_mode, vjp
from tl_coupling.gradients.gate import (
    DerivativeError,
    Reference,
    Stairs,
    StepError,
    in_percent,
    in_words,
    mlp_on_rows,
)
from tl_coupling.gradients.linearisation import Linearisation
from tl_coupling.gradients.remarks import Remarks
from tl_coupling.gradients.slopes import converges
from tl_coupling.gradients.stream_norms import StreamNorms, normalises, stream_norms

GATE_TOLERANCE = 1e-4
_MOST_REFERENCES = 32
_CAUSES = (
    "Likely causes: weights or hooks changed after `trace`, the block draws random numbers, or it keeps a state from "
    "call to call"
)

Path = Literal[
    "token_local_linearised",
    "token_local",
    "query_local_linearised",
    "query_local",
    "full_sequence",
]
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]
# From a chunk size: `f(X)[t2]`, and `J_{t1 t2}` of each t1.
Evaluated = tuple[Float[Tensor, " d_model"], Sequence[Float[Tensor, "d_model d_model"]]]
Evaluation = Callable[[int | None], Evaluated]


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """What the block at `layer` adds to the residual stream `X` that entered it, `f(X)
    = block(X) − X`.

    With `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with
    `final_norm=True`). With `stream_norms`, through which the stream passes in a
    post-norm block, `f(X)` is what the block's residual branches add before them (see
    `branches`), and so is `step`. `step` is what the block added when it was traced;
    `recorded` is that call where the model's dtype is not X's.

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
    _references: dict[int, Reference] = field(
        default_factory=dict, init=False, repr=False
    )

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """`f(X)`, on the full sequence."""
        with self.evaluation():
            return self._of_all_rows(X)

    def evaluation(self) -> AbstractContextManager[None]:
        """The context in which the block is evaluated and differentiated: exact
        arithmetic, weights in X's dtype.
        """
        modules = (
            [self.call.module] if self.norm is None else [self.call.module, self.norm]
        )
        return exact_arithmetic(self.X.device, modules, self.X.dtype)

    def _of_all_rows(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        return self._after_norm(self._before_stream_norms(lambda: self.call(X))) - X

    def _before_stream_norms(self, run: Callable[[], Tensor]) -> Tensor:
        return run() if self.stream_norms is None else self.stream_norms.before(run)

    def _after_norm(
        self, Y: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        return (
            Y
            if self.norm is None
            else self.norm(Y.reshape(1, -1, Y.shape[-1])).reshape(Y.shape)
        )

    def remark_on_norms(self) -> bool:
        """Whether the block normalises the stream itself, which is remarked on:
        `block(X) − X` then holds `−I`.

        Not asked of a function that includes the model's final norm. Cost: one forward
        pass of the block, once.
        """
        if self._normalises:
            self.remarks.add(
                "normalises",
                f"layer {self.layer}: the block normalises the stream itself (as post-norm does), so block(X) − X "
                "holds −I; coupling compares what its residual branches add before their norms",
            )
        return self._normalises

    @cached_property
    def _normalises(self) -> bool:
        if self.norm is not None or self.stream_norms is not None:
            return False
        # Where the MLP treats each row by itself, one row of it will do: it is most of
        # the work.
        of_one_row = partial(mlp_on_rows, self.call.module, [0], len(self.X))
        with self.evaluation():
            for around in (of_one_row, nullcontext):
                with suppress(BlockError), around():
                    return normalises(self.call, self.X)
        return False

    def branches(self) -> "BlockFunction":
        """What the block's residual branches add to the stream, the function whose
        Jacobians are compared.

        It is this function, but for a block that normalises the stream: of `H = norm(X
        + attn(X))`, `Y = norm(H + mlp(H))` it is `attn(X) + mlp(H)`, the analogue of
        `attn(norm(X)) + mlp(norm(X + …))` in a pre-norm block.

        Raises ValueError where the block normalises the stream by something else than a
        module that is called on it. Cost: one forward pass of the block, once; a few
        more if it normalises.
        """
        return self._branches if self.remark_on_norms() else self

    @cached_property
    def _branches(self) -> "BlockFunction":
        with self.evaluation():
            norms = stream_norms(self.call, self.X)
        if not norms.calls:
            raise ValueError(
                f"layer {self.layer}: the block normalises the stream itself, not by modules that are called on it: "
                "what its branches add before that is not known, and block(X) − X, which holds −I, has no coupling; "
                "write the norm as a module, or take the Jacobian of block(X) − X from `block_jacobian`"
            )
        if self.layer not in self.remarks.normalising_layers:
            self.remarks.normalising_layers.append(self.layer)
        of_branches = replace(self, stream_norms=norms)
        return replace(of_branches, step=self.step + of_branches(self.X) - self(self.X))

    def ways(
        self, input_positions: Sequence[int], output_position: int
    ) -> Iterator[tuple[Path, Evaluation]]:
        """Every way to evaluate `J_{t1 t2}` of these t1 and one t2, cheapest first."""
        t1, t2, n_pos, rows = (
            input_positions[0],
            output_position,
            len(self.X),
            list(input_positions),
        )

        def of_one_row(chunk_size: int | None) -> Evaluated:
            return reverse_mode(
                self.token_local(t1, t2),
                (self.X[t1],),
                lambda gradient: [gradient],
                4,
                chunk_size,
            )

        def of_all_rows(chunk_size: int | None) -> Evaluated:
            whole, of_rows = (
                (lambda X: self._of_all_rows(X)[t2]),
                lambda gradient: gradient[:, rows].unbind(1),
            )
            return reverse_mode(whole, (self.X,), of_rows, 4 * n_pos, chunk_size)

        alone = len(rows) == 1
        yield (
            "token_local_linearised" if alone else "query_local_linearised",
            partial(self._linearised, rows, t2),
        )
        yield (
            ("token_local", of_one_row)
            if alone
            else ("query_local", partial(self._query_local, rows, t2))
        )
        yield "full_sequence", of_all_rows

    def full_sequence(self, t1: int, t2: int) -> RowFunction:
        """`x ↦ f(X with row t1 replaced by x)[t2]`, on all rows."""
        return lambda x: self._of_all_rows(
            torch.cat([self.X[:t1], x[None], self.X[t1 + 1 :]])
        )[t2]

    def token_local(self, t1: int, t2: int) -> RowFunction:
        """`x ↦ f(X with row t1 replaced by x)[t2]`, if rows meet in keys and values
        alone.
        """
        context = self._context(t2)
        if t1 == t2:
            return lambda x: self._at(x, t2, context)
        _, replaced = self._among(context, [t1], t2)
        return lambda x: self._at(
            self.X[t2], t2, replaced(*self.call.keys_and_values(x[None], t1))
        )

    def _query_local(
        self, input_positions: list[int], t2: int, chunk_size: int | None
    ) -> Evaluated:
        """By reverse mode, to the row at t2 and to the keys and values that the other
        input rows feed.
        """
        others = [t1 for t1 in input_positions if t1 != t2]
        (chosen, replaced), fed = (
            self._among(self._context(t2), others, t2),
            self._fed_by(others),
        )

        def of_each_input(own: Tensor, *of_context: Tensor) -> Iterator[Tensor]:
            of_others = fed(*of_context)
            return (own if t1 == t2 else next(of_others) for t1 in input_positions)

        def function(x: Tensor, *rows: Tensor) -> Tensor:
            return self._at(x, t2, replaced(*rows))

        return reverse_mode(
            function,
            (self.X[t2], *chosen),
            of_each_input,
            max(4, 2 * len(others)),
            chunk_size,
        )

    def _linearised(
        self, input_positions: list[int], t2: int, chunk_size: int | None
    ) -> Evaluated:
        """From the Jacobians of the block's parts; keys and values of other input rows
        as in `_query_local`.
        """
        known, block = self._context(t2), self.call.module
        context = self.call.context(t2, known)
        parts = (getattr(block, "original_component", None) or block).children()

        def run(X: Tensor) -> Tensor:
            return self._after_norm(
                self._before_stream_norms(lambda: self.call.at(X, context))
            )

        linearised, y = Linearisation.at(
            self.X[t2], run, [*parts, *filter(None, [self.norm])], context, chunk_size
        )
        J = {}
        if t2 in input_positions:
            J[t2] = linearised.jacobian(y)
            J[t2].diagonal().sub_(1)
        if others := [t1 for t1 in input_positions if t1 != t2]:
            chosen, replaced = self._among(known, others, t2)
            W_O = linearised.attention.W_O
            seeds = linearised.of_rows(torch.zeros_like(W_O), from_attention=W_O).mT
            heads = lambda *rows: linearised.heads(*replaced(*rows))  # noqa: E731
            _, of_others = reverse_mode(
                heads, chosen, self._fed_by(others), 2 * len(others), chunk_size, seeds
            )
            J |= zip(others, of_others, strict=True)
        return y - self.X[t2], [J[t1] for t1 in input_positions]

    def _among(
        self, context: tuple[Tensor, ...], rows: list[int], t2: int
    ) -> tuple[Any, Callable[..., Any]]:
        """Keys and values of some rows of t2's context, and the context with others in
        their place.
        """
        dim = self.call.position_dim
        at = torch.tensor(
            self._in_context(rows, t2), dtype=torch.long, device=self.X.device
        )
        chosen = tuple(old.index_select(dim, at) for old in context)
        return chosen, lambda *new: tuple(
            old.index_copy(dim, at, one) for old, one in zip(context, new, strict=True)
        )

    def _fed_by(self, rows: list[int]) -> Callable[..., Iterator[Tensor]]:
        """From gradients of the keys and values that these rows feed, for every seed,
        to those of the rows.
        """
        # The seeds stand in front: a position axis counted from the front moves up by
        # one.
        axis = self.call.position_dim + (self.call.position_dim >= 0)
        # partial, because a loop has one variable.
        keys_and_values = (
            partial(lambda t1, x: self.call.keys_and_values(x[None], t1), t1)
            for t1 in rows
        )
        feeds = [
            vjp(feed, self.X[t1])[1]
            for feed, t1 in zip(keys_and_values, rows, strict=True)
        ]

        def fed(*gradients: Tensor) -> Iterator[Tensor]:
            for i, feed in enumerate(feeds):
                yield for_seeds(
                    feed, tuple(gradient.narrow(axis, i, 1) for gradient in gradients)
                )[0]

        return fed

    def _context(self, t2: int) -> tuple[Tensor, ...]:
        """Keys and values of the rows that act on t2, without its own: those before, or
        all others.
        """
        dim, known = self.call.position_dim, self._keys_and_values
        if self._looks_ahead(t2):
            return tuple(_without(rows, t2, dim) for rows in known)
        return tuple(rows.narrow(dim, 0, t2) for rows in known)

    def _in_context(self, input_positions: Sequence[int], t2: int) -> list[int]:
        """Which row of the context each of these tokens is."""
        if max(input_positions, default=0) > t2 and not self._looks_ahead(t2):
            raise BlockError("a later row is not in the context")
        return [t1 - (t1 > t2) for t1 in input_positions]

    def _looks_ahead(self, t2: int) -> bool:
        """Whether later rows act on this one (vision, BERT)."""
        return bool(self.reference(t2).rows[t2 + 1 :].any())

    @cached_property
    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        with self.evaluation():
            return self.call.keys_and_values(self.X)

    def _at(
        self, x: Float[Tensor, " d_model"], t2: int, context: tuple[Tensor, ...]
    ) -> Float[Tensor, " d_model"]:
        return (
            self._after_norm(
                self._before_stream_norms(lambda: self.call.row(x, t2, context))
            )
            - x
        )

    def reference(self, output_position: int) -> Reference:
        """The reference of one position; kept. The first call is subject to what
        `refer_to` says.
        """
        self.refer_to([output_position])
        return self._references[output_position]

    def refer_to(self, output_positions: Iterable[int]) -> None:
        """Prepare `reference` of several positions, with two forward passes for all.
        Older ones are forgotten.

        Outside `evaluation()` where there is a `recorded` call, which is made again
        with the model as it is. Raises StepError where the block is not the function
        that was traced, DerivativeError where its derivative is not the function's.
        """
        wanted = set(output_positions)
        if not (missing := wanted - self._references.keys()):
            return
        if len(self._references) + len(missing) > _MOST_REFERENCES:
            self._references.clear()
            missing = wanted
        self.remark_on_norms()
        if (
            self.recorded is not None
        ):  # The model's own call gives the same again, to the last bit but one.
            call, X, recorded_Y, _ = self.recorded
            with own_arithmetic(call.module):
                difference = (call(X) - recorded_Y).float().norm(dim=1)
            tolerance = torch.finfo(self._own_dtype).eps * recorded_Y.float().norm(
                dim=1
            )
            self._refuse(difference, ~(difference <= tolerance))
        at = sorted(missing)
        Y: Tensor | None = None
        with self.evaluation():
            # Most of the work is the MLP's. Where it treats each row by itself, the
            # step is the same with it on these rows alone; else all are computed.
            for around in (
                partial(mlp_on_rows, self.call.module, at, len(self.X)),
                nullcontext,
            ):
                with suppress(BlockError), around(), Stairs() as stairs:
                    Y, pull_back = vjp(self._of_all_rows, self.X)
                    if not bool(self._is_other_step(Y)[at].any()):
                        break
            if Y is None:
                raise self.changed()
            self._check_step(Y, at)
            if stairs.found:
                raise self._no_derivative(f"it calls `{stairs.found}`")
            made: dict[int, Reference] = {}
            for t in at:
                u = torch.randn(
                    self.X.shape[1],
                    generator=torch.Generator().manual_seed(t),
                    dtype=torch.float64,
                ).to(Y)
                seed = torch.zeros_like(Y)
                seed[t] = u
                made[t] = Reference(Y[t], u, pull_back(seed)[0])
            self._check_slopes(Y, made, around)
        self._references.update(made)

    def agrees(
        self, y: Tensor, products: Iterable[Tensor], t1: Sequence[int], t2: int
    ) -> bool:
        """Whether a forward value and a candidate for `uᵀ J_{t1 t2}` of each t1 equal
        the full sequence's.
        """
        expected = self.reference(t2)
        # f is a difference: its rounding error grows with the residual stream, and a
        # vanishing J_{t1 t2} has no norm.
        scale = expected.y.norm() + 1e-2 * self.X[t2].norm()
        if not bool((y - expected.y).norm() <= GATE_TOLERANCE * scale):
            return False
        rows, least = expected.rows[list(t1)], 1e-2 * expected.rows.norm()
        close = (
            (uJ - r).norm() <= GATE_TOLERANCE * (r.norm() + least)
            for uJ, r in zip(products, rows, strict=True)
        )
        return all(map(bool, close))

    def changed(self) -> StepError:
        """The error to raise where the full sequence no longer agrees with itself."""
        found = f"block {self.layer} gave another value or derivative when it was called again"
        return StepError(f"{found}. {_CAUSES}. Trace the prompt again")

    @property
    def _own_dtype(self) -> torch.dtype:
        """The coarsest dtype of the recorded call other than X's; X's where the model
        computes in that alone.
        """
        dtypes = (
            self.recorded.dtypes - {self.X.dtype} if self.recorded else {self.X.dtype}
        )
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _is_other_step(
        self, Y: Float[Tensor, "n_pos d_model"]
    ) -> Bool[Tensor, " n_pos"]:
        """Where f(X) is not the traced step, up to rounding in the model's own
        dtype.
        """
        difference, step, stream = (
            (Y - self.step).norm(dim=1),
            self.step.norm(dim=1),
            self.X.norm(dim=1),
        )
        eps = torch.finfo(self._own_dtype).eps if self.recorded else 0
        return ~(
            difference
            <= (GATE_TOLERANCE + 8 * eps) * step
            + (1e-2 * GATE_TOLERANCE + 1.5 * eps) * stream
        )

    def _check_step(self, Y: Float[Tensor, "n_pos d_model"], rows: list[int]) -> None:
        """Raise unless f(X) is the traced step in these rows; only remark on it if that
        was in another dtype.
        """
        other, difference = self._is_other_step(Y), (Y - self.step).norm(dim=1)
        if self.recorded is None and bool(other[rows].any()):
            self._refuse(difference, other)
        elif bool(other[rows].any()):
            ours, own = (
                str(dtype).removeprefix("torch.")
                for dtype in (self.X.dtype, self._own_dtype)
            )
            percent = in_percent(difference, self.step.norm(dim=1), other)
            self.remarks.add(
                "precision",
                f"layer {self.layer}: the block's step in {ours} differs from that in {own} at {in_words(other)}, by "
                f"up to {percent} (a mixture of experts may send a token to other experts)",
            )

    def _refuse(
        self, difference: Float[Tensor, " n_pos"], wrong: Bool[Tensor, " n_pos"]
    ) -> None:
        if bool(wrong.any()):
            percent = in_percent(difference, self.step.norm(dim=1), wrong)
            raise StepError(
                f"block {self.layer} is not the function that was traced: at {in_words(wrong)} what it adds to the "
                f"residual stream differs by {percent} from the traced step. {_CAUSES}. Trace the prompt again and "
                "measure it under the same conditions"
            )

    def _check_slopes(
        self,
        Y: Float[Tensor, "n_pos d_model"],
        references: dict[int, Reference],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Raise unless f changes along one random direction as its derivative predicts
        (`slopes`).
        """
        size = self.X.norm(dim=1, keepdim=True) / math.sqrt(self.X.shape[1])
        generator = torch.Generator().manual_seed(self.layer)
        V = size * torch.randn(
            self.X.shape, generator=generator, dtype=torch.float64
        ).to(self.X)
        positions = list(references)
        u = torch.stack([reference.u for reference in references.values()])
        uJ = torch.stack([reference.rows for reference in references.values()])

        def deviation(move: float) -> Tensor:
            X = self.X + move * V
            with around():
                change = self._of_all_rows(X)[positions] - Y[positions]
            predicted = einsum(
                uJ, X - self.X, "output n_pos d_model, n_pos d_model -> output"
            )
            return (
                einsum(change, u, "output d_model, output d_model -> output")
                - predicted
            )

        scale = (uJ * size).flatten(1).norm(dim=1)
        converged = converges(
            deviation, scale, (self.X.norm(dim=1) + Y.norm(dim=1))[positions]
        )
        if not bool(converged.all()):
            tokens = torch.zeros(len(self.X), dtype=torch.bool)
            tokens[positions] = ~converged.cpu()
            raise self._no_derivative(
                f"at {in_words(tokens)} its slope is not the one that autograd gives"
            )

    def _no_derivative(self, found: str) -> DerivativeError:
        return DerivativeError(
            f"block {self.layer} has no derivative that could be measured: {found}. Functions that round, and integer "
            "layers, have none: load the model without quantization, or remove the rounding"
        )


def _without(rows: Tensor, at: int, dim: int, *replaced_by: Tensor) -> Tensor:
    """Keys or values without the row at a position along `dim`, or with another in its
    place.
    """
    return torch.cat(
        [
            rows.narrow(dim, 0, at),
            *replaced_by,
            rows.narrow(dim, at + 1, rows.shape[dim] - at - 1),
        ],
        dim,
    )
