"""Residual alignment: four properties of residual networks trained to classify.

Li and Papyan (2023) find them:

* RA1, one input's representations lie equally spaced on a line: `line_shape_score` is 1
  and `equidistance` 0.
* RA2, the top left and right singular vectors of the blocks' Jacobians align with each
  other, within a block and across blocks: `vector_alignment` and `subspace_overlap` (in
  `tlc.measures`) are 1.
* RA3, the Jacobians have rank at most the number of classes: `tail_energy` (in
  `tlc.spectra`) is 0.
* RA4, the top singular values fall as one over depth: the lines of
  `inverse_singular_value_fit` fit, and rise.

Blocks have all four exactly if `J^l = U S_l Uᵀ` with `σ_i^l = 1 / (c_i + l)` at layer
l = 0, 1, …, for at most C directions i. Then `x^l` is linear in l, so that `c_i = L /
(g_i − 1)` if the stream grows by a factor of `g_i` along direction i: σ falls along the
depth of one network, and as 1/L among networks of L layers that grow alike.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Count, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import Connection, JacobianOptions, decompose
from tl_coupling.measures import (
    alignment_matrices,
    subspace_overlap,
    vector_alignment,
)
from tl_coupling.progress import Progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.spectra import (
    DEFAULT_K,
    InverseSingularValueFit,
    check_cut,
    check_k,
    inverse_singular_value_fit,
    tail_energy,
)
from tl_coupling.trajectories import shapes

if TYPE_CHECKING:
    import pandas

AlignmentMeasure = Literal["vector_alignment", "subspace_overlap"]


@made_by("trajectories.residual_alignment(trace, n_classes=…)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class ResidualAlignment(Saved):
    """Hold Li and Papyan's four measures of one token.

    `residual_alignment` makes it.

    Attributes:
        line_shape_score: of the token's path `x^0, …, x^L` (RA1); 1 for steps on a
            line.
        equidistance: of the same path (RA1); 0 for equal steps.
        uv: `alignment_matrices` of the top k left with the top k right singular vectors
            of its Jacobians (RA2). A smaller k is a corner.
        uu: the same of left with left.
        vv: the same of right with right.
        singular_values: all of every Jacobian's, largest first.
        n_classes: C, the rank that RA3 allows.
        position: the token.
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.trajectories.residual_alignment(trace, n_classes=4)
        >>> result.across_blocks("subspace_overlap").shape, result.tail_energy.shape
        (torch.Size([2, 2]), torch.Size([2]))
    """

    line_shape_score: float
    equidistance: float
    uv: Float[Tensor, "n_layers n_layers k k"]
    uu: Float[Tensor, "n_layers n_layers k k"]
    vv: Float[Tensor, "n_layers n_layers k k"]
    singular_values: Float[Tensor, "n_layers d_model"]
    n_classes: Count
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        **dict.fromkeys(("uv", "uu", "vv"), "layer other_layer i j"),
        "singular_values": "layer n_singular",
    }

    @property
    def k(self) -> int:
        """How many singular vectors are compared."""
        return self.uv.shape[-1]

    @checked
    def within_blocks(
        self, measure: AlignmentMeasure = "vector_alignment"
    ) -> Float[Tensor, " n_layers"]:
        """Return RA2 within blocks: how far left and right vectors of a block agree."""
        return _measured(self.uv, measure).diagonal()

    @checked
    def across_blocks(
        self, measure: AlignmentMeasure = "vector_alignment"
    ) -> Float[Tensor, "n_layers n_layers"]:
        """Return RA2 across blocks: how far the vectors of two blocks agree.

        This is the mean of left with left and right with right.
        """
        return (_measured(self.uu, measure) + _measured(self.vv, measure)) / 2

    @checked
    def null(self, measure: AlignmentMeasure = "vector_alignment") -> float:
        """Return what independent random singular vectors give, within and across.

        It is `1/d_model`, or `k/d_model` for the overlap of subspaces.
        """
        d_model = self.singular_values.shape[1]
        if measure == "subspace_overlap":
            return self.k / d_model
        return 1 / d_model

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each pair of layers, in each order.

        Columns are RA2 of the two and of the first alone, `within_…`, with what random
        vectors give, and its RA3.

        Example:
            >>> result = tlc.trajectories.residual_alignment(trace, n_classes=4)
            >>> table = result.to_dataframe()
            >>> list(table)[:3], len(table)
            (['layer', 'other_layer', 'vector_alignment'], 4)
        """
        columns: dict[str, tuple[str, Tensor]] = {}
        for measure in get_args(AlignmentMeasure):
            columns[measure] = ("layer other_layer", self.across_blocks(measure))
            columns[f"within_{measure}"] = ("layer", self.within_blocks(measure))
            columns[f"{measure}_null"] = ("", torch.tensor(self.null(measure)))
        columns["tail_energy"] = ("layer", self.tail_energy)
        return tidy_table(columns, {}, self.provenance)

    @property
    def tail_energy(self) -> Float[Tensor, " n_layers"]:
        """RA3: share of a Jacobian's energy beyond `n_classes` singular values."""
        return tail_energy(self.singular_values, self.n_classes)

    @property
    def inverse_fit(self) -> InverseSingularValueFit:
        """RA4: the line through `1/σ_i` against layer, for each of the top k."""
        # Below the k-th they may be 0, and have no inverse.
        return inverse_singular_value_fit(self.singular_values[:, : self.k])

    def summary(self) -> dict[str, float]:
        """Return one or two numbers for each property, by name.

        They are means over blocks, over pairs of different blocks, or over the top k.
        """
        fit = self.inverse_fit
        # A block always agrees with itself, and is no pair of blocks.
        across_alignment = self.across_blocks()
        is_own = torch.eye(
            len(across_alignment), dtype=torch.bool, device=across_alignment.device
        )
        block_values = {
            "vector_alignment_within_blocks": self.within_blocks(),
            "vector_alignment_across_blocks": across_alignment[~is_own],
            "tail_energy": self.tail_energy,
            "inverse_singular_value_slope": fit.slope,
            "inverse_singular_value_r_squared": fit.r_squared,
        }
        means = {name: float(values.mean()) for name, values in block_values.items()}
        return {
            "line_shape_score": self.line_shape_score,
            "equidistance": self.equidistance,
            **means,
        }

    def _summary(self) -> str:
        values = ", ".join(
            f"{name}={value:.3f}" for name, value in self.summary().items()
        )
        return (
            f"position={self.position}, n_classes={self.n_classes}, k={self.k}: "
            f"{values}; null of alignment {self.null():.3f}"
        )


def _measured(cosines: Tensor, measure: AlignmentMeasure) -> Tensor:
    """Return a measure of every matrix of cosines."""
    if measure == "subspace_overlap":
        return subspace_overlap(cosines)
    return vector_alignment(cosines)


@checked
def residual_alignment(
    trace: Trace,
    n_classes: Count,
    position: int = -1,
    *,
    k: Count | None = None,
    chunk_size: Count | None = None,
    progress: Progress | None = None,
) -> ResidualAlignment:
    """Measure the residual alignment of one token: Li and Papyan's (2023) RA1 to RA4.

    * RA1, equal steps on a line: `line_shape_score` and `equidistance`.
    * RA2, left and right singular vectors that align within a block and across blocks:
      `within_blocks()` and `across_blocks()`, to be compared with `null()`, by
      `vector_alignment` or `subspace_overlap`.
    * RA3, rank at most C: `tail_energy`. They find it in fully connected networks; for
      `d_model` classes or more it is 0 by itself.
    * RA4, singular values that fall as one over depth: `inverse_fit`, which has high R²
      and positive slope.

    Their networks have one representation for each input; here it is that of one token,
    and J is `J^l_{tt}`, with the other tokens held fixed.

    Args:
        trace: a traced prompt.
        n_classes: C, how many classes the model tells apart.
        position: the token; the last by default. A vision transformer's class token is
            the first, 0.
        k: how many top singular vectors are compared; C by default, or less: at most 50
            and `d_model`.
        chunk_size: as in `block_jacobian`.
        progress: wraps the loop over Jacobians; `None`: a bar in a terminal or
            notebook, `False`: none.

    Raises:
        ValueError: a position or k out of range, or a model of one block.

    Warns where σ_k and σ_{k+1} are equal to rounding, so that the k-th vectors are
    arbitrary, and where a measure is undefined (NaN).

    Cost: a Jacobian and its full SVD for each layer; memory for all of them, and for
    `3 n_layers² k²` cosines.

    Example:
        >>> result = tlc.trajectories.residual_alignment(trace, n_classes=4)
        >>> result.uv.shape, result.within_blocks().shape, result.null()
        (torch.Size([2, 2, 4, 4]), torch.Size([2]), 0.03125)
    """
    t = trace.position_index(position)
    # One block has no pair, and no line through its singular values.
    if trace.n_layers < 2:
        raise ValueError(
            "alignment across blocks takes at least 2 of them, "
            f"this model has {trace.n_layers}"
        )
    # RA3 allows C directions: beyond them there should be nothing to align.
    if k is None:
        k = min(n_classes, DEFAULT_K, trace.d_model)
    check_k(k, trace.d_model)
    connections = [Connection(layer, t, t, t) for layer in range(trace.n_layers)]
    options = JacobianOptions(chunk_size=chunk_size, progress=progress)
    # All of every spectrum: the third property is about its tail.
    decomposed = decompose(trace, connections, trace.d_model, options)
    spectra = decomposed.spectra
    check_cut(spectra.S, k, [str(connection) for connection in connections])
    # The path of the one token, `[n_layers + 1, d_model]`.
    x = trace.residual[:, t]
    return ResidualAlignment(
        line_shape_score=float(shapes.line_shape_score(x)),
        equidistance=float(shapes.equidistance(x)),
        uv=alignment_matrices(spectra, k, "uv"),
        uu=alignment_matrices(spectra, k, "uu"),
        vv=alignment_matrices(spectra, k, "vv"),
        singular_values=spectra.S,
        n_classes=n_classes,
        position=t,
        provenance=trace.provenance | {"position": t, "paths": decomposed.paths},
    )
