"""Directions that a block reads and writes, with the hook points where they live."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.jacobians.budget import JacobianOptions
from tl_coupling.jacobians.connections import Connection
from tl_coupling.jacobians.decomposed import decompose
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import check_k

if TYPE_CHECKING:
    import pandas


@made_by("jacobians.block_directions(trace, layer)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class BlockDirections(Saved):
    """The top k singular vectors of one block's Jacobian, by what they do.

    Attributes:
        read: what the block reads, V, as columns `[d_model k]`, orthonormal.
        write: what it writes, U, as columns `[d_model k]`, orthonormal.
        gains: the singular values, `[k]`: `J @ read[:, i]` is `gains[i] * write[:, i]`.
        layer, position: of the Jacobian, counted from 0.
        read_hook_point: where the `read` directions are in the stream, a hook point of
            TransformerLens.
        write_hook_point: where the `write` directions have been added to the stream.
        provenance: how it was made; JSON-able.

    Example:
        >>> directions = tlc.jacobians.block_directions(trace, layer=1, k=4)
        >>> directions.read_hook_point, directions.write_hook_point
        ('blocks.1.hook_resid_pre', 'blocks.1.hook_resid_post')
        >>> directions.read.shape, directions.gains.shape
        (torch.Size([32, 4]), torch.Size([4]))
    """

    read: Float[Tensor, "d_model k"]
    write: Float[Tensor, "d_model k"]
    gains: Float[Tensor, " k"]
    layer: int
    position: int
    read_hook_point: str
    write_hook_point: str
    provenance: dict[str, Any]
    DIMS: ClassVar = {"read": "d_model i", "write": "d_model i", "gains": "i"}

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each direction and entry of the stream.

        Example:
            >>> table = tlc.jacobians.block_directions(trace, 1, k=4).to_dataframe()
            >>> list(table)[:5], len(table)
            (['direction', 'd_model', 'gain', 'read', 'write'], 128)
        """
        columns = {
            "gain": ("direction", self.gains),
            "read": ("direction d_model", self.read.mT),
            "write": ("direction d_model", self.write.mT),
        }
        return tidy_table(columns, {}, self.provenance)

    def _summary(self) -> str:
        return (
            f"layer {self.layer}, token {self.position}, k={len(self.gains)}: "
            f"read at {self.read_hook_point}, write at {self.write_hook_point}"
        )


@checked
def block_directions(
    trace: Trace,
    layer: int,
    k: Count = 10,
    position: int = -1,
    *,
    chunk_size: Count | None = None,
) -> BlockDirections:
    r"""Return what a block reads and writes most, with TransformerLens's hook points.

    .. math:: J^l_{tt} \approx \sum_{i=1}^k \sigma_i \, w_i \, r_i^\top

    with `r_i`, `read`, in the stream before the block, and `w_i`, `write`, in what the
    block adds to it. TransformerLens multiplies rows, `x @ A @ B`, and there `V` is the
    write side; `read` and `write` mean the same in both conventions. The sign of a pair
    `(r_i, w_i)` is arbitrary. Of a block that normalises the stream itself (post-norm:
    BERT), J is that of its branches before the norms, as in `depth_coupling`, and
    `write` goes through the norm before it reaches the hook point.

    Args:
        trace: a traced prompt.
        layer: the block.
        k: how many directions, of the largest gains.
        position: the token; the last by default.
        chunk_size: as in `block_jacobian`.

    Raises:
        ValueError: a layer, position or k out of range.

    Cost: one Jacobian, and its singular vectors.

    Example:
        >>> directions = tlc.jacobians.block_directions(trace, layer=0, k=2)
        >>> J = tlc.block_jacobian(trace, layer=0)
        >>> torch.allclose(J @ directions.read, directions.write * directions.gains, atol=1e-5)
        True
    """
    check_k(k, trace.d_model)
    t = trace.position_index(position)
    connection = Connection(trace.layer_index(layer), t, t, t)
    # One Jacobian: there is nothing to wait for.
    options = JacobianOptions(chunk_size, None, progress=False)
    decomposed = decompose(trace, [connection], k, options)
    spectrum = decomposed.leading[0]
    return BlockDirections(
        read=spectrum.read,
        write=spectrum.write,
        gains=spectrum.S,
        layer=connection.layer,
        position=t,
        read_hook_point=connection.read_hook_point,
        write_hook_point=connection.write_hook_point,
        provenance={**trace.provenance, "paths": decomposed.paths},
    )
