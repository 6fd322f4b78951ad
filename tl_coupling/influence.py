"""How strongly, and through how many directions, each token moves what a block writes
at one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.comparisons import free_end
from tl_coupling.jacobians import (
    Connection,
    Jacobian,
    JacobianOptions,
    chosen_layers,
    jacobians_in_turns,
)
from tl_coupling.progress import Progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import (
    SimilarRanks,
    effective_rank,
    parallel_map,
    participation_ratio,
)

if TYPE_CHECKING:
    import pandas

__all__ = ["Influence", "cross_token_influence"]
__dir__ = __all__.copy

InfluenceMeasure = Literal[
    "frobenius_norm", "largest_singular_value", "participation_ratio", "effective_rank"
]
INFLUENCE_MEASURES: tuple[InfluenceMeasure, ...] = get_args(InfluenceMeasure)


@made_by("cross_token_influence(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Influence(Saved):
    """Sizes and ranks of `J^l_{t1 t2}` for one output token t2.

    They are of every token t1 that acts on it, and of every layer l. The skip
    connection is left out, for t1 = t2 as well. Rows are `layers`, columns
    `source_positions`.

    Attributes:
        frobenius_norm: `‖J‖_F = √Σσ²`, a gain over all input directions.
        largest_singular_value: σ₁, the largest gain of any direction.
        participation_ratio, effective_rank: how many directions carry the gain; see the
            functions of these names.
        layers, source_positions: what rows and columns are.
        output_position: t2.
        provenance: how it was made; JSON-able.

    Example:
        >>> influence = tlc.cross_token_influence(trace, -1, layers=[1])
        >>> path = influence.save("influence.nc")
        >>> tlc.influence.Influence.load(path).layers
        (1,)
    """

    frobenius_norm: Float[Tensor, "n_layers n_sources"]
    largest_singular_value: Float[Tensor, "n_layers n_sources"]
    participation_ratio: Float[Tensor, "n_layers n_sources"]
    effective_rank: Float[Tensor, "n_layers n_sources"]
    layers: tuple[int, ...]
    source_positions: tuple[int, ...]
    output_position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = dict.fromkeys(INFLUENCE_MEASURES, "layer source_position")
    DIMS |= {"layers": "layer", "source_positions": "source_position"}

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each layer and source token.

        Example:
            >>> table = tlc.cross_token_influence(trace, 3).to_dataframe()
            >>> list(table)[:3], len(table)
            (['layer', 'source_position', 'frobenius_norm'], 8)
        """
        columns: dict[str, tuple[str, Tensor]] = {
            name: ("layer source_position", getattr(self, name))
            for name in INFLUENCE_MEASURES
        }
        axes = {"layer": self.layers, "source_position": self.source_positions}
        return tidy_table(columns, axes, self.provenance)

    def _summary(self) -> str:
        n_layers, n_sources = self.frobenius_norm.shape
        mean = float(self.frobenius_norm.mean())
        return (
            f"{n_sources} source tokens on token {self.output_position} "
            f"at {n_layers} layers; mean Frobenius norm {mean:.3g}"
        )


@checked
def cross_token_influence(
    trace: Trace,
    output_position: int = -1,
    *,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Influence:
    """Measure what moving each token t1 does to a block's output at one token t2.

    It is the size and rank of `J^l_{t1 t2}`, for every layer l. In a causal model t1 is
    every token up to t2; those of the others are zero.

    Args:
        trace: a traced prompt.
        output_position: t2; the last token by default.
        layers: a selection of layers, in this order; all by default.
        progress: as in `depth_coupling`.

    A fork of the authors' code takes I from the Jacobian of every pair of tokens, also
    where there is no skip connection, and calls `(Σσ)²/Σσ²` the participation ratio:
    its numbers are others.

    Raises:
        ValueError: a layer or position out of range, or an empty selection.

    Warns where a Jacobian is exactly zero: it has no rank (NaN).

    Cost: for each layer and source a Jacobian, and all its singular values. Where
    grouped queries leave these Jacobians a low rank, the values are read off a sketch
    of it, which holds each Jacobian to the rounding of float32.

    Example:
        >>> influence = tlc.cross_token_influence(trace, output_position=3)
        >>> influence.frobenius_norm.shape, influence.source_positions
        (torch.Size([2, 4]), (0, 1, 2, 3))
    """
    # Counted from 0 from here on.
    t2 = trace.position_index(output_position, "output_position")
    selected_layers = chosen_layers(trace, layers)
    # In a causal model the tokens up to t2; elsewhere all.
    sources = free_end(trace, "output", t2)
    # Layer by layer: Jacobians of one block, which have about the same rank, come one
    # after the other and can share a sketch.
    connections = [
        Connection(layer, t1, t2, t1) for layer in selected_layers for t1 in sources
    ]
    singular_values = SimilarRanks()

    def decomposed(jacobian: Jacobian) -> tuple[Tensor, str]:
        return singular_values(jacobian.J[None]), jacobian.path

    options = JacobianOptions(progress=progress)
    jacobians = jacobians_in_turns([(trace, connections)], options)
    # The values of one are computed beside the next Jacobian, and one after the other:
    # the rank of one is what is tried for the next.
    device = trace.blocks[0].X.device
    results = parallel_map(decomposed, jacobians, device, n_workers=1)
    values, paths = zip(*results, strict=True)
    paths_by_connection = dict(zip(map(str, connections), paths, strict=True))
    # Singular values alone are kept, `[1 d_model]` of each connection.
    S = rearrange(
        torch.cat(values),
        "(layer source) singular -> layer source singular",
        layer=len(selected_layers),
    )
    return Influence(
        frobenius_norm=S.norm(dim=-1),
        largest_singular_value=S[..., 0],
        participation_ratio=participation_ratio(S),
        effective_rank=effective_rank(S),
        layers=tuple(selected_layers),
        source_positions=tuple(sources),
        output_position=t2,
        provenance=trace.provenance | {"paths": paths_by_connection},
    )
