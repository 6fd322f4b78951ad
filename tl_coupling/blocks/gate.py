"""The gate: what is measured of a block is compared with the block's own function.

Three checks, from one forward and one backward pass of the block and one or two forward
passes more (a few more where a block is stiff):

* **the step**: called again, the block adds to the stream what it added when it was
  traced;
* **the slope**: moved along a random direction, its output changes as its derivative
  predicts; where it does not, two other directions decide. A function without a
  derivative (rounding, integer layers) has zero or none for every kind of AD, so only
  the function itself can tell (`slopes`, `lost_gradients`);
* **the full sequence**: a cheaper way gives its forward value and one random
  vector–Jacobian product.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import cached_property
from tl_coupling.blocks.arithmetic import is_out_of_memory, own_arithmetic
from tl_coupling.blocks.calls import RecordedCall
from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.errors import DerivativeError, StepError
from tl_coupling.blocks.evaluation import (
    PullBack,
    custom_functions,
    vjp,
    vjp_with_aux,
)
from tl_coupling.blocks.hooks import backward_hooks_of_user, hooks_of_user
from tl_coupling.blocks.lost_gradients import LostGradients
from tl_coupling.blocks.rows import EvaluatedBlock, mlp_on_rows
from tl_coupling.blocks.skip_path import (
    LargeResponse,
    large_stream,
    passed_shares,
)
from tl_coupling.blocks.slopes import converges
from tl_coupling.blocks.stream_norms import StreamNorms, normalises, stream_norms

TOLERANCE = 1e-4
# Relative to the norm of the residual stream, or of all rows of a reference: f is a
# difference, so that its rounding error grows with the stream, and a vanishing
# J_{t1 t2} has no norm.
SHARE_OF_STREAM = 1e-2
# The computation gives I + J. J has the rounding of the identity that is taken from it,
# which is so many least bits where a block is stiff.
_BITS_OF_IDENTITY = 32
_MOST_REFERENCES = 32
# Moves of a row, relative to its norm, that say whose gradient is right; and how near
# to it the function's own must be, as a share of the difference.
_MOVES_OF_GRADIENT = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
_SAME_GRADIENT = 0.25
# Between the seeds of a block's random directions.
_MOST_LAYERS = 100_000
_CAUSES = (
    "Likely causes: weights or hooks changed after `trace`, the block draws random "
    "numbers, or it keeps a state from call to call"
)
_NO_SLOPE = (
    "Functions that round, and integer layers, have none: load the model without "
    "quantization, or remove the rounding"
)


class Reference(NamedTuple):
    """What the full sequence gives for one output row.

    `y` is `f(X)[t]`, `u` a seeded random vector, and `rows` holds `uᵀ J_{· t}` of every
    input row.
    """

    y: Float[Tensor, " d_model"]
    u: Float[Tensor, " d_model"]
    rows: Float[Tensor, "n_pos d_model"]


class SpanReference(NamedTuple):
    """What the full sequence gives for neighbouring output rows together.

    `y` is `f(X)` of those rows, `u` holds a seeded random vector of each, and `rows` is
    `Σ_t uᵀ_t J_{s t}` of each row s of the span.
    """

    positions: range
    y: Float[Tensor, "n_rows d_model"]
    u: Float[Tensor, "n_rows d_model"]
    rows: Float[Tensor, "n_rows d_model"]


class _Pass(NamedTuple):
    """One forward pass of the block, differentiated.

    `context` makes the context in which it ran, `piecewise_constant` names a function
    without a slope that it called, and `stopped_by` one that stopped a gradient. Keys
    and values are known where the block gives them; whether Y is the traced step is
    `is_traced_step`.
    """

    Y: Float[Tensor, "n_pos d_model"]
    pull_back: PullBack
    context: Callable[[], AbstractContextManager[None]]
    piecewise_constant: str | None
    stopped_by: str | None
    keys_and_values: tuple[Tensor, ...] | None
    is_traced_step: bool


# From several streams to f of each.
_OfEach = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class CheckedBlock(EvaluatedBlock):
    """A block whose references are checked when they are made, and kept.

    Attributes:
        references: by output position.
        large_response: what the block makes of a very large stream; None until that is
            known.
    """

    references: dict[int, Reference] = field(
        default_factory=dict, init=False, repr=False
    )
    large_response: LargeResponse | None = field(default=None, init=False, repr=False)

    def reference(self, output_position: int) -> Reference:
        """Return the reference of one position, which is kept.

        The first call is subject to what `refer_to` says.
        """
        self.refer_to([output_position])
        return self.references[output_position]

    def refer_to(self, output_positions: Iterable[int]) -> None:
        """Make references of several positions, with two forward passes for all.

        Older ones are forgotten. It is called outside `evaluation()` where there is a
        `recorded` call, which is made again with the model as it is.

        Raises:
            StepError: the block is not the function that was traced.
            DerivativeError: its derivative is not the function's.
        """
        positions = set(output_positions)
        missing = positions - self.references.keys()
        if not missing:
            return
        if len(self.references) + len(missing) > _MOST_REFERENCES:
            self.references.clear()
            missing = positions
        if self.recorded is not None:
            self._check_recorded_call(self.recorded)
        with self.evaluation():
            self.references.update(self._checked_references(sorted(missing)))
        self.remark_on_norms()

    def keep_reference(self, t: int, reference: Reference) -> None:
        """Keep a reference that was made, and checked, beside those of other blocks."""
        if len(self.references) >= _MOST_REFERENCES:
            self.references.clear()
        self.references[t] = reference

    def span_reference(self, positions: range) -> SpanReference:
        """Return the references of neighbouring positions as one.

        As `refer_to`, with as many positions at a time as are kept.
        """
        values: list[Tensor] = []
        u: list[Tensor] = []
        rows = torch.zeros_like(self.X[positions.start : positions.stop])
        for first in range(0, len(positions), _MOST_REFERENCES):
            some_positions = positions[first : first + _MOST_REFERENCES]
            self.refer_to(some_positions)
            for t in some_positions:
                reference = self.references[t]
                values.append(reference.y)
                u.append(reference.u)
                rows += reference.rows[positions.start : positions.stop]
        return SpanReference(positions, torch.stack(values), torch.stack(u), rows)

    def span_agrees(self, reference: SpanReference, y: Tensor, product: Tensor) -> bool:
        """Say whether a way to evaluate a span agrees with the full sequence.

        Args:
            reference: of the span.
            y: its `f(X)` of the span's rows.
            product: its `Σ_t uᵀ_t J_{s t}` of each row s, with the reference's u.
        """
        _, value, u, rows = reference
        stream = self.X[reference.positions.start : reference.positions.stop]
        is_product = is_same_product(product, rows, rows.norm(), u)
        # One reading, for which a device waits once.
        return bool((is_same_value(y, value, stream) & is_product).all())

    # Norms of the stream

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
        # Known without a further pass; a block that seems to is looked at by itself.
        large_response = self._response_to_large_stream()
        if large_response is None or not large_response.stays_small:
            return False
        with self.evaluation():
            try:
                if not normalises(self.call, self.X):
                    return False
                # A block without a skip connection may stay as small (tanh).
                return bool(self.passed_shares.any())
            except Exception as error:
                # A foreign block may raise anything, which the gate says.
                if is_out_of_memory(error):
                    raise
        return False

    @cached_property
    def norms_of_stream(self) -> StreamNorms:
        """The norms that the stream passes through, of a block that stays small."""
        with self.evaluation():
            return stream_norms(self.call, self.X)

    @cached_property
    def passed_shares(self) -> Float[Tensor, " n_pos"]:
        """How much of each row of the stream is in what leaves the block, 1 where it
        passes whole; by additions, multiples and norms of the stream.
        """
        large_response = self._response_to_large_stream()
        is_small = large_response is not None and large_response.stays_small
        norms = self.norms_of_stream if is_small else None
        with self.evaluation():
            return passed_shares(self.call, self.X, norms)

    def _response_to_large_stream(self) -> LargeResponse | None:
        """Return what the block makes of a very large stream; None where it fails.

        Cost: one forward pass, unless a reference was made.
        """
        if self.large_response is not None:
            return self.large_response
        # Where the MLP treats each row by itself, one row of it will do: it is most of
        # the work.
        one_row_mlp = partial(mlp_on_rows, self.call.module, [0], len(self.X))
        contexts: list[Callable[[], AbstractContextManager[None]]]
        contexts = [one_row_mlp, nullcontext]
        large = large_stream(self.X)
        with self.evaluation():
            for context in contexts:
                try:
                    with context():
                        self.large_response = LargeResponse.of(self.call(large), large)
                except Exception as error:
                    # A foreign block may raise anything, which the gate says.
                    if is_out_of_memory(error):
                        raise
                else:
                    return self.large_response
        return None

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
        reference = self.reference(t2)
        is_value = is_same_value(y, reference.y, self.X[t2])
        is_output = torch.tensor([t == t2 for t in t1], device=y.device)
        is_product = is_same_product(
            torch.stack(list(products)),
            reference.rows[list(t1)],
            reference.rows.norm(),
            reference.u * is_output[:, None],
        )
        # One reading, for which a device waits once.
        return bool(is_value & is_product.all())

    def check_gradient(
        self, y: Tensor, products: Sequence[Tensor], t1: Sequence[int], t2: int
    ) -> None:
        """Raise DerivativeError where autograd gives another derivative than a record,
        and the function itself changes as the record says.

        This finds a gradient that a hook or a backward pass of one's own changes by too
        little for the slope along a random direction. The row is moved in the direction
        in which the two differ. Where the moves do not decide, nothing is raised. Cost:
        12 forward passes.

        Args:
            y: a record's `f(X)[t2]`.
            products: its `uᵀ J_{t1 t2}` of each t1, with the u of the reference.
            t1: the input positions.
            t2: the output position.
        """
        reference = self.reference(t2)
        difference = torch.stack(list(products)) - reference.rows[list(t1)]
        place = int(difference.norm(dim=1).argmax())
        size = difference[place].norm()
        is_same = is_same_value(y, reference.y, self.X[t2])
        if not bool(is_same & (size > 0) & size.isfinite()):
            return
        t, direction = t1[place], difference[place] / size
        length = self.X[t].norm()
        # By how much more the function changes than autograd says, as a share of how
        # much more it does by the record.
        shares = []
        for move in _MOVES_OF_GRADIENT:
            step = torch.zeros_like(self.X)
            step[t] = move * length * direction
            ends = [self.X + step, self.X - step]
            change = self.added(ends[0])[t2] - self.added(ends[1])[t2]
            moved_by = (ends[0] - ends[1])[t]
            more = change @ reference.u - moved_by @ reference.rows[t]
            shares.append(float(more / (moved_by @ direction * size)))
        # Two neighbouring moves must agree: along large ones the function bends, and
        # small ones are rounded.
        if any(
            max(abs(share - 1), abs(other - 1)) < _SAME_GRADIENT
            for share, other in pairwise(shares)
        ):
            percent = 100 * float(size / reference.rows[t].norm())
            raise self._no_derivative(
                f"autograd's differs by {percent:.2g} % from that of the operations that "
                f"run, which is right. {self._cause_of_gradient()}"
            )

    def _cause_of_gradient(self) -> str:
        """Say what changes a gradient, as far as autograd's graph tells."""
        block = self.call.module
        if names := backward_hooks_of_user(block):
            return (
                f"Backward hooks change its gradients ({', '.join(names)}): remove them"
            )
        with torch.enable_grad(), LostGradients() as lost:
            Y = self.added(self.X.detach().clone().requires_grad_())
        if lost.stopped_by is not None:
            return (
                f"It stops or changes gradients (`{lost.stopped_by}`): let them through"
            )
        custom = custom_functions(Y)
        if custom:
            return (
                f"It has backward passes of its own ({', '.join(custom)}): correct them"
            )
        return "Likely causes: `torch.no_grad` within the block, or hooks on tensors"

    def changed(self) -> StepError:
        """Return the error where the full sequence no longer agrees with itself."""
        return StepError(
            f"block {self.layer} gave another value or derivative when it was called "
            f"again. {self._causes()}. Trace the prompt again{self._active_hooks()}"
        )

    def _checked_references(self, positions: list[int]) -> dict[int, Reference]:
        """Return references of these positions, after the checks of step and slope."""
        forward = self._forward(positions)
        if not forward.is_traced_step:
            self._refuse_step(forward.Y)
        if forward.piecewise_constant:
            raise self._no_derivative(
                f"it calls `{forward.piecewise_constant}`. {_NO_SLOPE}"
            )
        references = {t: self._pulled_back(forward, t) for t in positions}
        self._check_slopes(forward, references)
        return references

    def _forward(self, positions: list[int]) -> _Pass:
        """Return a pass that gives the traced step at these positions, or the last one.

        Most of the work is the MLP's. Where it treats each row by itself, the step is
        the same with it on these rows alone; else all are computed. The same pass records
        keys and values, where the step is the same with that.
        """
        mlp_on_positions = partial(
            mlp_on_rows, self.call.module, positions, len(self.X)
        )
        forward: _Pass | None = None
        failure: Exception | None = None
        for differentiate, context in (
            (self._recorded_pass, mlp_on_positions),
            (self._plain_pass, mlp_on_positions),
            (self._plain_pass, nullcontext),
        ):
            try:
                with context(), LostGradients() as lost:
                    Y, pull_back, keys_and_values = differentiate()
            except BlockError:
                continue
            except Exception as error:
                # A foreign block may raise anything.
                if is_out_of_memory(error):
                    raise
                failure = error
                continue
            is_traced_step = not bool(self._is_another_step(Y)[positions].any())
            forward = _Pass(
                Y,
                pull_back,
                context,
                lost.piecewise_constant,
                lost.stopped_by,
                keys_and_values,
                is_traced_step,
            )
            if is_traced_step:
                break
        if forward is None:
            raise self.changed() if failure is None else self._failed(failure)
        if forward.keys_and_values is not None:
            self._keys_and_values = forward.keys_and_values
        return forward

    def _recorded_pass(self) -> tuple[Tensor, PullBack, tuple[Tensor, ...] | None]:
        return vjp_with_aux(self.added_with_context, self.X)

    def _plain_pass(self) -> tuple[Tensor, PullBack, tuple[Tensor, ...] | None]:
        Y, pull_back = vjp(self.added, self.X)
        return Y, pull_back, None

    def _pulled_back(self, forward: _Pass, t: int) -> Reference:
        """Return the reference of a position from one backward pass."""
        Y = forward.Y
        u = random_output(t, Y)
        seed = torch.zeros_like(Y)
        seed[t] = u
        try:
            # A checkpoint runs the block again.
            with forward.context():
                (rows,) = forward.pull_back(seed)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise self._failed(error) from error
        return Reference(Y[t], u, rows)

    # The step

    def _check_recorded_call(self, recorded: RecordedCall) -> None:
        """Raise StepError unless the model's own call gives the recorded output again."""
        self._refuse(*self._recorded_difference(recorded))

    def differs_from_recorded_call(self) -> Bool[Tensor, ""]:
        """Say whether the model's own call, in its dtype, gives another output than it
        gave: never where that dtype is X's, in which the step says it.

        It is called outside `evaluation()`.
        """
        if self.recorded is None:
            return torch.zeros((), dtype=torch.bool, device=self.X.device)
        _, is_wrong = self._recorded_difference(self.recorded)
        return is_wrong.any()

    def _recorded_difference(
        self, recorded: RecordedCall
    ) -> tuple[Float[Tensor, " n_pos"], Bool[Tensor, " n_pos"]]:
        """Return by how much the model's own call gives another output than recorded,
        and where the two are not equal up to one unit in the last place.
        """
        with own_arithmetic(recorded.call.module), recorded.call.as_recorded():
            try:
                Y = recorded.call(recorded.X)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise self._failed(error) from error
            difference = (Y - recorded.Y).float().norm(dim=1)
        eps = torch.finfo(self.own_dtype).eps
        tolerance = eps * recorded.Y.float().norm(dim=1)
        return difference, ~is_within(difference, tolerance)

    @property
    def own_dtype(self) -> torch.dtype:
        """The coarsest dtype of the recorded call other than X's.

        It is X's where the model computes in that alone.
        """
        dtypes = frozenset({self.X.dtype})
        if self.recorded:
            dtypes = self.recorded.dtypes - dtypes
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    def _is_another_step(
        self, Y: Float[Tensor, "n_pos d_model"]
    ) -> Bool[Tensor, " n_pos"]:
        """Say where f(X) is not the traced step, up to rounding in the model's dtype."""
        return is_another_step(Y, self.step, self.X, self.rounding_of_step)

    @property
    def rounding_of_step(self) -> float:
        """The rounding of the traced step beyond that of f: the model's own dtype's."""
        return torch.finfo(self.own_dtype).eps if self.recorded else 0.0

    def _refuse_step(self, Y: Float[Tensor, "n_pos d_model"]) -> None:
        """Raise StepError: f(X) is not the traced step.

        If the step was traced in another dtype, it is only remarked on.
        """
        differs = self._is_another_step(Y)
        difference = (Y - self.step).norm(dim=1)
        if self.recorded is None:
            self._refuse(difference, differs)
            return
        dtype = str(self.X.dtype).removeprefix("torch.")
        own_dtype = str(self.own_dtype).removeprefix("torch.")
        percent = _format_percent(difference, self.step.norm(dim=1), differs)
        self.remarks.add(
            "precision",
            f"layer {self.layer}: the block's step in {dtype} differs from that in "
            f"{own_dtype} at {_format_tokens(differs)}, by up to {percent} (a mixture of "
            "experts may send a token to other experts)",
        )

    def _refuse(
        self, difference: Float[Tensor, " n_pos"], is_wrong: Bool[Tensor, " n_pos"]
    ) -> None:
        """Raise StepError if any row is wrong."""
        if bool(is_wrong.any()):
            percent = _format_percent(difference, self.step.norm(dim=1), is_wrong)
            raise StepError(
                f"block {self.layer} is not the function that was traced: at "
                f"{_format_tokens(is_wrong)} what it adds to the residual stream differs by "
                f"{percent} from the traced step. {self._causes()}. Trace the prompt "
                f"again and measure it under the same conditions{self._active_hooks()}"
            )

    # The slope

    def _check_slopes(self, forward: _Pass, references: dict[int, Reference]) -> None:
        """Raise DerivativeError unless f changes as its derivative predicts (`slopes`).

        It is moved along one random direction. Along few directions a stiff function
        bends so much that it looks like one without a derivative: where one direction
        speaks against the derivative, two others must both speak for it.
        """
        is_right = self._converges(forward, references, direction=0)
        if forward.stopped_by is not None:
            # A gradient that was stopped may be a small part of the slope.
            for i in (1, 2):
                is_right &= self._converges(forward, references, direction=i)
        elif not is_right.all():
            is_right |= np.all(
                [self._converges(forward, references, direction=i) for i in (1, 2)], 0
            )
        if is_right.all():
            return
        is_wrong = torch.zeros(len(self.X), dtype=torch.bool)
        is_wrong[list(references)] = torch.from_numpy(~is_right)
        raise self._no_derivative(
            f"at {_format_tokens(is_wrong)} its slope is not the one that autograd gives. "
            f"{self._cause_of_slope(forward, is_wrong)}"
        )

    def _cause_of_slope(self, forward: _Pass, is_wrong: Bool[Tensor, " n_pos"]) -> str:
        """Say why autograd gives another slope, and what to do."""
        block = self.call.module
        if names := backward_hooks_of_user(block):
            return (
                f"Backward hooks change its gradients ({', '.join(names)}): remove them"
            )
        if forward.stopped_by is not None:
            return (
                f"It stops or changes gradients (`{forward.stopped_by}`), as the error term "
                "of an SAE does: let them through, or take away what calls it"
            )
        masked = self.call.masked_rows() & set(is_wrong.nonzero().flatten().tolist())
        if masked:
            return (
                "The attention mask hides every key from there, as it does at a pad "
                "token at the start: leave such tokens out of the prompt"
            )
        return _NO_SLOPE

    def _converges(
        self, forward: _Pass, references: dict[int, Reference], direction: int
    ) -> Bool[np.ndarray, " n_references"]:
        """Say where f changes as its derivative predicts along a random direction V.

        Moves that are likely to be asked for together are computed by one call of the
        block.
        """
        X = self.X
        size = X.norm(dim=1, keepdim=True) / math.sqrt(X.shape[1])
        V = size * random_direction(self.layer, direction, X).to(X)
        places = torch.tensor(list(references), device=X.device)
        Y = forward.Y[places]
        u = torch.stack([reference.u for reference in references.values()])
        uJ = torch.stack([reference.rows for reference in references.values()])
        scale = (uJ * size).flatten(1).norm(dim=1)
        rounded_size = X[places].norm(dim=1) + Y.norm(dim=1)

        def deviations(added_of_streams: _OfEach, moves: list[float]) -> Tensor:
            moved = torch.stack([torch.add(X, V, alpha=move) for move in moves])
            with forward.context():
                change = added_of_streams(moved)[:, places] - Y
            # uᵀJ ΔX of every move and output, summed over rows and their entries.
            predicted = (moved - X).flatten(1) @ uJ.flatten(1).mT
            return torch.linalg.vecdot(change, u) - predicted

        def judged(added_of_streams: _OfEach) -> Bool[np.ndarray, " n_references"]:
            return converges(partial(deviations, added_of_streams), scale, rounded_size)

        # Over several streams together, what was stopped may be a constant.
        if forward.stopped_by is None:
            is_right = judged(self._added_to_each_or_singly)
            if is_right.all():
                return is_right
        # Several streams by one call may not be what each is by itself.
        return judged(self._one_by_one)

    def _added_to_each_or_singly(
        self, streams: Float[Tensor, "n_streams n_pos d_model"]
    ) -> Float[Tensor, "n_streams n_pos d_model"]:
        """Return f of each of several streams, by one call of the block if it can.

        The first call also takes a very large stream, to see whether the block
        normalises it, and whether it passes whole.
        """
        streams_and_large = streams
        if self.large_response is None:
            large = large_stream(self.X)
            streams_and_large = torch.cat([streams, large[None]])
        try:
            outputs = self.added_to_each(streams_and_large)
        except Exception as error:
            # A foreign block may raise anything where it gets several streams.
            if is_out_of_memory(error):
                raise
            return self._one_by_one(streams)
        if self.large_response is None:
            self.large_response = LargeResponse.of(outputs[-1] + large, large)
        return outputs[: len(streams)]

    def _one_by_one(
        self, streams: Float[Tensor, "n_streams n_pos d_model"]
    ) -> Float[Tensor, "n_streams n_pos d_model"]:
        return torch.stack([self.added(stream) for stream in streams])

    # Refusals

    def _no_derivative(self, reason: str) -> DerivativeError:
        return DerivativeError(
            f"block {self.layer} has no derivative that could be measured: {reason}"
            f"{self._active_hooks()}"
        )

    def _failed(self, error: Exception) -> DerivativeError | StepError:
        """Return the error where the block raises one as it is differentiated, or as it
        is called again.
        """
        message = " ".join(str(error).split())[:300]
        raised = f"({type(error).__name__}: {message})"
        try:
            self.added(self.X)
        except Exception as of_call:
            if is_out_of_memory(of_call):
                raise
            return StepError(
                f"block {self.layer} fails when it is called again as it was traced "
                f"{raised}. {self._causes()}{self._active_hooks()}"
            )
        return DerivativeError(
            f"block {self.layer} cannot be differentiated: it runs, but not within "
            f"autograd {raised}. Take away what fails there{self._active_hooks()}"
        )

    def _causes(self) -> str:
        """Say why a block is not the function that was traced."""
        dropped = self.call.dropped_cache
        if dropped is not None:
            return (
                f"It was called with a key/value cache (`{dropped}`), which a trace "
                "leaves out: run the whole sequence without it (`use_cache=False`), "
                "prefix included"
            )
        if self.recorded is None:
            return _CAUSES
        own = str(self.X.dtype).removeprefix("torch.")
        return (
            f"{_CAUSES}; or a hook of yours has tensors of another dtype than {own}, in "
            "which blocks are evaluated: convert them to that of its input"
        )

    def _active_hooks(self) -> str:
        """List the hooks within the block, in a sentence of their own."""
        names = hooks_of_user(self.call.module)
        return f". Active hooks: {', '.join(names)}" if names else ""


def random_output(t: int, stream: Float[Tensor, "... d_model"]) -> Float[Tensor, " d"]:
    """Return the random vector by which a position's outputs are checked."""
    # Drawn on the CPU and in float64: the same on every device and in every dtype.
    generator = torch.Generator().manual_seed(t)
    u = torch.randn(stream.shape[-1], generator=generator, dtype=torch.float64)
    return u.to(stream)


def random_direction(
    layer: int, direction: int, X: Float[Tensor, "n_pos d_model"]
) -> Float[Tensor, "n_pos d_model"]:
    """Return a random direction in which a block's stream is moved, on the CPU."""
    generator = torch.Generator().manual_seed(layer + _MOST_LAYERS * direction)
    return torch.randn(X.shape, generator=generator, dtype=torch.float64)


def _format_tokens(is_meant: Bool[Tensor, " n_pos"]) -> str:
    """Return the marked positions as in "tokens 0, 3"."""
    positions = is_meant.nonzero().flatten().tolist()
    numbers = ", ".join(map(str, positions[:8]))
    if len(positions) > 8:
        numbers += ", …"
    return f"token{'s' if len(positions) > 1 else ''} {numbers}"


def is_another_step(
    Y: Float[Tensor, "*batch d_model"],
    step: Float[Tensor, "*batch d_model"],
    X: Float[Tensor, "*batch d_model"],
    eps: float,
) -> Bool[Tensor, "*batch"]:
    """Say where f(X) is not the traced step, which is rounded to `eps` besides."""
    step_tolerance = (TOLERANCE + 8 * eps) * step.norm(dim=-1)
    stream_tolerance = (SHARE_OF_STREAM * TOLERANCE + 1.5 * eps) * X.norm(dim=-1)
    return ~is_within((Y - step).norm(dim=-1), step_tolerance + stream_tolerance)


def is_same_value(
    y: Float[Tensor, "*batch d_model"],
    expected: Float[Tensor, "*batch d_model"],
    stream: Float[Tensor, "*batch d_model"],
) -> Bool[Tensor, "*batch"]:
    """Say where a way gives the value of f on the full sequence."""
    scale = expected.norm(dim=-1) + SHARE_OF_STREAM * stream.norm(dim=-1)
    return is_within((y - expected).norm(dim=-1), TOLERANCE * scale)


def is_same_product(
    product: Float[Tensor, "*batch d_model"],
    expected: Float[Tensor, "*batch d_model"],
    all_rows: Float[Tensor, "..."],
    u: Float[Tensor, "... d_model"],
) -> Bool[Tensor, "*batch"]:
    """Say where a way gives `uᵀ J` of the full sequence.

    Args:
        product: what it gives.
        expected: of the full sequence.
        all_rows: the norm of such products of all input rows.
        u: the vector, of a Jacobian from which the identity was taken; zero of others.
    """
    rounding = TOLERANCE * SHARE_OF_STREAM * all_rows
    of_identity = _BITS_OF_IDENTITY * torch.finfo(u.dtype).eps * u.norm(dim=-1)
    tolerance = TOLERANCE * expected.norm(dim=-1) + rounding + of_identity
    return is_within((product - expected).norm(dim=-1), tolerance)


def is_within(error: Tensor, tolerance: Tensor) -> Bool[Tensor, "..."]:
    """Say where an error is within a tolerance: none that is NaN or infinite is, also
    where the tolerance is infinite.
    """
    return (error <= tolerance) & error.isfinite()


def _format_percent(difference: Tensor, step: Tensor, is_meant: Tensor) -> str:
    """Return the largest share of the step that a difference is, where it is marked."""
    shares = difference.to(step) / step
    percent = 100 * float(shares[is_meant].max())
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"
