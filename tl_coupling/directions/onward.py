"""What follows from a moved stream at one token: the blocks from a layer on, on that
token alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.directions.effects import rows_at_once

# Probabilities may differ by this from those of the whole model, and by so many steps of
# rounding where the model computes in 16 bits.
_TOLERANCE = 2e-5
_ROUNDINGS = 8


class Onward(NamedTuple):
    """The rest of a model from the stream before a layer on, at one token.

    Earlier tokens are as traced: in a causal model nothing of what is moved at the token
    reaches them, and its own prediction needs nothing of later ones.

    Attributes:
        trace: the prompt.
        layer: the first block to run; the number of blocks for none.
        position: the token, from 0.
    """

    trace: Trace
    layer: int
    position: int

    def log_probabilities(
        self, rows: Float[Tensor, "n_rows d_model"]
    ) -> Float[Tensor, "n_rows d_vocab"]:
        """Return the prediction at the token for each of several streams there.

        Raises:
            RuntimeError: a block cannot be run on one row, or on several apart.
        """
        x = rows.to(self.trace.residual)
        with torch.no_grad():
            for block in self.trace.blocks[self.layer :]:
                x = block.outputs_in_place(x, self.position)
            logits = self.trace.logits(x, normalised=self.trace.final_norm)
        return logits.double().log_softmax(-1)

    def measure_batches(
        self,
        rows: Float[Tensor, "n_rows d_model"],
        measure: Callable[[Float[Tensor, "n d_vocab"]], Float[Tensor, "n effect"]],
    ) -> Float[Tensor, "n_rows effect"]:
        """Return what is measured of the predictions, for as many rows at a time as have
        logits that fit into memory.
        """
        # How wide logits are is known from those of one row.
        d_vocab = self.log_probabilities(rows[:1]).shape[-1]
        batches = rows.split(rows_at_once(1, d_vocab))
        return torch.cat([measure(self.log_probabilities(batch)) for batch in batches])

    def agrees(
        self,
        row: Float[Tensor, " d_model"],
        log_p: Float[Tensor, " d_vocab"],
    ) -> bool:
        """Say whether a prediction of the whole model, moved by hooks, is that of its
        rest with this row.

        A model in 16 bits gives it with its own rounding. There the rest on one row is
        also compared with the rest on all rows, in the same arithmetic.
        """
        if not self.trace.is_causal:
            return False
        try:
            # Two, so that several at once are tried.
            p = self.log_probabilities(row.expand(2, -1)).exp()
        except (RuntimeError, ValueError):
            # Not a model whose rest can be run on one row, or on several apart.
            return False
        rounding = self._rounding
        tolerance = _TOLERANCE + _ROUNDINGS * rounding
        # NaN agrees with nothing.
        is_the_models = bool((p - log_p.exp()).abs().max() <= tolerance)
        if not is_the_models or not rounding:
            return is_the_models
        p_of_all_rows = self._log_probabilities_of_all_rows(row).exp()
        return bool((p - p_of_all_rows).abs().max() <= _TOLERANCE)

    @property
    def _rounding(self) -> float:
        """What the model rounds to, relative to a number; 0 where the trace is as fine."""
        dtypes = {block.own_dtype for block in self.trace.blocks[self.layer :]}
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return eps if eps > torch.finfo(self.trace.residual.dtype).eps else 0.0

    def _log_probabilities_of_all_rows(
        self, row: Float[Tensor, " d_model"]
    ) -> Float[Tensor, " d_vocab"]:
        """Return the prediction for a stream where each block runs on all rows."""
        x = row.to(self.trace.residual)
        with torch.no_grad():
            for block in self.trace.blocks[self.layer :]:
                # The traced stream, moved at the one token.
                X = block.X.clone()
                X[self.position] = x
                x = x + block(X)[self.position]
            logits = self.trace.logits(x[None], normalised=self.trace.final_norm)
        return logits[0].double().log_softmax(-1)
