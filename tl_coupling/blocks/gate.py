"""What a block's Jacobians are checked against: the traced step, the full sequence, and the function itself.

Three checks, all from one forward and one backward pass of the block and one more forward pass:

* **the step**: called again, the block adds to the stream what it added when it was traced;
* **the slope**: moved along a random direction, its output changes as its derivative predicts. A function without a
  derivative (rounding, integer layers) has zero or none for every kind of AD, so only the function itself can tell;
* **the full sequence**: a cheaper way gives its forward value and one random vector–Jacobian product.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.calls import BlockCall, RecordedCall
from tl_coupling.blocks.differentiation import vjp_and_more
from tl_coupling.blocks.evaluation import exact_arithmetic
from tl_coupling.blocks.mlps import mlp_on_rows, watched_mlp
from tl_coupling.border import warn_caller

GATE_TOLERANCE = 1e-4
_MOST_REFERENCES = 32
# Moves along the random direction, relative to the root mean square of each row. Where the first disagrees (curvature,
# a kink, a token sent to another expert on the way, an MLP that mixes rows), several decide: those to one side of a
# kink, or the slopes from side to side, which curvature leaves alone. One of the four may disagree.
_FIRST_MOVE, _MOVES = 0.01, (0.01, 0.005, 0.0025, 0.001)
_SLOPE_TOLERANCE = 0.1
# Functions whose derivative is zero wherever it exists, and casts. Where their steps are wider than the moves, only
# their names reveal them.
_STAIRS = {"round", "floor", "ceil", "trunc", "fix", "quantize_per_tensor", "quantize_per_channel"}
_CASTS = {"to", "type", "long", "int", "short", "char"}

_CAUSES = (
    "Likely causes: weights or hooks changed after `trace`, the block draws random numbers, or it keeps a state from "
    "call to call"
)


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


class Reference(NamedTuple):
    """The full sequence's `f(X)[t]`, a seeded random u, and `uᵀ J_{· t}` of every input row, `[n_pos d_model]`.

    `met` is the input and the output of the block's MLP at t, `[1 1 d_model]` each; empty where they are not known.
    """

    y: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_model"]
    rows: Float[Tensor, "n_pos d_model"]
    met: tuple[Float[Tensor, "1 1 d_model"], ...]


@dataclass(frozen=True, eq=False)
class CheckedFunction:
    """`f^l` at a trace: what the block at `layer` adds to the residual stream `X` that entered it; and its checks.

    `f(X) = block(X) − X`; with `norm`, `f(X) = norm(block(X)) − X` (the last block of a trace with `final_norm=True`).
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
        """f on the full sequence."""
        with self.evaluation():
            return self.of_all_rows(X)

    def of_all_rows(self, X: Float[Tensor, "n_pos d_model"]) -> Float[Tensor, "n_pos d_model"]:
        """f on the full sequence, to be differentiated inside `evaluation()`."""
        return self.after_norm(self.call(X)) - X

    def after_norm(self, Y: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Rows of the block's output, after the norm if there is one."""
        return Y if self.norm is None else self.norm(Y.reshape(1, -1, Y.shape[-1])).reshape(Y.shape)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The context in which the block is evaluated and differentiated: exact arithmetic, weights in X's dtype."""
        modules = [self.call.module] if self.norm is None else [self.call.module, self.norm]
        with exact_arithmetic(self.X.device, modules, self.X.dtype):
            yield

    def reference(self, output_position: int) -> Reference:
        """The reference of one position; kept. The first call must be outside `evaluation()`, as `refer_to` must."""
        if output_position not in self._references:
            self.refer_to([output_position])
        return self._references[output_position]

    def refer_to(self, output_positions: Iterable[int]) -> None:
        """Prepare `reference` of several positions, with two forward passes for all. Older ones are forgotten.

        Outside `evaluation()`, because the recorded call is repeated with the model as it is.

        Raises:
            StepError: the block is not the function that was traced.
            DerivativeError: its derivative is not that of the function.
        """
        wanted = set(output_positions)
        missing = wanted - self._references.keys()
        if not missing:
            return
        if len(self._references) + len(missing) > _MOST_REFERENCES:
            self._references.clear()
            missing = wanted
        if self.recorded is not None:  # The model's own call gives the same again, to the last bit but one.
            recorded, eps = self.recorded.Y[0], torch.finfo(self._coarsest(self.recorded)).eps
            difference = (self.recorded.again() - recorded).float().norm(dim=1)
            self._refuse(~(difference <= eps * recorded.float().norm(dim=1)), difference)
        made: dict[int, Reference] = {}
        with self.evaluation():
            with _Stairs() as stairs:
                Y, pull_back, met = vjp_and_more(partial(watched_mlp, self.call.module, self.of_all_rows), self.X)
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

    def agrees(
        self, y: Float[Tensor, " d_model"], uJ: Float[Tensor, " d_model"], input_position: int, output_position: int
    ) -> bool:
        """Whether a forward value and a candidate for `uᵀ J_{t1 t2}` equal the full sequence's to 1e-4."""
        expected = self.reference(output_position)
        row = expected.rows[input_position]
        # f is a difference: its rounding error grows with the residual stream, and a vanishing J_{t1 t2} has no norm.
        value_scale = expected.y.norm() + 1e-2 * self.X[output_position].norm()
        product_scale = row.norm() + 1e-2 * expected.rows.norm()
        return bool(
            (y - expected.y).norm() <= GATE_TOLERANCE * value_scale
            and (uJ - row).norm() <= GATE_TOLERANCE * product_scale
        )

    def changed(self) -> StepError:
        """The error to raise where the full sequence no longer agrees with itself."""
        return StepError(
            f"block {self.layer} gave another value or derivative when it was called again. {_CAUSES}. "
            "Trace the prompt again"
        )

    def _coarsest(self, recorded: RecordedCall) -> torch.dtype:
        return max(recorded.dtypes - {self.X.dtype}, key=lambda dtype: torch.finfo(dtype).eps)

    def _check_step(self, Y: Float[Tensor, "n_pos d_model"]) -> None:
        """Raise unless f(X) is the traced step; where the model's dtype is another one, only remark on a difference.

        That dtype rounds the additions to the stream and everything inside the block.
        """
        difference, step, stream = (Y - self.step).norm(dim=1), self.step.norm(dim=1), self.X.norm(dim=1)
        if self.recorded is None:
            self._refuse(~(difference <= GATE_TOLERANCE * (step + 1e-2 * stream)), difference)
            return
        eps = torch.finfo(dtype := self._coarsest(self.recorded)).eps
        other = ~(difference <= (GATE_TOLERANCE + 8 * eps) * step + (1e-2 * GATE_TOLERANCE + 1.5 * eps) * stream)
        if bool(other.any()):
            ours, own = (str(dtype).removeprefix("torch.") for dtype in (self.X.dtype, dtype))
            self.remarks.add(
                "precision",
                f"layer {self.layer}: the block's step in {ours} differs from that in {own} at {_tokens(other)}, by up "
                f"to {_percent(difference, step, other)} (a mixture of experts may send a token to other experts)",
            )

    def _refuse(self, wrong: Tensor, difference: Tensor) -> None:
        """Raise if any token is wrong."""
        if bool(wrong.any()):
            percent = _percent(difference, self.step.norm(dim=1), wrong)
            raise StepError(
                f"block {self.layer} is not the function that was traced: at {_tokens(wrong)} what it adds to the "
                f"residual stream differs by {percent} from the traced step. {_CAUSES}. Trace the prompt again and "
                "measure it under the same conditions"
            )

    def _check_slopes(self, Y: Float[Tensor, "n_pos d_model"], references: dict[int, Reference]) -> None:
        """Raise unless f changes along one random direction as its derivative predicts."""
        generator = torch.Generator().manual_seed(self.layer)
        size = self.X.norm(dim=1, keepdim=True) / math.sqrt(self.X.shape[1])
        V = size * torch.randn(self.X.shape, generator=generator, dtype=torch.float64).to(self.X)
        u, rows = (torch.stack([getattr(r, name) for r in references.values()]) for name in ("u", "rows"))
        at = list(references)
        expected, scale = (rows * V).sum((1, 2)), (rows * size).flatten(1).norm(dim=1)
        # HuggingFace's norms and softmaxes compute in float32, whatever the model is in.
        rounding = 32 * torch.finfo(torch.float32).eps * (self.X[at].norm(dim=1) + Y[at].norm(dim=1))

        def slopes(move: float, whole: bool = True) -> Tensor:
            # Where the MLP has one argument and, as is checked here, treats each row by itself, a few rows are cheaper.
            with nullcontext() if whole else mlp_on_rows(self.call.module, at):
                moved = self.of_all_rows(self.X + move * V)[at]
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
    """The largest relative difference of the chosen rows."""
    percent = 100 * float((difference.to(step) / step)[chosen].max())
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"
