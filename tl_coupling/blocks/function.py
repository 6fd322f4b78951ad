"""A residual block as a function, `f(X) = block(X) − X`: all that is known of it.

How it is evaluated is in `rows`, how it is checked in `gate`, how its Jacobians are
evaluated in `ways`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks.stream_norms import stream_norms
from tl_coupling.blocks.ways import DifferentiatedBlock


@dataclass(eq=False)
class BlockFunction(DifferentiatedBlock):
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

    def __call__(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return `f(X)`, on the full sequence."""
        with self.evaluation():
            return self.added(X)

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
        branches = replace(self, stream_norms=norms)
        # The traced step, in the trace's own arithmetic, with what the norms took away.
        return replace(branches, step=self.step + branches(self.X) - self(self.X))
