"""The coupling of frozen Jacobians beside that of the blocks' own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.comparisons.pairs import depth_maps
from tl_coupling.jacobians import (
    AnyFunction,
    Connection,
    JacobianOptions,
    chosen_layers,
    decompose_each,
)
from tl_coupling.measures import Orientation, nan_where_zero
from tl_coupling.progress import Progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import fitting_k

if TYPE_CHECKING:
    import pandas


@made_by("comparisons.frozen_coupling(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class FrozenCoupling(Saved):
    """Coupling across depth of the blocks, and of the blocks with coefficients frozen.

    Attributes:
        matrices: A of every pair of layers, of J and of J⁺, `[2 n_layers n_layers k k]`.
        singular_values: of each J and each J⁺, `[2 n_layers k]`.
        frobenius_norms: of each J and each J⁺, `[2 n_layers]`.
        differences: `‖J − J⁺‖ / ‖J‖` of each layer, in the Frobenius norm; NaN, with a
            warning, where J is zero.
        layers: the layers that were compared.
        position: the token.
        d_model: size of the Jacobians.
        orientation: "ujv" or "vju".
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.comparisons.frozen_coupling(trace, k=4)
        >>> result.full.coupling(2).shape, result.frozen.coupling(2).shape
        (torch.Size([2, 2]), torch.Size([2, 2]))
        >>> path = result.save("frozen.nc")
        >>> tlc.comparisons.FrozenCoupling.load(path).layers
        (0, 1)
    """

    matrices: Float[Tensor, "2 n_layers n_layers k k"]
    singular_values: Float[Tensor, "2 n_layers k"]
    frobenius_norms: Float[Tensor, "2 n_layers"]
    differences: Float[Tensor, " n_layers"]
    layers: tuple[int, ...]
    position: int
    d_model: Count
    orientation: Orientation
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "matrices": "function row col i j",
        "singular_values": "function row i",
        "frobenius_norms": "function row",
        "differences": "row",
        "layers": "row",
    }

    @property
    def full(self) -> CouplingMap:
        """The map of the blocks' own Jacobians, as `depth_coupling` gives it."""
        return self._map(0, self.provenance)

    @property
    def frozen(self) -> CouplingMap:
        """The map of their frozen Jacobians."""
        return self._map(1, {**self.provenance, "function": "frozen"})

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each pair of layers, at the largest k.

        `difference` is that of the layer of the Jacobian.

        Example:
            >>> table = tlc.comparisons.frozen_coupling(trace, k=4).to_dataframe()
            >>> list(table)[:4], len(table)
            (['row_layer', 'col_layer', 'full', 'frozen'], 4)
        """
        columns = {
            "full": ("row_layer col_layer", self.full.coupling()),
            "frozen": ("row_layer col_layer", self.frozen.coupling()),
            "null": ("", torch.tensor(self.full.null())),
            "difference": ("row_layer", self.differences),
        }
        axes = {"row_layer": self.layers, "col_layer": self.layers}
        return tidy_table(columns, axes, self.provenance)

    def _map(self, i: int, provenance: dict[str, Any]) -> CouplingMap:
        positions = (self.position,) * len(self.layers)
        return CouplingMap(
            matrices=self.matrices[i],
            singular_values=self.singular_values[i],
            frobenius_norms=self.frobenius_norms[i],
            d_model=self.d_model,
            row_layers=self.layers,
            col_layers=self.layers,
            row_positions=positions,
            col_positions=positions,
            kind="depth",
            orientation=self.orientation,
            provenance=provenance,
        )

    def _summary(self) -> str:
        k = self.matrices.shape[-1]
        full, frozen = self.full, self.frozen
        has_other_pairs = len(self.layers) > 1
        return (
            f"{len(self.layers)} layers, {self.orientation}, k≤{k}; "
            f"at k={k}: mean coupling {full.mean(off_diagonal=has_other_pairs):.3f}, "
            f"null {full.null():.3f}, "
            f"frozen {frozen.mean(off_diagonal=has_other_pairs):.3f}, "
            f"null {frozen.null():.3f}; mean ‖J − J⁺‖/‖J‖ {self.differences.mean():.3f}"
        )


@checked
def frozen_coupling(
    trace: Trace,
    k: int | None = None,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> FrozenCoupling:
    r"""Coupling across depth with norms, attention patterns and gates held constant.

    J of every layer at one token and its frozen J⁺ (`dynamics.frozen_jacobian`), each
    coupled with those of the other layers, and how far the two are apart,

    .. math:: \|J^l - J^{+l}\|_F / \|J^l\|_F

    Coupling that J⁺ has too is one of the linear maps that the blocks apply; what only
    J has comes from how these maps change with the stream.

    Args:
        trace, k, position, orientation, layers, chunk_size, progress: as in
            `depth_coupling`, with the same errors and warnings. A bar for J, and one
            for J⁺.

    Returns:
        a `FrozenCoupling`: `full` and `frozen` are maps as `depth_coupling` gives them,
        each with its null, and `differences` is by layer.

    Raises:
        DerivativeError: a block has no frozen Jacobian, as `dynamics.frozen_jacobian`
            says.

    Cost: about twice that of `depth_coupling`; memory for `2 L d²` numbers.

    Example:
        >>> result = tlc.comparisons.frozen_coupling(trace, k=4)
        >>> bool((result.differences > 0).all())
        True
    """
    t = trace.position_index(position)
    connections = [Connection(layer, t, t, t) for layer in chosen_layers(trace, layers)]
    k = fitting_k(k, trace.d_model)
    # Without the norms of blocks that normalise the stream, as in `depth_coupling`.
    functions: tuple[AnyFunction, ...] = ("branches", "frozen")
    options = JacobianOptions(chunk_size=chunk_size, progress=progress)
    wanted = [(trace, connections)]
    full, frozen = [
        decomposed
        for function in functions
        for decomposed in decompose_each(wanted, k, options, function=function)
    ]
    # Each map compares Jacobians of its own kind: J with J, and J⁺ with J⁺.
    maps = [depth_maps(each, (orientation,))[orientation] for each in (full, frozen)]
    differences = [
        torch.linalg.matrix_norm(full.jacobian(i) - frozen.jacobian(i))
        for i in range(len(connections))
    ]
    sizes = nan_where_zero(full.frobenius_norms, "‖J‖_F")
    return FrozenCoupling(
        matrices=torch.stack([each.matrices for each in maps]),
        singular_values=torch.stack([each.singular_values for each in maps]),
        frobenius_norms=torch.stack([each.frobenius_norms for each in maps]),
        differences=torch.stack(differences) / sizes,
        layers=maps[0].row_layers,
        # A result counts tokens from 0, where the caller may have counted from the end.
        position=t,
        d_model=trace.d_model,
        orientation=orientation,
        provenance=maps[0].provenance | {"frozen_paths": maps[1].provenance["paths"]},
    )
