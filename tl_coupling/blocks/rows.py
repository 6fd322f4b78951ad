"""What a block adds to the residual stream, computed on all rows or on one of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import shared_changes
from tl_coupling.blocks.arithmetic import exact_arithmetic
from tl_coupling.blocks.calls import BlockCall, RecordedCall
from tl_coupling.blocks.contexts import BlockError, Context
from tl_coupling.blocks.remarks import Remarks
from tl_coupling.blocks.stream_norms import ObservedNorms, StreamNorms


@dataclass(eq=False)
class EvaluatedBlock:
    """A block as it was traced, and its function `f(X) = block(X) − X`.

    How it is checked (`CheckedBlock`) and what its derivative is (`BlockFunction`)
    are classes on top of this one.

    Attributes:
        layer: of the block.
        call: the block with the arguments of its recorded call.
        X: the stream that entered it.
        step: what it added.
        norm: comes after the block; the final norm of the last one.
        recorded: the recorded call where the model's dtype is not X's.
        remarks: of the trace, to which the block's are added.
        stream_norms: through which the stream passes in a post-norm block. Where they
            are given, f is what the block's residual branches add before them.
    """

    layer: int
    call: BlockCall
    X: Float[Tensor, "n_pos d_model"]
    step: Float[Tensor, "n_pos d_model"] = field(repr=False)
    norm: nn.Module | None = None
    recorded: RecordedCall | None = field(default=None, repr=False)
    remarks: Remarks = field(default_factory=Remarks, repr=False)
    stream_norms: StreamNorms | None = field(default=None, repr=False)
    # The keys and values of the rows of X, once they are known: references give them in
    # passing.
    _keys_and_values: tuple[Tensor, ...] | None = field(
        default=None, init=False, repr=False
    )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate and differentiate the block in this context.

        Its arithmetic is exact, weights are in X's dtype, and it is called as it was
        when it was traced.
        """
        modules = [self.call.module]
        if self.norm is not None:
            modules.append(self.norm)
        arithmetic = exact_arithmetic(self.X.device, modules, self.X.dtype)
        with arithmetic, self.call.as_recorded():
            yield

    def added(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> Float[Tensor, "n_pos d_model"]:
        """Return f(X)."""
        with self._observed_norms() as norms:
            Y = self.call(X)
        return self._normalised(Y, norms) - X

    def added_with_context(
        self, X: Float[Tensor, "n_pos d_model"]
    ) -> tuple[Float[Tensor, "n_pos d_model"], tuple[Tensor, Tensor]]:
        """Return f(X), and the keys and values of its rows.

        Raises:
            BlockError: the block does not give them.
        """
        with self._observed_norms() as norms:
            Y, keys_and_values = self.call.output_with_context(X)
        return self._normalised(Y, norms) - X, keys_and_values

    def added_to_each(
        self, streams: Float[Tensor, "n_streams n_pos d_model"]
    ) -> Float[Tensor, "n_streams n_pos d_model"]:
        """Return f of each of several streams, by one call of the block.

        Raises:
            BlockError: the block does not take several.
        """
        with self._observed_norms() as norms:
            Y = self.call.outputs(streams)
        return self._normalised(Y, norms) - streams

    def added_to_row(
        self, x: Float[Tensor, " d_model"], t2: int, context: tuple[Tensor, ...]
    ) -> Float[Tensor, " d_model"]:
        """Return the row `f(X)[t2]` from the row x there.

        `context` holds keys and values of the rows that act on it.
        """
        with self._observed_norms() as norms:
            y = self.call.row(x, t2, context)
        return self._normalised(y, norms) - x

    def row_output(
        self, X: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return `x + f(x)` of rows that all stand at the context's place."""
        with self._observed_norms() as norms:
            Y = self.call.row_output(X, context)
        return self._normalised(Y, norms)

    def row_outputs(
        self, rows: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return `x + f(x)` of each of several rows, each alone at the context's place."""
        with self._observed_norms() as norms:
            Y = self.call.row_outputs(rows, context)
        return self._normalised(Y, norms)

    def added_to_following(
        self, X: Float[Tensor, "n_rows d_model"], context: Context
    ) -> Float[Tensor, "n_rows d_model"]:
        """Return what is added to the rows that follow the context's."""
        with self._observed_norms() as norms:
            Y = self.call.following_outputs(X, context)
        return self._normalised(Y, norms) - X

    def _observed_norms(self) -> AbstractContextManager[ObservedNorms]:
        """Return the context in which the norms of the stream are noted, if any."""
        if self.stream_norms is None:
            return nullcontext({})
        return self.stream_norms.observed()

    def _normalised(
        self, Y: Float[Tensor, "*rows d_model"], norms: ObservedNorms
    ) -> Float[Tensor, "*rows d_model"]:
        """Return a block's output before the norms of its stream and after `norm`."""
        if self.stream_norms is not None:
            Y = self.stream_norms.undone(Y, norms)
        if self.norm is None:
            return Y
        normalised: Tensor = self.norm(Y.reshape(1, -1, Y.shape[-1]))
        return normalised.reshape(Y.shape)

    def keys_and_values(self) -> tuple[Tensor, ...]:
        """Return keys and values of the rows of X, computed unless they are known."""
        if self._keys_and_values is None:
            with self.evaluation():
                self._keys_and_values = self.call.keys_and_values(self.X)
        return self._keys_and_values


@contextmanager
def mlp_on_rows(block: nn.Module, rows: list[int], n_pos: int) -> Iterator[None]:
    """Let the block's MLP compute these rows only, and give zeros for the others.

    Raises:
        BlockError: the block has no MLP that treats each row by itself, or all rows are
            of interest.
    """

    def keep_rows(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Tensor], dict[str, object]]:
        match args:
            case (Tensor() as stream,) if not kwargs and stream.ndim == 3:
                if stream.shape[1] == n_pos:
                    return (stream[:, rows],), {}
        raise BlockError("the MLP's input is not all rows, alone")

    def put_back(_: nn.Module, __: tuple[object, ...], output: object) -> Tensor:
        if not isinstance(output, Tensor):
            raise BlockError("the MLP gives more than its rows")
        index = torch.tensor(rows, device=output.device)
        zeros = output.new_zeros(len(output), n_pos, output.shape[-1])
        return zeros.index_copy(1, index, output)

    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module) or len(rows) == n_pos:
        raise BlockError("there is no MLP, or no row without interest")
    with shared_changes(
        mlp.register_forward_pre_hook(keep_rows, with_kwargs=True, prepend=True),
        mlp.register_forward_hook(put_back),
    ):
        yield
