"""What a block's Jacobians are held against: the step that was traced, the full sequence, and the function itself.

A block function is believed for three reasons, all read off one forward and one backward pass of the block and one
more forward pass:

* **the step**: called again, the block adds to the stream what it added when it was traced;
* **the slope**: moved along one random direction, its output changes as its derivative says. Derivatives that do not
  exist (rounding, integer layers) are zero or left out by every kind of AD alike, so only the function itself can tell;
* **the full sequence**: a cheaper way gives its forward value and one random vector–Jacobian product.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from tl_coupling.blocks.differentiation import vjp_and_more
from tl_coupling.border import warn_caller

GATE_TOLERANCE = 1e-4
_MOST_REFERENCES = 32
# Moves along the random direction, as a part of the root mean square of each row. Where the first disagrees (curvature,
# a kink, a token sent to another expert on the way, an MLP that mixes rows), several decide: those to one side of a
# kink, or the slopes from side to side, which curvature does not bend. One of the four may disagree.
_FIRST_MOVE, _MOVES = 0.01, (0.01, 0.005, 0.0025, 0.001)
_SLOPE_TOLERANCE = 0.1
# Functions whose derivative is zero wherever there is one, and casts; on a stair too wide for the moves they are seen
# by name only.
_STAIRS = {"round", "floor", "ceil", "trunc", "fix", "quantize_per_tensor", "quantize_per_channel"}
_CASTS = {"to", "type", "long", "int", "short", "char"}


class StepError(ValueError):
    """A block, called again, is not the function that was traced."""


class DerivativeError(ValueError):
    """A block function has no derivative, or not the one that automatic differentiation gives."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A block's call as the model made it, where blocks are linearised in another dtype; to be repeated to the bit.

    `dtype` is the coarsest that the block computes in.
    """

    repeat: Callable[[], Tensor]
    output: Float[Tensor, "n_pos d_model"]
    dtype: torch.dtype


@dataclass(eq=False)
class Remarks:
    """What went otherwise than a user would expect while a trace was measured; `texts` stands in its provenance.

    The first of each kind is a warning as well.
    """

    texts: list[str] = field(default_factory=list)
    warned_of: set[str] = field(default_factory=set)

    def add(self, kind: str, text: str) -> None:
        """Note it once; warn if it is the first of its kind."""
        if text in self.texts:
            return
        self.texts.append(text)
        if kind not in self.warned_of:
            self.warned_of.add(kind)
            warn_caller(f"{text} (others like it: `provenance['remarks']`)")


class Reference(NamedTuple):
    """The full sequence's `f(X)[t]`, a seeded random u, and `uᵀ J_{· t}` of every input row, `[n_pos d_model]`.

    `met` is what the block's MLP got and gave at t, `[1 1 d_model]` each; empty where that is not known.
    """

    y: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_model"]
    rows: Float[Tensor, "n_pos d_model"]
    met: tuple[Float[Tensor, "1 1 d_model"], ...]


@dataclass(eq=False)
class Gate:
    """What is known to be right of one block function `f` at `X`, and whether something else agrees with it.

    Attributes:
        layer: of the block.
        f: the block function on all rows, to be called inside `evaluation()`, and what its MLP got and gave.
        f_of_rows: some of its rows, for less, if it has an MLP that got and gave something and does not mix rows.
        X: the residual stream that entered the block.
        step: what the block added to it when it was traced.
        evaluation: the context in which f is what it was.
        recording: the traced call in the model's own dtype, where X is in another.
        remarks: where to say what is not as expected.
    """

    layer: int
    f: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]
    f_of_rows: Callable[[Tensor, Sequence[int]], Tensor]
    X: Float[Tensor, "n_pos d_model"]
    step: Float[Tensor, "n_pos d_model"]
    evaluation: Callable[[], AbstractContextManager[None]]
    recording: Recording | None
    remarks: Remarks
    _references: dict[int, Reference] = field(default_factory=dict)

    def reference(self, output_position: int) -> Reference:
        """The reference of one position; kept. Outside `evaluation()`: a repeated call wants the model as it is."""
        if output_position not in self._references:
            self.refer_to([output_position])
        return self._references[output_position]

    def refer_to(self, output_positions: Sequence[int]) -> None:
        """Make `reference` of several positions ready, from two forward passes for all. Older ones are forgotten.

        Raises:
            StepError: the block is not the function that was traced.
            DerivativeError: its derivative is not that of the function.
        """
        missing = set(output_positions) - self._references.keys()
        if not missing:
            return
        if len(self._references) + len(missing) > _MOST_REFERENCES:
            self._references.clear()
            missing = set(output_positions)
        self._check_repeats()
        made: dict[int, Reference] = {}
        with self.evaluation():
            with _Stairs() as stairs:
                Y, pull_back, met = vjp_and_more(self.f, self.X)
            self._check_step(Y)
            if stairs.found:
                raise DerivativeError(self._no_derivative(f"it calls `{stairs.found}`"))
            for t in sorted(missing):
                generator = torch.Generator().manual_seed(t)
                u = torch.randn(self.X.shape[1], generator=generator, dtype=torch.float64).to(Y)
                seed = torch.zeros_like(Y)
                seed[t] = u
                made[t] = Reference(Y[t], u, pull_back(seed)[0], tuple(rows[:, t : t + 1] for rows in met))
            self._check_slopes(Y, made)
        self._references |= made

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

    def reaches_back(self, input_position: int, output_position: int) -> bool:
        """Whether a later row moves an earlier one (never in a causal model: its products there are exact zeros)."""
        return bool(self.reference(output_position).rows[input_position].any())

    def changed(self) -> StepError:
        """The error to raise where the full sequence no longer agrees with itself."""
        return StepError(
            f"block {self.layer} gave another value or derivative when it was called again. {_CAUSES}. "
            "Trace the prompt again"
        )

    def _check_repeats(self) -> None:
        """Raise unless the model's own call gives again what was recorded, to the last bit but one."""
        if self.recording is None:
            return
        recorded = self.recording.output
        difference = (self.recording.repeat() - recorded).float().norm(dim=1)
        allowed = torch.finfo(self.recording.dtype).eps * recorded.float().norm(dim=1)
        self._raise_if(~(difference <= allowed), difference)

    def _check_step(self, Y: Float[Tensor, "n_pos d_model"]) -> None:
        """Raise unless f(X) is the recorded step; where the model's dtype is another one, remark on what rounding does.

        What rounds there are the additions to the stream and, inside the block, everything.
        """
        difference, step, stream = (Y - self.step).norm(dim=1), self.step.norm(dim=1), self.X.norm(dim=1)
        if self.recording is None:
            self._raise_if(~(difference <= GATE_TOLERANCE * (step + 1e-2 * stream)), difference)
            return
        dtype = self.recording.dtype
        eps = torch.finfo(dtype).eps
        other = ~(difference <= (GATE_TOLERANCE + 8 * eps) * step + (1e-2 * GATE_TOLERANCE + 1.5 * eps) * stream)
        if bool(other.any()):
            names = [str(dtype).removeprefix("torch.") for dtype in (self.X.dtype, dtype)]
            self.remarks.add(
                "precision",
                f"layer {self.layer}: in {names[0]} the block does something else than in {names[1]} at "
                f"{_tokens(other)}, up to {_percent(difference, step, other)} of its step (a mixture may send a token "
                "to other experts)",
            )

    def _raise_if(self, wrong: Tensor, difference: Tensor) -> None:
        if bool(wrong.any()):
            percent = _percent(difference, self.step.norm(dim=1), wrong)
            raise StepError(
                f"block {self.layer} is not the function that was traced: at {_tokens(wrong)} what it adds to the "
                f"residual stream differs by {percent} from the traced step. {_CAUSES}. Trace the prompt again and "
                "measure it under the same conditions"
            )

    def _check_slopes(self, Y: Float[Tensor, "n_pos d_model"], references: dict[int, Reference]) -> None:
        """Raise unless f moves along one random direction as its derivative says."""
        generator = torch.Generator().manual_seed(self.layer)
        size = self.X.norm(dim=1, keepdim=True) / math.sqrt(self.X.shape[1])
        V = size * torch.randn(self.X.shape, generator=generator, dtype=torch.float64).to(self.X)
        u, rows = (torch.stack([getattr(r, name) for r in references.values()]) for name in ("u", "rows"))
        at = list(references)
        expected, scale = (rows * V).sum((1, 2)), (rows * size).flatten(1).norm(dim=1)
        # HuggingFace's norms and softmaxes compute in float32, whatever the model is in.
        rounding = 32 * torch.finfo(torch.float32).eps * (self.X[at].norm(dim=1) + Y[at].norm(dim=1))

        def slopes(move: float, whole: bool = True) -> Tensor:
            X = self.X + move * V
            return (((self.f(X)[0][at] if whole else self.f_of_rows(X, at)) - Y[at]) * u).sum(1) / move

        def disagree(found: Tensor, move: float) -> Tensor:
            return ~((found - expected).abs() <= _SLOPE_TOLERANCE * scale + rounding / move)

        whole = not all(reference.met for reference in references.values())
        if not bool(disagree(slopes(_FIRST_MOVE, whole), _FIRST_MOVE).any()):
            return
        up, down = ([slopes(side * move) for move in _MOVES] for side in (1, -1))
        middle = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
        disagreeing = [
            torch.stack([disagree(found, move) for found, move in zip(side, _MOVES, strict=True)])
            for side in (up, down, middle)
        ]
        wrong = torch.stack([side.sum(0) > 1 for side in disagreeing]).all(0)
        if bool(wrong.any()):
            tokens = torch.zeros(len(self.X), dtype=torch.bool)
            tokens[at] = wrong.cpu()
            raise DerivativeError(self._no_derivative(f"at {_tokens(tokens)} it moves otherwise than autograd says"))

    def _no_derivative(self, found: str) -> str:
        return (
            f"block {self.layer} has no derivative that could be measured: {found}. Functions that round, and integer "
            "layers, have none: load the model without quantization, or take the rounding out"
        )


_CAUSES = (
    "Likely causes: weights or hooks changed after `trace`, the block draws random numbers, or it keeps a state from "
    "call to call"
)


class _Stairs(TorchFunctionMode):
    """Notes a function without slope that is applied to what is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
