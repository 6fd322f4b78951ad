"""The subspaces that blocks share, and the ones to compare them with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import Count, Seed, checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.comparisons import (
    SeveralTraces,
    as_trace,
    decomposed_layers,
    depth_maps,
)
from tl_coupling.directions.interventions import (
    Directions,
    Hook,
    Side,
    check_belongs,
    check_dimensions,
    check_layers_differ,
    check_takes_hooks,
    own_facts,
    removal_hooks,
)
from tl_coupling.directions.projections import Projection
from tl_coupling.directions.random_directions import frames
from tl_coupling.jacobians import Decomposed, JacobianOptions
from tl_coupling.measures import seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import DifferentPrompts, Saved, tidy_table
from tl_coupling.spectra import eigh, eigvalsh

if TYPE_CHECKING:
    import pandas

Weights = Literal["equal", "coupling"]
SIDES: tuple[Side, ...] = ("read", "write")
# Principal directions of activations that the controls are drawn in.
_MOST_OF_SPAN = 50
# Columns of a basis in float32 are orthonormal to this, and independent above that.
_ORTHONORMAL = 1e-5
_INDEPENDENT = 1e-5


@made_by("directions.shared_subspace(traces)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Subspace(Saved):
    r"""Directions that all blocks read, and directions that all blocks write.

    Leading eigenvectors of the mean projector onto each block's top k singular vectors,
    `G = (1/n) Σ V_l V_lᵀ` for what is read, and the same of U for what is written. An
    eigenvalue is the share of blocks and prompts whose top k contain that direction.

    The other attributes are what `ablate` draws its controls from.

    Attributes:
        bases: orthonormal columns, `[side d_model rank]`; `read` and `write` are one
            side each.
        eigenvalues: of G, `[side rank]`; their mean over all d_model is k / d_model.
        null_eigenvalues: of as many independent random frames, `[side draw rank]`.
        cosines: of the principal angles between the subspaces of every second prompt
            and of the others, `[side rank]`; NaN of one prompt.
        null_cosines: of two random subspaces of this rank, `[draw rank]`.
        span: leading principal directions of what blocks read, centred, and of what
            they write, `[side layer d_model m]`, over all tokens but the first.
        mean: of what blocks read, `[layer d_model]`.
        unshared: directions of each block orthogonal to the shared ones, whose gains
            are the closest to theirs, `[side layer d_model 2·rank]`.
        low_gain: those of small gain: the 2·rank behind the median.
        gains: root mean square gain of the shared, the unshared and the low-gain
            directions, `[side layer 3]`.
        layers: the blocks.
        k: how many singular vectors of each block counted; 0 of one's own subspace,
            `Subspace.of`, which has no eigenvalues or cosines (NaN).
        provenance: what all prompts have in common, their texts and the remarks on
            any of them; JSON-able.
        side: of one's own subspace: where it is removed by default. None of what was
            found: that has both sides.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> subspace = tlc.directions.shared_subspace(traces, rank=2, k=4)
        >>> subspace.read.shape, subspace.rank
        (torch.Size([32, 2]), 2)
        >>> subspace.eigenvalues.shape, subspace.null_eigenvalues.shape
        (torch.Size([2, 2]), torch.Size([2, 20, 2]))
        >>> tlc.directions.Subspace.load(subspace.save("shared.nc")).layers
        (0, 1)
    """

    bases: Float[Tensor, "2 d_model rank"]
    eigenvalues: Float[Tensor, "2 rank"]
    null_eigenvalues: Float[Tensor, "2 n_draws rank"]
    cosines: Float[Tensor, "2 rank"]
    null_cosines: Float[Tensor, "n_draws rank"]
    span: Float[Tensor, "2 n_layers d_model n_span"]
    mean: Float[Tensor, "n_layers d_model"]
    unshared: Float[Tensor, "2 n_layers d_model n_unshared"]
    low_gain: Float[Tensor, "2 n_layers d_model n_low"]
    gains: Float[Tensor, "2 n_layers 3"]
    layers: tuple[int, ...]
    k: int
    provenance: dict[str, Any]
    side: Side | None = None
    DIMS: ClassVar = {
        "bases": "side d_model direction",
        "eigenvalues": "side direction",
        "null_eigenvalues": "side draw direction",
        "cosines": "side direction",
        "null_cosines": "draw direction",
        "span": "side layer d_model principal",
        "mean": "layer d_model",
        "unshared": "side layer d_model unshared_direction",
        "low_gain": "side layer d_model low_gain_direction",
        "gains": "side layer group",
        "layers": "layer",
    }

    @classmethod
    @checked
    def of(
        cls,
        basis: Float[Tensor, "d_model rank"],
        layer: int | Sequence[int],
        side: Side = "write",
        *,
        traces: SeveralTraces = (),
        name: str | None = None,
    ) -> "Subspace":
        r"""Return a subspace of one's own: the span of probes, of a concept, of rows of
        an SAE's decoder.

        It is taken by `ablate`, with the controls that it has for all others, and has
        the same hooks.

        Args:
            basis: directions in the stream, as columns. Those that are not orthonormal
                are replaced by an orthonormal basis of their span.
            layer: the block, or blocks, at which it is removed, counted from 0.
            side: where: from what blocks read, or from what they write.
            traces: prompts of the model, from whose streams and Jacobians the mean μ of
                the read side and the controls are taken. Without them μ is 0, and
                `ablate` takes the controls from its own prompts.
            name: what results call it.

        Raises:
            ValueError: no or negative layers, or one twice; more directions than
                `d_model`; directions that are not finite or not independent; `traces`
                of a model that it does not fit.
            TypeError: a basis that is no tensor or array of floating-point numbers.

        Cost: none; with `traces` that of `shared_subspace`.

        Example:
            >>> probes = torch.randn(32, 2)
            >>> mine = tlc.directions.Subspace.of(probes, layer=[0, 1], name="probes")
            >>> mine
            Subspace('probes', rank 2, own, removed from what layers 0, 1 write)
            >>> result = tlc.directions.ablate(model, ["w1 w2 w3 w4"], mine, n_draws=2)
            >>> result.kinds[0], len(set(result.kinds))
            ('shared', 7)
        """
        layers = (layer,) if isinstance(layer, int) else tuple(layer)
        if not layers or min(layers) < 0:
            raise ValueError(
                f"`layer` must name layers, counted from 0, got {list(layers)}"
            )
        check_layers_differ(layers)
        basis = _orthonormal(basis)
        d, rank = basis.shape
        n_layers = len(layers)
        unknown = torch.full((2, rank), torch.nan)
        nothing = torch.zeros(2, n_layers, d, 0)
        own = cls(
            bases=torch.stack([basis, basis]),
            eigenvalues=unknown,
            null_eigenvalues=torch.zeros(2, 0, rank),
            cosines=unknown,
            null_cosines=torch.zeros(0, rank),
            span=nothing,
            mean=torch.zeros(n_layers, d),
            unshared=nothing,
            low_gain=nothing,
            gains=torch.full((2, n_layers, 3), torch.nan),
            layers=layers,
            k=0,
            provenance={"model": name, "own": True, "directions": name},
            side=side,
        )
        return own.with_controls(traces) if traces else own

    @property
    def read(self) -> Float[Tensor, "d_model rank"]:
        """What all blocks read, the most shared direction first, orthonormal."""
        return self.bases[0]

    @property
    def write(self) -> Float[Tensor, "d_model rank"]:
        """What all blocks write, the most shared direction first, orthonormal."""
        return self.bases[1]

    @property
    def rank(self) -> int:
        """How many directions each side has."""
        return self.bases.shape[2]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each side and direction.

        Columns are `eigenvalue`, the mean and the largest of random frames,
        `null_eigenvalue` and `null_largest`, and `cosine`, the principal cosine of the
        two halves of the prompts, which belongs to no single direction.

        Example:
            >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
            >>> table = tlc.directions.shared_subspace(traces, 2, k=4).to_dataframe()
            >>> list(table)[:4], len(table)
            (['side', 'direction', 'eigenvalue', 'null_eigenvalue'], 4)
        """
        null = self.null_eigenvalues
        no_null = torch.full_like(self.eigenvalues, torch.nan)
        columns = {
            "eigenvalue": ("side direction", self.eigenvalues),
            "null_eigenvalue": ("side direction", null.mean(1)),
            "null_largest": (
                "side direction",
                null.amax(1) if null.shape[1] else no_null,
            ),
            "cosine": ("side direction", self.cosines),
        }
        return tidy_table(columns, {"side": SIDES}, self.provenance)

    @property
    def default_side(self) -> Side:
        """Where it is removed unless a call says otherwise."""
        return self.side or "write"

    @checked
    def hooks(self, model: nn.Module, side: Side | None = None) -> list[Hook]:
        """Return hooks that remove the subspace at every layer, as `ablate` does.

        From what blocks write by default, or from the side of one's own subspace. For
        `model.hooks(fwd_hooks=…)`. Raises ValueError for a model with other weights, of
        another width, without one of the layers or without hooks.

        Example:
            >>> subspace = tlc.directions.shared_subspace([trace], rank=2, k=4)
            >>> with model.hooks(fwd_hooks=subspace.hooks(model, side="read")):
            ...     logits = model(trace.tokens[None])
        """
        self.check_fits(model)
        side = side or self.default_side
        basis = self.bases[SIDES.index(side)]
        bases = dict.fromkeys(self.layers, basis)
        return removal_hooks(self._projection(bases, side), self.layers, side)

    @checked
    def directions(
        self, layer: int | None = None, side: Side | None = None
    ) -> Directions:
        """Return the directions of one side, at one block: `decode` and `steer` take them.

        Args:
            layer: one of `layers`; the last by default, where the stream has what the
                others wrote.
            side: "write" for what blocks write, in the stream behind the block; "read"
                for what they read, in the stream before it. By default that of one's
                own subspace, and "write" of a shared one.

        Raises:
            ValueError: a layer that the subspace is not of.

        Example:
            >>> subspace = tlc.directions.shared_subspace([trace], rank=2, k=4)
            >>> subspace.directions(layer=0, side="read")
            Directions('local/tiny', 2 read directions at blocks.0.hook_resid_pre)
        """
        layer = self.layers[-1] if layer is None else layer
        if layer not in self.layers:
            raise ValueError(
                f"`layer` must be one of the layers of the subspace, {list(self.layers)}, "
                f"got {layer}"
            )
        side = side or self.default_side
        basis = self.bases[SIDES.index(side)]
        provenance = {**self.provenance, "subspace": self._summary()}
        return Directions(basis.mT, layer, side, provenance)

    def with_controls(
        self, traces: SeveralTraces, *, keep_mean: bool = False
    ) -> "Subspace":
        """Return the subspace with what controls are drawn from, taken from prompts,
        and with their mean stream unless `keep_mean`.
        """
        # Only the energies of the Jacobians are read, which no k cuts.
        sums = _sums_over(traces, self.layers, k=1)
        material = _Material.from_sums(sums, self.bases)
        return replace(
            self,
            span=material.span.float(),
            mean=self.mean if keep_mean else material.mean.float(),
            unshared=material.unshared.float(),
            low_gain=material.low_gain.float(),
            gains=material.gains.float(),
            provenance=sums.prompts.provenance | own_facts(self.provenance),
        )

    def check_fits(self, model: nn.Module) -> None:
        """Raise ValueError for a model that this cannot be a subspace of."""
        check_takes_hooks(model)
        check_belongs(self.provenance, model)
        check_dimensions(model, self.bases.shape[1], self.layers)

    def _projection(self, bases: dict[int, Tensor], side: Side) -> Projection:
        means = dict(zip(self.layers, self.mean, strict=True))
        return Projection(bases, means if side == "read" else {})

    def _summary(self) -> str:
        if self.side is not None:
            layers = ", ".join(map(str, self.layers))
            return (
                f"rank {self.rank}, own, removed from what layers {layers} {self.side}"
            )
        shares = ", ".join(
            f"{side} {float(values[0]):.2f} (random {float(null[:, 0].mean()):.2f})"
            for side, values, null in zip(
                SIDES, self.eigenvalues, self.null_eigenvalues, strict=True
            )
        )
        return (
            f"rank {self.rank}, k={self.k}, {len(self.layers)} layers; "
            f"most shared: {shares}"
        )


@checked
def shared_subspace(
    traces: SeveralTraces,
    rank: Count = 10,
    k: Count = 10,
    *,
    layers: Sequence[int] | None = None,
    position: int = -1,
    weights: Weights = "equal",
    n_draws: Count = 20,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> Subspace:
    r"""Find the directions that the blocks of a model share, over prompts.

    .. math::

        G_{\mathrm{read}} = \frac{1}{n} \sum_{p, l} V^{p,l}_k {V^{p,l}_k}^\top, \qquad
        G_{\mathrm{write}} = \frac{1}{n} \sum_{p, l} U^{p,l}_k {U^{p,l}_k}^\top

    Args:
        traces: prompts traced with one model; of a generator one is held at a time.
        rank: how many directions.
        k: how many singular vectors of each block count, all the same.
        layers: the blocks; all by default.
        position: the token of each prompt whose Jacobians are taken; the last by
            default.
        weights: whether each block counts the same, or as much as it is coupled with
            the others, in the mean over pairs.
        n_draws: how often as many random frames are drawn.
        seed: of the draws.
        progress: wraps the loop over prompts.

    Raises:
        ValueError: no prompts, one twice, prompts of several models or traced in
            several ways, a layer twice, rank or k out of range, or blocks that
            normalise the stream themselves (BERT): what they add is not in the stream.

    Cost: a depth coupling for each prompt, 2 L eigendecompositions of d×d matrices, and
    for each draw and side one of a matrix of rank `n k`; memory for `4 L d²` numbers.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> subspace = tlc.directions.shared_subspace(traces, rank=3, k=4)
        >>> torch.allclose(subspace.write.mT @ subspace.write, torch.eye(3), atol=1e-5)
        True
    """
    traces = with_progress(traces, progress, "prompts")
    sums = _sums_over(traces, layers, k, position, weights)
    d = sums.d_model
    if rank > d:
        raise ValueError(f"`rank` must be at most d_model = {d}, got {rank}")
    generator = seeded(seed)
    whole = torch.stack(
        [_Shared.from_matrix(sums.G.sum(0)[side], rank).basis for side in (0, 1)]
    )
    eigenvalues = torch.stack(
        [_Shared.from_matrix(sums.G.sum(0)[side], rank).eigenvalues for side in (0, 1)]
    )
    # Each block on each prompt gives one projector to the mean.
    n_frames = sums.n_prompts * len(sums.layers)
    # Random frames have no side: the null of both is the same.
    null = torch.stack([_null(n_frames, d, k, rank, n_draws, generator)] * 2)
    material = _Material.from_sums(sums, whole)
    return Subspace(
        bases=whole.float(),
        eigenvalues=(eigenvalues / sums.weight).float(),
        null_eigenvalues=null.float(),
        cosines=_cosines_of_halves(sums, rank).float(),
        null_cosines=_null_cosines(d, rank, n_draws, generator).float(),
        span=material.span.float(),
        mean=material.mean.float(),
        unshared=material.unshared.float(),
        low_gain=material.low_gain.float(),
        gains=material.gains.float(),
        layers=tuple(sums.layers),
        k=k,
        provenance={
            **sums.prompts.provenance,
            "n_prompts": sums.n_prompts,
            "position": position,
            "weights": weights,
            "n_draws": n_draws,
            "seed": seed,
        },
    )


def _orthonormal(basis: Float[Tensor, "d rank"]) -> Float[Tensor, "d rank"]:
    """Return an orthonormal basis of the span of columns: these, where they are one."""
    d, rank = basis.shape
    if not 1 <= rank <= d:
        raise ValueError(
            "`basis` must have directions as columns, at most as many as they are long, "
            f"got shape {[d, rank]}: transpose it where they are rows"
        )
    columns = basis.detach().double().cpu()
    lengths = columns.norm(dim=0)
    if not bool(lengths.isfinite().all()) or not bool((lengths > 0).all()):
        raise ValueError(
            "`basis` must be finite and not 0, got lengths from "
            f"{float(lengths.min()):g} to {float(lengths.max()):g}"
        )
    smallest = float(torch.linalg.svdvals(columns / lengths)[-1])
    if smallest < _INDEPENDENT:
        raise ValueError(
            f"`basis` must have independent columns, got {rank} of which one is in the "
            f"span of the others to {smallest:.1g}: leave it out"
        )
    gram = columns.mT @ columns
    identity = torch.eye(rank).double()
    if not torch.allclose(gram, identity, rtol=0, atol=_ORTHONORMAL):
        # The first columns span what the first directions do.
        columns = torch.linalg.qr(columns).Q
    return columns.float()


class _Shared(NamedTuple):
    """Leading eigenvectors of a symmetric matrix, and their eigenvalues."""

    basis: Float[Tensor, "d rank"]
    eigenvalues: Float[Tensor, " rank"]

    @classmethod
    def from_matrix(cls, G: Float[Tensor, "d d"], rank: int) -> "_Shared":
        # Eigenvalues ascend.
        eigenvalues, eigenvectors = eigh(G)
        return cls(eigenvectors[:, -rank:].flip(1), eigenvalues[-rank:].flip(0))


@dataclass
class _Sums:
    """What is summed over prompts.

    Attributes:
        layers: the blocks.
        G: sums of projectors, of even and of odd prompts, `[half side d d]`.
        energies: sums of `JᵀJ` and of `JJᵀ`, `[side layer d d]`.
        streams: what each block read and wrote at all tokens but the first.
        weight: sum of the weights of all blocks.
        prompts: those that were added.
    """

    layers: list[int]
    G: Float[Tensor, "2 2 d d"]
    energies: Float[Tensor, "2 n_layers d d"]
    streams: list[Float[Tensor, "2 n_layers n_tokens d"]]
    weight: float = 0.0
    prompts: DifferentPrompts = field(
        default_factory=lambda: DifferentPrompts("traces")
    )

    @classmethod
    def empty(cls, traced: Trace, layers: Sequence[int] | None) -> "_Sums":
        chosen = range(traced.n_layers) if layers is None else layers
        indices = [traced.layer_index(layer) for layer in chosen]
        if not indices:
            raise ValueError("`layers` is empty: wanted at least one layer")
        check_layers_differ(indices)
        d = traced.d_model
        return cls(
            indices,
            torch.zeros(2, 2, d, d, dtype=torch.float64),
            torch.zeros(2, len(indices), d, d),
            [],
        )

    @property
    def d_model(self) -> int:
        return self.G.shape[-1]

    @property
    def n_prompts(self) -> int:
        return len(self.prompts)

    def add(self, traced: Trace, k: int, position: int, weights: Weights) -> None:
        """Add one prompt."""
        self._check(traced)
        options = JacobianOptions(progress=False)
        (decomposed,) = decomposed_layers(
            [traced], k, position, self.layers, options=options
        )
        leading = decomposed.leading
        layer_weights = _weights_of(decomposed, weights)
        # Prompts go to the two halves in turn, see `cosines`.
        half = (self.n_prompts - 1) % 2
        for side, frame in enumerate((leading.Vh.mT, leading.U)):
            columns = frame.double().cpu()
            # `Σ_l w_l V_l V_lᵀ`, over the layers of this prompt.
            weighted = columns * layer_weights[:, None, None]
            self.G[half, side] += torch.einsum("ldk,lek->de", weighted, columns)
        for i in range(len(self.layers)):
            J = decomposed.jacobian(i).float().cpu()
            # `vᵀ JᵀJ v` is the squared gain of what is read, `uᵀ JJᵀ u` of what is
            # written.
            self.energies[0, i] += J.mT @ J
            self.energies[1, i] += J @ J.mT
        self.streams.append(_streams(traced, self.layers))
        self.weight += float(layer_weights.sum())

    def _check(self, traced: Trace) -> None:
        self.prompts.add_traced(traced)
        for layer in self.layers:
            if traced.blocks[layer].remark_on_norms():
                raise ValueError(
                    f"layer {layer} normalises the stream itself, so that what its "
                    "branches write is not in the stream as it is: a subspace cannot be "
                    "removed from it by a hook"
                )


def _sums_over(
    traces: Iterable[object],
    layers: Sequence[int] | None,
    k: int,
    position: int = -1,
    weights: Weights = "equal",
) -> _Sums:
    sums: _Sums | None = None
    for item in traces:
        traced = as_trace(item)
        if sums is None:
            sums = _Sums.empty(traced, layers)
        sums.add(traced, k, position, weights)
    if sums is None:
        raise ValueError("`traces` is empty: wanted at least one traced prompt")
    return sums


def _weights_of(decomposed: Decomposed, weights: Weights) -> Float[Tensor, " n_layers"]:
    """Return how much each block counts: 1 in the mean."""
    n_layers = len(decomposed)
    if weights == "equal" or n_layers == 1:
        return torch.ones(n_layers, dtype=torch.float64)
    coupling = depth_maps(decomposed, ("ujv",))["ujv"].coupling().double().cpu()
    # A block is coupled by its Jacobian and by its vectors: a row and a column.
    both_ways = coupling + coupling.mT
    others = both_ways.sum(1) - both_ways.diagonal()
    return others / others.mean()


def _streams(
    traced: Trace, layers: list[int]
) -> Float[Tensor, "2 n_layers n_tokens d"]:
    """Return what blocks read and write, at all tokens but the first where there are
    others: attention sinks there are many times longer.
    """
    first = 1 if traced.n_pos > 1 else 0
    stream = traced.residual[:, first:].float().cpu()
    read = stream[layers]
    # A block writes the step from one depth to the next.
    write = stream[[layer + 1 for layer in layers]] - read
    return torch.stack([read, write])


def _null(
    n_frames: int, d: int, k: int, rank: int, n_draws: int, generator: torch.Generator
) -> Float[Tensor, "n_draws rank"]:
    """Return leading eigenvalues of the mean projector of independent random frames."""
    draws = []
    for _ in range(n_draws):
        stacked = torch.cat(list(frames(n_frames, torch.eye(d), k, generator)), dim=1)
        # `F Fᵀ` and `FᵀF` have the same eigenvalues but for zeros: the smaller one is
        # taken.
        gram = stacked @ stacked.mT if d < stacked.shape[1] else stacked.mT @ stacked
        values = eigvalsh(gram.double()).flip(0)[:rank] / n_frames
        # Beyond the rank of all frames together eigenvalues are 0.
        draws.append(torch.nn.functional.pad(values, (0, rank - len(values))))
    return torch.stack(draws)


def _cosines_of_halves(sums: _Sums, rank: int) -> Float[Tensor, "2 rank"]:
    """Return the principal cosines of the subspaces of even and of odd prompts."""
    if sums.n_prompts < 2:
        return torch.full((2, rank), torch.nan).double()
    cosines_by_side = []
    for side in (0, 1):
        even, odd = (
            _Shared.from_matrix(sums.G[half, side], rank).basis for half in (0, 1)
        )
        cosines_by_side.append(torch.linalg.svdvals(even.mT @ odd))
    return torch.stack(cosines_by_side)


def _null_cosines(
    d: int, rank: int, n_draws: int, generator: torch.Generator
) -> Float[Tensor, "n_draws rank"]:
    drawn = frames(2 * n_draws, torch.eye(d), rank, generator)
    return torch.stack(
        # The iterator is read in pairs of frames: each first one, and the next.
        [torch.linalg.svdvals(first.mT @ next(drawn)) for first in drawn]
    )


class _Material(NamedTuple):
    """What controls are drawn from; see `Subspace`."""

    span: Float[Tensor, "2 n_layers d m"]
    mean: Float[Tensor, "n_layers d"]
    unshared: Float[Tensor, "2 n_layers d n"]
    low_gain: Float[Tensor, "2 n_layers d n"]
    gains: Float[Tensor, "2 n_layers 3"]

    @classmethod
    def from_sums(cls, sums: _Sums, bases: Float[Tensor, "2 d rank"]) -> "_Material":
        streams = torch.cat(sums.streams, dim=2)
        mean = streams[0].mean(1)
        centred = torch.stack([streams[0] - mean[:, None], streams[1]])
        # Centred rows span one direction fewer than there are rows.
        n_span = min(_MOST_OF_SPAN, centred.shape[2] - 1, sums.d_model)
        n_span = max(n_span, 1)
        right = torch.linalg.svd(centred, full_matrices=False).Vh
        others = [
            [
                _Others.from_energy(energy.double() / sums.n_prompts, bases[side])
                for energy in sums.energies[side]
            ]
            for side in (0, 1)
        ]
        return cls(
            span=right[:, :, :n_span].mT,
            mean=mean,
            unshared=_stacked([[one.unshared for one in side] for side in others]),
            low_gain=_stacked([[one.low_gain for one in side] for side in others]),
            gains=_stacked([[one.gains for one in side] for side in others]),
        )


def _stacked(tensors_by_side: list[list[Tensor]]) -> Tensor:
    return torch.stack(
        [torch.stack(layer_tensors) for layer_tensors in tensors_by_side]
    )


class _Others(NamedTuple):
    """Directions of one block that are orthogonal to the shared ones."""

    unshared: Float[Tensor, "d n"]
    low_gain: Float[Tensor, "d n"]
    gains: Float[Tensor, "3"]

    @classmethod
    def from_energy(
        cls, energy: Float[Tensor, "d d"], basis: Float[Tensor, "d rank"]
    ) -> "_Others":
        """Choose them by their gains, from the mean `JᵀJ` or `JJᵀ`."""
        d, rank = basis.shape
        complement = torch.eye(d).double() - basis.double() @ basis.double().mT
        values, vectors = eigh(complement @ energy @ complement)
        # Those that are in the shared subspace have gain 0 here, and come first.
        values = values[rank:].flip(0)
        vectors = vectors[:, rank:].flip(1)
        size = min(2 * rank, d - rank)
        shared_energy = float((basis.double() * (energy @ basis.double())).sum() / rank)
        # The mean energy of a random frame in each window of neighbours.
        windows = values.unfold(0, size, 1).mean(1) if size else values
        start = int((windows - shared_energy).abs().argmin()) if size else 0
        # They begin at the median, or before it where too few are left behind it.
        low = min((d - rank) // 2, d - rank - size)
        energies = [
            shared_energy,
            float(values[start : start + size].mean()),
            float(values[low : low + size].mean()),
        ]
        return cls(
            vectors[:, start : start + size],
            vectors[:, low : low + size],
            torch.tensor(energies).clamp(min=0).sqrt(),
        )
