"""Which heads of different layers share axes: every head coupled with every other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by, warn_caller
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import block_parts, chosen_layers
from tl_coupling.measures import (
    Orientation,
    normalized_miscoupling,
    random_rotations,
    random_subspace_null,
    seeded,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import RANDOM_AXES, Saved, ShortTable

if TYPE_CHECKING:
    import pandas

# Singular values below are those of directions that a head does not have.
_RANK_TOLERANCE = 1e-5
# How many of the most coupled pairs a short table names.
_N_PAIRS_SHOWN = 5


class HeadPair(NamedTuple):
    """Two heads of different layers.

    Attributes:
        jacobian_of, vectors_of: their labels: whose J, whose singular vectors.
        coupling: of the one in the singular vectors of the other.
    """

    jacobian_of: str
    vectors_of: str
    coupling: float


@made_by("comparisons.head_coupling(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class HeadCoupling(Saved):
    """The coupling of every head with every head, at one token.

    Attributes:
        coupling: `1 − m̃` of the head whose Jacobian it is (rows) in the singular
            vectors of another (columns).
        null_coupling: the same in random singular vectors, as many draws as there are
            heads: as many chances for a large value as the heads have.
        labels: of the heads, as TransformerLens has them: "L9H3".
        layers: of each head.
        position: the token.
        k: how many singular vectors.
        orientation: "ujv" or "vju".
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.comparisons.head_coupling(trace, k=4)
        >>> result.coupling.shape, result.labels[:2]
        (torch.Size([8, 8]), ('L0H0', 'L0H1'))
    """

    coupling: Float[Tensor, "n_heads n_heads"]
    null_coupling: Float[Tensor, "n_heads n_draws"]
    labels: tuple[str, ...]
    layers: tuple[int, ...]
    position: int
    k: Count
    orientation: Orientation
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "coupling": "row col",
        "null_coupling": "row draw",
        "labels": "row",
        "layers": "row",
    }

    @property
    def null(self) -> float:
        """What random singular vectors give (root mean square of m̃)."""
        return float(random_subspace_null(self.k))

    @property
    def largest_of_null(self) -> float:
        """The largest coupling of a head in random singular vectors; NaN if none has one."""
        # A head that adds nothing has no coupling: NaN would be the largest.
        defined = self.null_coupling[~self.null_coupling.isnan()]
        return float(defined.max()) if len(defined) else math.nan

    @property
    def of_different_layers(self) -> Float[Tensor, " n_pairs"]:
        """The coupling of all pairs of heads of different layers."""
        return self.coupling[self._different_layers()]

    @property
    def share_above_null(self) -> float:
        """The share of pairs of different layers that lie above `largest_of_null`.

        Of pairs that have a coupling; NaN where none has one, or no null is known.
        """
        values = self.of_different_layers
        defined = values[~values.isnan()]
        largest = self.largest_of_null
        # Above NaN there is nothing, which is not known to be so.
        if math.isnan(largest):
            return math.nan
        return float((defined > largest).double().mean())

    @checked
    def strongest(self, n: Count = 10) -> list[HeadPair]:
        """Return the n pairs of different layers that are coupled most.

        Example:
            >>> pairs = tlc.comparisons.head_coupling(trace, k=4).strongest(3)
            >>> [pair.coupling for pair in pairs] == sorted(
            ...     [pair.coupling for pair in pairs], reverse=True
            ... )
            True
        """
        # Below any coupling, so that pairs of one layer are never among the n.
        values = self.coupling.nan_to_num(0).where(self._different_layers(), -1.0)
        n_pairs = int((values > 0).sum())
        places = values.flatten().topk(min(n, n_pairs)).indices.tolist()
        pairs = [divmod(place, len(self.labels)) for place in places]
        return [
            HeadPair(self.labels[row], self.labels[col], float(values[row, col]))
            for row, col in pairs
        ]

    def by_layer(self) -> Float[Tensor, "n_layers n_layers"]:
        """Return the largest coupling of a head of each layer with one of each other.

        NaN for a layer with itself; layers in the order of `layers`.
        """
        # `max` over a layer would be NaN where one head of it has no coupling.
        values = self.coupling.nan_to_num(0)
        # Each layer once, in order: `layers` has an entry for each head.
        names = list(dict.fromkeys(self.layers))
        layer_of_head = torch.tensor(self.layers, device=values.device)
        result = values.new_full((len(names), len(names)), torch.nan)
        for row, layer in enumerate(names):
            for col, other in enumerate(names):
                if layer != other:
                    result[row, col] = values[layer_of_head == layer][
                        :, layer_of_head == other
                    ].max()
        return result

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a table with a row for each pair of heads of different layers.

        Columns are `jacobian_of`, `vectors_of` and `coupling`.
        """
        import pandas

        rows, cols = self._different_layers().nonzero(as_tuple=True)
        return pandas.DataFrame(
            {
                "jacobian_of": [self.labels[row] for row in rows.tolist()],
                "vectors_of": [self.labels[col] for col in cols.tolist()],
                "coupling": self.coupling[rows, cols].tolist(),
            }
        )

    def table(self) -> ShortTable:
        """Return the coupling of heads of different layers, beside that of random axes."""
        coupling = self.of_different_layers
        row = [
            f"{float(coupling.nanmean()):.3f}",
            f"{self.null:.3f}",
            # A head that adds nothing has no coupling (NaN), and is not the largest.
            f"{float(coupling.nan_to_num(0).max()):.3f}",
            f"{self.largest_of_null:.3f}",
            f"{self.share_above_null:.2%}",
        ]
        strongest = ", ".join(
            f"{pair.jacobian_of} in {pair.vectors_of} {pair.coupling:.2f}"
            for pair in self.strongest(_N_PAIRS_SHOWN)
        )
        numbers = ["mean", "null", "largest", f"largest of {RANDOM_AXES}", "above that"]
        caption = f"pairs of heads of different layers\nmost coupled: {strongest}"
        title = f"{self.provenance['model']}: heads with heads, k = {self.k}"
        return ShortTable.of(title, [], numbers, [row], caption)

    def _different_layers(self) -> Bool[Tensor, "n_heads n_heads"]:
        layers = torch.tensor(self.layers, device=self.coupling.device)
        return layers[:, None] != layers

    def _summary(self) -> str:
        size = f"{len(self.labels)} heads, k={self.k}"
        if not bool(self._different_layers().any()):
            return size
        mean = float(self.of_different_layers.nanmean())
        return (
            f"{size}; mean {mean:.3f} (null {self.null:.3f}), "
            f"{self.share_above_null:.1%} of pairs above all random ones"
        )


class _Factored(NamedTuple):
    """The singular value decompositions of heads, without what is 0."""

    U: Float[Tensor, "n_heads d_model rank"]
    S: Float[Tensor, "n_heads rank"]
    V: Float[Tensor, "n_heads d_model rank"]


@checked
def head_coupling(
    trace: Trace,
    k: Count = 10,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> HeadCoupling:
    """Couple every head with every head: which heads of different layers share axes.

    `1 − m̃` of `A = U_{2,k}ᵀ J_1 V_{2,k}`, with J_1 the derivative of what one head adds
    and U_2, V_2 the top singular vectors of another head's. Numbers of heads mean
    nothing across layers, so all are compared with all.

    Args:
        trace: a traced prompt.
        k: how many top singular vectors; at most the rank of a head, d_head. A head
            that hardly looks at the token itself may have fewer.
        position: the token; the last by default.
        orientation: as in `depth_coupling`.
        layers: the blocks; all by default.
        seed: of the random singular vectors.
        progress: as in `depth_coupling`.

    Raises:
        ValueError: k above the rank of every head, a layer or a position out of range,
            a block without parts that can be told apart.

    Warns of heads with fewer than k singular values (NaN in their columns).

    Cost: as `block_parts` of every layer and an SVD of every head; then about `2 n_heads²
    k rank d_model` flops, twice: half a minute of one core for the 270 heads of
    SmolLM2-135M-Instruct.

    Example:
        >>> result = tlc.comparisons.head_coupling(trace, k=4)
        >>> result.strongest(1)[0].jacobian_of in result.labels
        True
    """
    t = trace.position_index(position)
    selected_layers = chosen_layers(trace, layers)
    labels: list[str] = []
    layer_of_head: list[int] = []
    decomposed: list[_Factored] = []
    for layer in with_progress(selected_layers, progress, "heads of blocks"):
        # As in `depth_coupling`: without the norms that a block applies to the stream.
        parts = block_parts(trace, layer, t, function="branches")
        attention_labels = [
            label for label in parts.labels if _is_attention(label, layer)
        ]
        labels += attention_labels
        layer_of_head += [layer] * len(attention_labels)
        J = torch.stack([parts[label] for label in attention_labels])
        decomposed.append(_factored(J))
    heads = _heads_of_all_layers(decomposed)
    has_vectors = _have_enough(heads, k, labels)
    # `vju` puts the right vectors of J_2 on the left of J_1.
    if orientation == "vju":
        frames = (heads.V[..., :k], heads.U[..., :k])
    else:
        frames = (heads.U[..., :k], heads.V[..., :k])
    n_heads, d_model, _ = heads.U.shape
    generator = seeded(seed)
    # As many frames as there are heads: see `null_coupling`.
    random_frames = random_rotations(
        2, n_heads, d_model, columns=k, generator=generator
    ).to(heads.U)
    coupling = _coupling(heads, *frames).where(has_vectors, torch.nan)
    return HeadCoupling(
        coupling=coupling.cpu(),
        null_coupling=_coupling(heads, *random_frames).cpu(),
        labels=tuple(labels),
        layers=tuple(layer_of_head),
        position=t,
        k=k,
        orientation=orientation,
        provenance=trace.provenance | {"seed": seed},
    )


def _is_attention(label: str, layer: int) -> bool:
    return label.startswith(f"L{layer}H") or label == f"{layer}_attn_out"


def _factored(J: Float[Tensor, "n_heads d d"]) -> _Factored:
    """Decompose the heads of one layer."""
    U, S, Vh = torch.linalg.svd(J)
    # A head that is 0 has 0 / 0 here, and so no direction.
    is_there = S / S[:, :1] > _RANK_TOLERANCE
    # One column stays where all heads of a layer are 0.
    rank = max(1, int(is_there.sum(-1).max()))
    return _Factored(
        U[..., :rank], (S * is_there)[..., :rank], Vh[:, :rank].mT.contiguous()
    )


def _heads_of_all_layers(parts: Sequence[_Factored]) -> _Factored:
    """Return the heads of all layers, all with as many singular values as the most."""
    most = max(part.S.shape[-1] for part in parts)

    def padded(X: Tensor) -> Tensor:
        # Zeros add nothing to A, and are not counted as rank.
        return torch.nn.functional.pad(X, (0, most - X.shape[-1]))

    U, S, V = (
        torch.cat([padded(X) for X in layer_factors])
        for layer_factors in zip(*parts, strict=True)
    )
    return _Factored(U, S, V)


def _have_enough(
    heads: _Factored, k: int, labels: Sequence[str]
) -> Bool[Tensor, " n_heads"]:
    """Say which heads have k singular vectors; warn of the others, or raise."""
    ranks = (heads.S > 0).sum(-1)
    most = int(ranks.max())
    if k > most:
        raise ValueError(f"`k` must be at most the rank of a head, {most}, got {k}")
    has_vectors = ranks >= k
    if not bool(has_vectors.all()):
        lacking = [
            f"{label} has {rank}"
            for label, rank in zip(labels, ranks.tolist(), strict=True)
            if rank < k
        ]
        shown = ", ".join(lacking[:3]) + ", …" * (len(lacking) > 3)
        warn_caller(
            f"{len(lacking)} of {len(labels)} heads have fewer than k = {k} singular "
            f"values above {_RANK_TOLERANCE:g} of their largest ({shown}): in their "
            "singular vectors coupling is undefined (NaN)"
        )
    return has_vectors


def _coupling(
    heads: _Factored,
    U_2: Float[Tensor, "n_frames d k"],
    V_2: Float[Tensor, "n_frames d k"],
) -> Float[Tensor, "n_heads n_frames"]:
    """Return the coupling of every head in every pair of frames."""
    n_frames = len(U_2)
    U_all = rearrange(U_2, "frame d k -> d (frame k)")
    V_all = rearrange(V_2, "frame d k -> d (frame k)")
    rows = []
    # `A = (U_2ᵀ U) S (Vᵀ V_2)` through the head's rank: J is never formed again.
    for U, S, V in zip(*heads, strict=True):
        left = rearrange(S[:, None] * (U.mT @ U_all), "r (f k) -> f r k", f=n_frames)
        right = rearrange(V.mT @ V_all, "r (f k) -> f r k", f=n_frames)
        A = einsum(left, right, "f r i, f r j -> f i j")
        # A head that is 0 is NaN here without the warning that the measure gives.
        if bool((S == 0).all()):
            rows.append(A.new_full((n_frames,), torch.nan))
        else:
            rows.append(1 - normalized_miscoupling(A))
    return torch.stack(rows)
