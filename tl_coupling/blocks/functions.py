"""A residual block as a function, `f(X) = block(X) − X`: the ways to evaluate one row of it, and their checks.

For one `J_{t1 t2}`, cheapest first:

* **token_local_linearised**: the next, with the attention's two products expanded to first order too (`expansions`);
* **token_local_affine_mlp**: the next, with the MLP expanded to first order;
* **token_local**: the block on one row, with the keys and values of the rows that act on it as constants;
* **full_sequence**: the block on all rows. Always right, and costs the whole prompt instead of one token.

For many t1 and one t2, **query_local** (or **query_local_affine_mlp**) costs little more than one token: the output row
is pulled back once, to its own input and to every row's keys and values, and each row of those to its input.

Three checks, all from one forward and one backward pass of the block and one more forward pass:

* **the step**: called again, the block adds to the stream what it added when it was traced;
* **the slope**: moved along a random direction, its output changes as its derivative predicts. A function without a
  derivative (rounding, integer layers) has zero or none for every kind of AD, so only the function itself can tell;
* **the full sequence**: a cheaper way gives its forward value and one random vector–Jacobian product.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.calls import BlockCall, RecordedCall
from tl_coupling.blocks.evaluation import exact_arithmetic, for_seeds, own_arithmetic, vjp
from tl_coupling.blocks.expansions import BlockError, ProductRule, affine_mlp, mlp_on_rows, watched_mlp
from tl_coupling.border import warn_caller

GATE_TOLERANCE = 1e-4
_MOST_REFERENCES = 32
# Moves along the random direction, relative to the root mean square of each row. Where the first disagrees (curvature,
# a kink, a token sent to another expert on the way, an MLP that mixes rows), several decide: those to one side of a
# kink, or the slopes from side to side, which curvature leaves alone. One of the four may disagree.
_FIRST_MOVE, _MOVES = 0.01, (0.01, 0.005, 0.0025, 0.001)
_SLOPE_TOLERANCE = 0.1
# Functions without a slope, and casts: where their steps are wider than the moves, only their names reveal them.
_STAIRS = {"round", "floor", "ceil", "trunc", "fix", "quantize_per_tensor", "quantize_per_channel"}
_CASTS = {"to", "type", "long", "int", "short", "char"}
_CAUSES = (
    "Likely causes: weights or hooks changed after `trace`, the block draws random numbers, or it keeps a state from "
    "call to call"
)

Path = Literal[
    "token_local_linearised",
    "token_local_affine_mlp",
    "token_local",
    "query_local_affine_mlp",
    "query_local",
    "full_sequence",
]
RowFunction = Callable[[Float[Tensor, " d_model"]], Float[Tensor, " d_model"]]
# A function to `f(X)[t2]`, its inputs, and what turns their gradients into those of each wanted input row.
Differentiable = tuple[Callable[..., Tensor], tuple[Tensor, ...], Callable[..., Iterable[Tensor]]]


class StepError(ValueError):
    """A block, called again, is not the function that was traced."""


class DerivativeError(ValueError):
    """A block function has no derivative, or another one than automatic differentiation gives."""


@dataclass(eq=False)
class Remarks:
    """What a user would not expect of a measured trace, for its provenance; the first of each kind is a warning too."""

    texts: list[str] = field(default_factory=list)
    warned_of: set[str] = field(default_factory=set)

    def add(self, kind: str, text: str) -> None:
        """Note it, if it is new; warn if it is the first of its kind."""
        if text not in self.texts:
            self.texts.append(text)
            if kind not in self.warned_of:
                self.warned_of.add(kind)
                warn_caller(f"{text} (others like it: `provenance['remarks']`)")


class Way(NamedTuple):
    """One way to evaluate `f(X)[t2]`; its widest activation has `width * d_model` entries for each seed."""

    path: Path
    context: AbstractContextManager[None]
    make: Callable[[], Differentiable]
    width: int


class Reference(NamedTuple):
    """The full sequence's `f(X)[t]`, a seeded random u, and `uᵀ J_{· t}` of every input row, `[n_pos d_model]`.

    `met` is the input and the output of the block's MLP at t, `[1 1 d_model]` each; empty where they are not known.
    """

    y: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_model"]
    rows: Float[Tensor, "n_pos d_model"]
    met: tuple[Float[Tensor, "1 1 d_model"], ...]


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """What the block at `layer` adds to the residual stream `X` that entered it, `f(X) = block(X) − X`.

    With `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with `final_norm=True`).
    `step` is what the block added when it was traced; `recorded` is that call where the model's dtype is not X's.
    """

    layer: int
    call: BlockCall
    X: Float[Tensor, "n_pos d_model"]
    step: Float[Tensor, "n_pos d_model"] = field(repr=False)
    norm: nn.Module | None = None
    recorded: RecordedCall | None = field(default=None, repr=False)
    remarks: Remarks = field(default_factory=Remarks, repr=False)
    _references: dict[int, Reference] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """`f(X)`, on the full sequence."""
        with self.evaluation():
            return self._of_all_rows(X)

    def evaluation(self) -> AbstractContextManager[None]:
        """The context in which the block is evaluated and differentiated: exact arithmetic, weights in X's dtype."""
        modules = [self.call.module] if self.norm is None else [self.call.module, self.norm]
        return exact_arithmetic(self.X.device, modules, self.X.dtype)

    def _of_all_rows(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        return self._after_norm(self.call(X)) - X

    def _after_norm(self, Y: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        return Y if self.norm is None else self.norm(Y.reshape(1, -1, Y.shape[-1])).reshape(Y.shape)

    def ways(self, input_positions: Sequence[int], output_position: int) -> Iterator[Way]:
        """Every way to evaluate `J_{t1 t2}` of these t1 and one t2, cheapest first."""
        t1, *others = input_positions
        t2, n_pos = output_position, len(self.X)

        def affine() -> AbstractContextManager[None]:
            return affine_mlp(self.call.module, self.reference(t2).met)

        if others:
            query, width = partial(self._query_local, input_positions, t2), max(4, 2 * n_pos)
            yield Way("query_local_affine_mlp", affine(), query, width)
            yield Way("query_local", nullcontext(), query, width)
            rows = list(input_positions)
            whole = (lambda X: self._of_all_rows(X)[t2]), (self.X,), lambda gradient: gradient[:, rows].unbind(1)
            yield Way("full_sequence", nullcontext(), lambda: whole, width)
            return

        def of_row(make: Callable[..., RowFunction], **options: bool) -> Callable[[], Differentiable]:
            return lambda: (make(t1, t2, **options), (self.X[t1],), lambda gradient: [gradient])

        yield Way("token_local_linearised", affine(), of_row(self._token_local, product_rule=True), 4)
        yield Way("token_local_affine_mlp", affine(), of_row(self._token_local), 4)
        yield Way("token_local", nullcontext(), of_row(self._token_local), 4)
        yield Way("full_sequence", nullcontext(), of_row(self.full_sequence), 4 * n_pos)

    def full_sequence(self, t1: int, t2: int) -> RowFunction:
        """`x ↦ f(X with row t1 replaced by x)[t2]`, on all rows."""
        return lambda x: self._of_all_rows(torch.cat([self.X[:t1], x[None], self.X[t1 + 1 :]]))[t2]

    def _token_local(self, t1: int, t2: int, product_rule: bool = False) -> RowFunction:
        """The same function at the cost of one token, if rows meet in keys and values alone."""
        dim, context, at = self.call.position_dim, self._context(t2), self._in_context([t1], t2)[0]

        def function(x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
            rule = ProductRule(t1, n_keys=context[0].shape[dim] + 1) if product_rule else None
            if t1 == t2:
                return self._at(x, t2, context, rule)
            new = self.call.keys_and_values(x[None], t1)
            if rule is not None:
                rule.moved += [rule.in_layout(row, dim) for row in new]
                return self._at(self.X[t2], t2, context, rule)
            swapped = tuple(_without(old, at, dim, row) for old, row in zip(context, new, strict=True))
            return self._at(self.X[t2], t2, swapped)

        return function

    def _query_local(self, input_positions: Sequence[int], t2: int) -> Differentiable:
        """`f(X)[t2]` of its own row and of the context's keys and values, which the other input rows feed."""
        dim, places = self.call.position_dim, self._in_context(input_positions, t2)
        fed_by = cache(lambda t1: vjp(lambda x: self.call.keys_and_values(x[None], t1), self.X[t1])[1])

        def of_each_input(own: Tensor, *context: Tensor) -> Iterator[Tensor]:
            # The seeds stand in front: a position axis counted from the front moves up by one.
            axis = dim if dim < 0 else dim + 1
            for t1, at in zip(input_positions, places, strict=True):
                rows = tuple(gradient.narrow(axis, at, 1) for gradient in context if t1 != t2)
                yield for_seeds(fed_by(t1), rows)[0] if rows else own

        return (lambda x, *context: self._at(x, t2, context)), (self.X[t2], *self._context(t2)), of_each_input

    def _context(self, t2: int) -> tuple[Tensor, ...]:
        """Keys and values of the rows that act on t2, without its own: those before, or all others."""
        dim, known = self.call.position_dim, self._keys_and_values
        if self._looks_ahead(t2):
            return tuple(_without(rows, t2, dim) for rows in known)
        return tuple(rows.narrow(dim, 0, t2) for rows in known)

    def _in_context(self, input_positions: Sequence[int], t2: int) -> list[int]:
        """Which row of the context each of these tokens is."""
        if max(input_positions) > t2 and not self._looks_ahead(t2):
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
        self, x: Float[Tensor, " d_model"], position: int, context: tuple[Tensor, ...], rule: ProductRule | None = None
    ) -> Float[Tensor, " d_model"]:
        return self._after_norm(self.call.row(x, position, context, rule)) - x

    def reference(self, output_position: int) -> Reference:
        """The reference of one position; kept. The first call must be outside `evaluation()`, as `refer_to` must."""
        self.refer_to([output_position])
        return self._references[output_position]

    def refer_to(self, output_positions: Iterable[int]) -> None:
        """Prepare `reference` of several positions, with two forward passes for all. Older ones are forgotten.

        Outside `evaluation()`, because the recorded call is repeated with the model as it is. Raises StepError where
        the block is not the function that was traced, DerivativeError where its derivative is not the function's.
        """
        wanted = set(output_positions)
        if not (missing := wanted - self._references.keys()):
            return
        if len(self._references) + len(missing) > _MOST_REFERENCES:
            self._references.clear()
            missing = wanted
        if self.recorded is not None:  # The model's own call gives the same again, to the last bit but one.
            call, X, Y, _ = self.recorded
            with own_arithmetic(call.module):
                difference = (call(X) - Y).float().norm(dim=1)
            self._refuse(difference, torch.finfo(self._own_dtype).eps * Y.float().norm(dim=1))
        made: dict[int, Reference] = {}
        watched = partial(watched_mlp, self.call.module, self._of_all_rows)
        with self.evaluation():
            with _Stairs() as stairs:
                Y, pull_back, met = vjp(watched, self.X, has_aux=True)
            self._check_step(Y)
            if stairs.found:
                raise self._no_derivative(f"it calls `{stairs.found}`")
            for t in sorted(missing):
                u = torch.randn(self.X.shape[1], generator=torch.Generator().manual_seed(t), dtype=torch.float64).to(Y)
                seed = torch.zeros_like(Y)
                seed[t] = u
                made[t] = Reference(Y[t], u, pull_back(seed)[0], tuple(rows[:, t : t + 1] for rows in met))
            self._check_slopes(Y, made)
        self._references.update(made)

    def agrees(self, y: Tensor, products: Iterable[Tensor], t1: Sequence[int], t2: int) -> bool:
        """Whether a forward value and a candidate for `uᵀ J_{t1 t2}` of each t1 equal the full sequence's."""
        expected = self.reference(t2)
        # f is a difference: its rounding error grows with the residual stream, and a vanishing J_{t1 t2} has no norm.
        scale = expected.y.norm() + 1e-2 * self.X[t2].norm()
        if not bool((y - expected.y).norm() <= GATE_TOLERANCE * scale):
            return False
        rows, least = expected.rows[list(t1)], 1e-2 * expected.rows.norm()
        close = ((uJ - r).norm() <= GATE_TOLERANCE * (r.norm() + least) for uJ, r in zip(products, rows, strict=True))
        return all(map(bool, close))

    def changed(self) -> StepError:
        """The error to raise where the full sequence no longer agrees with itself."""
        found = f"block {self.layer} gave another value or derivative when it was called again"
        return StepError(f"{found}. {_CAUSES}. Trace the prompt again")

    @property
    def _own_dtype(self) -> torch.dtype:
        """The coarsest dtype of the recorded call other than X's; X's where the model computes in that alone."""
        dtypes = self.recorded.dtypes - {self.X.dtype} if self.recorded else {self.X.dtype}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _check_step(self, Y: Float[Tensor, "n_pos d_model"]) -> None:
        """Raise unless f(X) is the traced step; only remark on it where that was rounded to another dtype."""
        difference, step, stream = (Y - self.step).norm(dim=1), self.step.norm(dim=1), self.X.norm(dim=1)
        eps = torch.finfo(self._own_dtype).eps if self.recorded else 0
        tolerance = (GATE_TOLERANCE + 8 * eps) * step + (1e-2 * GATE_TOLERANCE + 1.5 * eps) * stream
        if self.recorded is None:
            self._refuse(difference, tolerance)
        elif bool((other := ~(difference <= tolerance)).any()):
            ours, own = (str(dtype).removeprefix("torch.") for dtype in (self.X.dtype, self._own_dtype))
            self.remarks.add(
                "precision",
                f"layer {self.layer}: the block's step in {ours} differs from that in {own} at {_tokens(other)}, by up "
                f"to {_percent(difference, step, other)} (a mixture of experts may send a token to other experts)",
            )

    def _refuse(self, difference: Float[Tensor, " n_pos"], tolerance: Float[Tensor, " n_pos"]) -> None:
        if bool((wrong := ~(difference <= tolerance)).any()):
            percent = _percent(difference, self.step.norm(dim=1), wrong)
            raise StepError(
                f"block {self.layer} is not the function that was traced: at {_tokens(wrong)} what it adds to the "
                f"residual stream differs by {percent} from the traced step. {_CAUSES}. Trace the prompt again and "
                "measure it under the same conditions"
            )

    def _check_slopes(self, Y: Float[Tensor, "n_pos d_model"], references: dict[int, Reference]) -> None:
        """Raise unless f changes along one random direction as its derivative predicts."""
        size = self.X.norm(dim=1, keepdim=True) / math.sqrt(self.X.shape[1])
        generator = torch.Generator().manual_seed(self.layer)
        V = size * torch.randn(self.X.shape, generator=generator, dtype=torch.float64).to(self.X)
        u, rows = (torch.stack([getattr(r, name) for r in references.values()]) for name in ("u", "rows"))
        at = list(references)
        expected, scale = (rows * V).sum((1, 2)), (rows * size).flatten(1).norm(dim=1)
        # HuggingFace's norms and softmaxes compute in float32, whatever the model is in.
        rounding = 32 * torch.finfo(torch.float32).eps * (self.X[at].norm(dim=1) + Y[at].norm(dim=1))

        def slopes(move: float, whole: bool = True) -> Tensor:
            # Where the MLP has one argument and, as is checked here, treats each row by itself, a few rows are cheaper.
            with nullcontext() if whole else mlp_on_rows(self.call.module, at, len(self.X)):
                moved = self._of_all_rows(self.X + move * V)[at]
            return ((moved - Y[at]) * u).sum(1) / move

        def disagree(found: Tensor, move: float | Tensor) -> Tensor:
            return ~((found - expected).abs() <= _SLOPE_TOLERANCE * scale + rounding / move)

        whole = not all(reference.met for reference in references.values())
        if not bool(disagree(slopes(_FIRST_MOVE, whole), _FIRST_MOVE).any()):
            return
        up, down = (torch.stack([slopes(side * move) for move in _MOVES]) for side in (1, -1))
        moves = up.new_tensor(_MOVES)[:, None]
        wrong = torch.stack([disagree(found, moves).sum(0) > 1 for found in (up, down, (up + down) / 2)]).all(0)
        if bool(wrong.any()):
            tokens = torch.zeros(len(self.X), dtype=torch.bool)
            tokens[at] = wrong.cpu()
            raise self._no_derivative(f"at {_tokens(tokens)} its slope is not the one that autograd gives")

    def _no_derivative(self, found: str) -> DerivativeError:
        return DerivativeError(
            f"block {self.layer} has no derivative that could be measured: {found}. Functions that round, and integer "
            "layers, have none: load the model without quantization, or remove the rounding"
        )


def _without(rows: Tensor, at: int, dim: int, *replaced_by: Tensor) -> Tensor:
    """Keys or values without the row at a position along `dim`, or with another in its place."""
    return torch.cat([rows.narrow(dim, 0, at), *replaced_by, rows.narrow(dim, at + 1, rows.shape[dim] - at - 1)], dim)


class _Stairs(TorchFunctionMode):
    """Notes a function with zero slope that is applied to something differentiated."""

    found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        quantized = isinstance(func, OpOverloadPacket) and str(func).startswith("quantized.")
        to_integers = name in _CASTS and isinstance(output, Tensor) and not output.is_floating_point()
        if (quantized or to_integers or name in _STAIRS) and isinstance(args[0], Tensor) and args[0].requires_grad:
            self.found = str(func) if quantized else name
        return output


def _tokens(chosen: Tensor) -> str:
    positions = chosen.nonzero().flatten().tolist()
    some = ", ".join(map(str, positions[:8])) + (", …" if len(positions) > 8 else "")
    return f"token{'s' if len(positions) > 1 else ''} {some}"


def _percent(difference: Tensor, step: Tensor, chosen: Tensor) -> str:
    percent = 100 * float((difference.to(step) / step)[chosen].max())
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"
