"""Which heads and MLPs carry coupling: the share that each component of a block's
Jacobian has of its coupling matrices, beside its share of the Jacobian itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.blocks import Components, Trace
from tl_coupling.comparisons.null_means import quantile_interval, sums_of_draws
from tl_coupling.comparisons.pairs import decomposed_layers
from tl_coupling.jacobians import JacobianOptions, MemoryLimit, components_and_path
from tl_coupling.measures import (
    Orientation,
    diagonal_shares,
    energy_shares,
    random_rotations,
    seeded,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import RANDOM_SUBSPACES, Saved, ShortTable
from tl_coupling.statistics import Interval

if TYPE_CHECKING:
    import pandas

PerPair = Float[Tensor, "n_rows n_cols component"]
Share = Literal["excess", "diagonal_share", "energy_share", "jacobian_share"]
# The shares that a short table shows, and how many heads it names.
_SHARES_SHOWN: tuple[Share, ...] = ("diagonal_share", "jacobian_share", "excess")
_N_HEADS_SHOWN = 5
# The order of components, behind the heads.
_BRANCHES = ("attn_out", "mlp_out", "mlp∘attn", "skip")
# The least number of random frames that the null is drawn from if the caller does not
# say how many. There are more where a share varies more, which is where k is small: at
# k = 1 it is a ratio of two numbers, without a mean.
_FEWEST_DRAWS = 200
_DRAWN_COLUMNS = 2000
# Numbers in memory at once.
_MOST_NUMBERS = 2**22


@made_by("carriers(trace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Carriers(Saved):
    """How much of a block's coupling each component of its Jacobian carries.

    Shares are signed, and sum to 1 over the components. A layer that lacks one of the
    components has 0 there.

    Attributes:
        diagonal_share: `⟨diag A_c, diag A⟩ / ‖diag A‖²` of every pair, `[n_rows n_cols
            component]`: rows are the layers of J_1, whose components these are, columns
            those of the singular vectors.
        energy_share: `⟨A_c, A⟩ / ‖A‖²`, the same of all of A.
        jacobian_share: `⟨J_c, J⟩ / ‖J‖²`, the same of J_1 itself, which is what random
            singular vectors would give; it is one for all columns.
        null_share: the diagonal share in random singular vectors, `[n_rows n_draws
            component]`, those of a draw the same for all rows.
        labels: the components: H0, H1, … the heads, mlp_out, and mlp∘attn, the MLP
            acting on attention.
        row_layers, col_layers: the layers.
        position: the token.
        k: how many singular vectors span A.
        orientation: "ujv" or "vju".
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.carriers(trace, k=4)
        >>> round(float(result.mean("diagonal_share").sum()), 3)
        1.0
        >>> tlc.comparisons.Carriers.load(result.save("carriers.nc")).labels[-2:]
        ('mlp_out', 'mlp∘attn')
    """

    diagonal_share: PerPair
    energy_share: PerPair
    jacobian_share: PerPair
    null_share: Float[Tensor, "n_rows n_draws component"]
    labels: tuple[str, ...]
    row_layers: tuple[int, ...]
    col_layers: tuple[int, ...]
    position: int
    k: Count
    orientation: Orientation
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        "diagonal_share": "row col component",
        "energy_share": "row col component",
        "jacobian_share": "row col component",
        "null_share": "row draw component",
        "labels": "component",
        "row_layers": "row",
        "col_layers": "col",
    }

    @property
    def excess(self) -> PerPair:
        """The share of the diagonal minus the share of the Jacobian.

        How much more of coupling a component carries than its size explains. It sums to
        0 over the components, and is 0 in the mean for random singular vectors.
        """
        return self.diagonal_share - self.jacobian_share

    @checked
    def values(self, of: Share = "excess") -> PerPair:
        """Return one of the shares, or the excess, of every pair."""
        values: PerPair = getattr(self, of)
        return values

    @checked
    def mean(self, of: Share = "excess") -> Float[Tensor, " component"]:
        """Return the mean over all pairs of two layers, of each component.

        Pairs of a layer with itself are left out. Raises ValueError where there are no
        others.
        """
        different = self._different_layers()
        return self.values(of)[different].nanmean(0)

    @checked
    def by_layer(self, of: Share = "excess") -> Float[Tensor, "n_rows component"]:
        """Return the mean of each layer over the singular vectors of all others.

        NaN for a layer that has no other.
        """
        different = self._different_layers()
        values = self.values(of)
        return values.where(different[..., None], torch.nan).nanmean(1)

    @checked
    def null_interval(self, label: str) -> Interval:
        """Return where 95 % of a component's mean excess lies with random vectors.

        The Jacobians and their components are held fixed; each column has random
        vectors of its own, which are the same for all rows. So a mean is drawn as the
        measured one is taken: a draw for each column, over the rows that are other
        layers. Of thousands of such means the interval has the quantiles, as a share is
        a ratio, and far from normal for a small k: at k = 1 it has no mean, at k = 2 no
        variance. What the draws leave unknown of the middle is in it: from each mean
        that is drawn the error of another sample of as many draws is taken, and more of
        them make the interval narrower.

        Raises:
            ValueError: a label that is none of the components; fewer than two draws, or
                fewer than two layers.

        Example:
            >>> low, high = tlc.carriers(trace, k=4).null_interval("mlp_out")
            >>> low < 0 < high
            True
        """
        if label not in self.labels:
            raise ValueError(
                f"`label` must be one of {', '.join(self.labels)}, got {label!r}"
            )
        n_draws = self.null_share.shape[1]
        if n_draws < 2:
            raise ValueError(
                f"an interval needs two draws or more, there is {n_draws}: `n_draws`"
            )
        # The Jacobian's share is the same in all columns: the first serves all draws.
        excess = (self.null_share - self.jacobian_share[:, :1]).double().cpu()
        row_excess = excess[..., self.labels.index(label)]
        # A row whose diagonal is 0 in some draw has no share there: it is left out.
        is_counted = (
            self._different_layers().cpu() & ~row_excess.isnan().any(1)[:, None]
        )
        # The part that a column would add to the mean if its vectors were those of the
        # draw.
        weights = is_counted.double() / is_counted.sum()
        column_parts = einsum(
            row_excess.nan_to_num(), weights, "row draw, row col -> draw col"
        )
        # A fixed seed: a result gives the same interval whenever it is asked.
        generator = torch.Generator().manual_seed(0)
        means = sums_of_draws(column_parts, generator)
        means = means - _errors_of_the_middle(
            column_parts.sum(1), len(means), generator
        )
        return quantile_interval(means)

    @checked
    def null_interval_by_layer(self, label: str) -> Float[Tensor, "n_rows 2"]:
        """Return where 95 % of a component's share of each layer lies by chance.

        The band around the layer's `jacobian_share` in which `by_layer` of
        "diagonal_share" would lie with random singular vectors: a mean over as many
        draws as there are other layers, drawn two thousand times.

        Raises:
            ValueError: a label that is none of the components.

        Example:
            >>> tlc.carriers(trace, k=4).null_interval_by_layer("mlp_out").shape
            torch.Size([2, 2])
        """
        if label not in self.labels:
            raise ValueError(
                f"`label` must be one of {', '.join(self.labels)}, got {label!r}"
            )
        shares = self.null_share[..., self.labels.index(label)].double().cpu()
        n_draws = shares.shape[1]
        n_others = int(self._different_layers().sum(1).max())
        # A fixed seed: a result gives the same band whenever it is asked.
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(n_draws, (2000, n_others), generator=generator)
        means = torch.stack([row[drawn].nanmean(1) for row in shares])
        ends = torch.tensor([0.025, 0.975], dtype=means.dtype)
        return torch.nanquantile(means, ends, dim=1).mT

    @checked
    def by_branch(self) -> "Carriers":
        """Return the same with all heads as one component, attn_out.

        Example:
            >>> tlc.carriers(trace, k=4).by_branch().labels
            ('attn_out', 'mlp_out', 'mlp∘attn')
        """
        # A block whose heads cannot be told apart has attn_out already.
        is_attention = torch.tensor(
            [_is_head(label) or label == "attn_out" for label in self.labels],
            device=self.diagonal_share.device,
        )

        def merged(shares: Tensor) -> Tensor:
            attention = shares[..., is_attention].sum(-1, keepdim=True)
            return torch.cat([attention, shares[..., ~is_attention]], -1)

        others = [
            label
            for label in self.labels
            if not _is_head(label) and label != "attn_out"
        ]
        return replace(
            self,
            diagonal_share=merged(self.diagonal_share),
            energy_share=merged(self.energy_share),
            jacobian_share=merged(self.jacobian_share),
            null_share=merged(self.null_share),
            labels=("attn_out", *others),
        )

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a table with a row for each layer and component.

        Columns are `layer`, `component`, `excess`, `diagonal_share`, `energy_share` and
        `jacobian_share`, means over the singular vectors of all other layers, and
        `model` and `prompt`.

        Example:
            >>> tlc.carriers(trace, k=4).to_dataframe().shape
            (12, 8)
        """
        import pandas

        means = {
            share: rearrange(
                self.by_layer(share), "row component -> (row component)"
            ).tolist()
            for share in ("excess", "diagonal_share", "energy_share", "jacobian_share")
        }
        names = [(layer, label) for layer in self.row_layers for label in self.labels]
        table = pandas.DataFrame(names, columns=["layer", "component"])
        return table.assign(
            **means,
            model=self.provenance.get("model"),
            prompt=self.provenance.get("prompt"),
        )

    def _different_layers(self) -> Bool[Tensor, "n_rows n_cols"]:
        """Say which pairs are of two layers; raise ValueError where there are none."""
        device = self.diagonal_share.device
        rows = torch.tensor(self.row_layers, device=device)
        cols = torch.tensor(self.col_layers, device=device)
        different = rows[:, None] != cols
        if not bool(different.any()):
            raise ValueError("the mean over pairs of two layers needs two layers")
        return different

    def table(self) -> ShortTable:
        """Return the shares of heads together, of MLPs and of the rest, with their null;
        the heads of most excess are named below.
        """
        merged = self.by_branch()
        means = {share: merged.mean(share).tolist() for share in _SHARES_SHOWN}
        rows: list[list[object]] = []
        for place, label in enumerate(merged.labels):
            low, high = merged.null_interval(label)
            rows.append(
                [
                    label,
                    f"{means['diagonal_share'][place]:.3f}",
                    f"{means['jacobian_share'][place]:.3f}",
                    f"{means['excess'][place]:+.3f}",
                    f"{low:+.3f} to {high:+.3f}",
                ]
            )
        heads = ", ".join(strongest_heads(self, _N_HEADS_SHOWN)) or "no separate heads"
        title = f"{self.provenance['model']}: what carries coupling, k = {self.k}"
        caption = (
            "means over pairs of different layers; excess: diag A minus J\n"
            f"null: 95 % of {RANDOM_SUBSPACES}\nmost excess: {heads}"
        )
        numbers = ["diag A", "J", "excess", "null"]
        return ShortTable.of(title, ["component"], numbers, rows, caption)

    def _summary(self) -> str:
        size = (
            f"{len(self.row_layers)} layers, {len(self.labels)} components, k={self.k}"
        )
        # A single layer has no means to show.
        if len(set(self.row_layers) | set(self.col_layers)) < 2:
            return size
        merged = self.by_branch()
        means = zip(
            merged.labels,
            merged.mean("diagonal_share").tolist(),
            merged.mean("jacobian_share").tolist(),
            strict=True,
        )
        shares = "; ".join(
            f"{label} {diagonal:.3f} of the diagonal, {jacobian:.3f} of J"
            for label, diagonal, jacobian in means
        )
        return f"{size}; {shares}"


@checked
def carriers(
    trace: Trace,
    k: int = 10,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    n_draws: Count | None = None,
    seed: Seed = 0,
    chunk_size: Count | None = None,
    max_memory: MemoryLimit | None = None,
    progress: Progress | None = None,
) -> Carriers:
    r"""Which heads and MLPs carry the coupling of blocks across depth.

    The Jacobian of a block is a sum of components, its heads, its MLP, and the MLP
    acting on attention (`block_parts`), and so is its coupling matrix with
    any other layer,

    .. math:: A = U_2^\top J_1 V_2 = \sum_c A_c, \qquad A_c = U_2^\top J_{1,c} V_2 .

    Coupling is a large diagonal. Each component has a share of it, beside its share of
    A and of the Jacobian:

    .. math::

        \frac{\langle \operatorname{diag} A_c, \operatorname{diag} A\rangle}
        {\|\operatorname{diag} A\|^2}, \quad
        \frac{\langle A_c, A\rangle}{\|A\|_F^2}, \quad
        \frac{\langle J_c, J\rangle}{\|J\|_F^2}

    They are dimensionless, may be negative, and each sums to 1. In random singular
    vectors the first has the mean of the last: what a component carries is its
    `excess`, the first minus the last.

    Args:
        trace: a traced prompt.
        k: how many top singular vectors.
        position: the token; the last by default.
        orientation: as in `depth_coupling`.
        layers: a selection of layers, in this order; all by default. A model with
            layers without attention needs one.
        n_draws: how many random frames the null is drawn from: by default 200, and 2000
            vectors in all where k is below 10.
        seed: of the draws.
        chunk_size, max_memory, progress: as in `depth_coupling`.

    Raises:
        ValueError: as `depth_coupling`; a block whose attention and MLP cannot be told
            apart.

    Warns: as `depth_coupling`; where A or its diagonal is 0 (NaN).

    Cost: `depth_coupling`, and `block_parts` of each layer without its matrices; then
    about two times its coupling matrices.

    Example:
        >>> result = tlc.carriers(trace, k=4)
        >>> result.labels
        ('H0', 'H1', 'H2', 'H3', 'mlp_out', 'mlp∘attn')
        >>> result.excess.shape, result.by_layer().shape
        (torch.Size([2, 2, 6]), torch.Size([2, 6]))
    """
    options = JacobianOptions(chunk_size, max_memory, progress)
    (decomposed,) = decomposed_layers([trace], k, position, layers, options)
    # This warns where σ_k and σ_{k+1} are equal, and the frames arbitrary.
    decomposed.check_cut()
    leading = decomposed.leading
    # Frames have their vectors in rows on both sides, as Vh has already.
    left = rearrange(leading.U, "col d k -> col k d")
    right = leading.Vh
    if orientation == "vju":
        left, right = right, left
    generator = seeded(seed)
    n_draws = n_draws or max(_FEWEST_DRAWS, _DRAWN_COLUMNS // k)
    # The frames of a draw are the same for all rows, which are compared in it.
    random_frames = random_rotations(
        2, n_draws, trace.d_model, columns=k, generator=generator
    )
    drawn_left, drawn_right = random_frames.mT.to(leading.Vh)
    # Measured and random frames in one batch: each block is read once for both.
    frames = _Frames(torch.cat([left, drawn_left]), torch.cat([right, drawn_right]))
    paths: dict[str, str] = {}
    rows: list[_Shares] = []
    connections = decomposed.connections
    for i in with_progress(range(len(connections)), progress, "components"):
        connection = connections[i]
        block = trace.blocks[connection.layer].branches()
        components, path = components_and_path(block, connection.output_position)
        paths[str(connection)] = path
        rows.append(_shares(components, decomposed.jacobian(i), frames))
    labels = _all_labels(shares.labels for shares in rows)
    # Behind the columns that were measured stand the random ones.
    n_cols = len(connections)
    diagonal = _stacked([shares.diagonal for shares in rows], rows, labels)
    energy = _stacked([shares.energy for shares in rows], rows, labels)
    jacobian_share = _stacked([shares.jacobian for shares in rows], rows, labels)
    layer_numbers = tuple(connection.layer for connection in connections)
    return Carriers(
        diagonal_share=diagonal[:, :n_cols],
        energy_share=energy[:, :n_cols],
        jacobian_share=jacobian_share[:, None].expand(-1, n_cols, -1).contiguous(),
        null_share=diagonal[:, n_cols:],
        labels=labels,
        row_layers=layer_numbers,
        col_layers=layer_numbers,
        position=connections[0].position,
        k=k,
        orientation=orientation,
        provenance=trace.provenance
        | {
            "position": connections[0].position,
            "paths": decomposed.paths,
            "component_paths": paths,
            "svd": leading.method,
            "seed": seed,
        },
    )


def strongest_heads(result: Carriers, n: int) -> list[str]:
    """Return the n heads that carry most beyond their size, each with its layer.

    None of a model whose heads are not separate.
    """
    table = result.to_dataframe()
    # Components are called H0, H1, …, and attn_out where heads are not separate.
    heads = table[table["component"].str.startswith("H")]
    return [
        f"L{row.layer}{row.component} {row.excess:+.3f}"
        for row in heads.nlargest(n, "excess").itertuples()
    ]


class _Frames(NamedTuple):
    """Left and right vectors that Jacobians are read in, as rows."""

    left: Float[Tensor, "n_frames k d_model"]
    right: Float[Tensor, "n_frames k d_model"]


class _Shares(NamedTuple):
    """What each component of one Jacobian has of it, and of it in each frame."""

    labels: Sequence[str]
    diagonal: Float[Tensor, "n_frames component"]
    energy: Float[Tensor, "n_frames component"]
    jacobian: Float[Tensor, " component"]


def _shares(
    components: Components, J: Float[Tensor, "d_model d_model"], frames: _Frames
) -> _Shares:
    # `[n_frames k k]`, and of the components `[n_frames component k k]`.
    A = frames.left @ J @ frames.right.mT
    A_c = components.bilinear(frames.left, frames.right)
    return _Shares(
        components.names,
        diagonal_shares(A_c, A),
        energy_shares(A_c, A),
        components.inner_products(J) / J.square().sum(),
    )


def _errors_of_the_middle(
    draws: Float[Tensor, " n_draws"], n: int, generator: torch.Generator
) -> Float[Tensor, " n"]:
    """Draw as many draws again, n times, and say how far their mean is from the first."""
    n_draws = len(draws)
    errors = []
    for some in torch.arange(n).split(max(1, _MOST_NUMBERS // n_draws)):
        again = torch.randint(n_draws, (len(some), n_draws), generator=generator)
        errors.append(draws[again].mean(1) - draws.mean())
    return torch.cat(errors)


def _all_labels(labels_by_layer: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the labels that any layer has: heads by number, then the others."""
    labels = {label for own_labels in labels_by_layer for label in own_labels}
    # Heads are sorted by number, not by letters: H10 comes behind H9.
    heads = sorted(filter(_is_head, labels), key=lambda label: int(label[1:]))
    return (*heads, *(label for label in _BRANCHES if label in labels))


def _is_head(label: str) -> bool:
    return label.startswith("H")


def _stacked(
    values: Sequence[Float[Tensor, "*any n_own"]],
    rows: Sequence[_Shares],
    labels: Sequence[str],
) -> Float[Tensor, "n_rows *any component"]:
    """Stack what layers have, with 0 for components that a layer lacks."""
    stacked = values[0].new_zeros(len(values), *values[0].shape[:-1], len(labels))
    for row, shares, row_values in zip(stacked, rows, values, strict=True):
        # Layers may lack components, and lie on several devices.
        places = [labels.index(label) for label in shares.labels]
        row[..., places] = row_values.to(row.device)
    return stacked
