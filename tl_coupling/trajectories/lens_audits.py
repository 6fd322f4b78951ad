"""How far a Jacobian lens can be trusted: whether it is of the model that was traced, and
how well its matrices are known.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor

from tl_coupling.arguments import checked, described, made_by
from tl_coupling.blocks import Trace
from tl_coupling.models import (
    JacobianLens,
    UsableLens,
    check_lens_fits,
    check_takes_lens,
    described_for_lens,
    usable_lens,
)
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import (
    DifferentPrompts,
    Saved,
    ShortTable,
    plural,
    tidy_table,
)
from tl_coupling.trajectories.lenses import (
    SEVERAL_TRACES,
    LensEstimate,
    check_matrices_of,
    checked_trace,
    metadata_of,
)

if TYPE_CHECKING:
    import pandas

# A short table shows every so many parts of the depth.
_N_ROWS_SHOWN = 8
# How often a right lens may be taken for another's, or for one of the very prompts.
_LEVEL = 0.001
# Fewer do not tell along how many directions prompts vary.
_FEWEST_PROMPTS = 4
# The rounding of a lens that was saved in float16.
_ROUNDING = 1e-3
# Below this share of a lens that prompts do not explain, it is a mean of theirs.
_UNEXPLAINED = 0.02
# Facts that must agree where both state them, with the fault's text.
_FACTS = {
    "weights_digest": "its weights were others",
    "rope": "its rotary embedding was another",
}


@made_by("trajectories.lens_audit(lens, traces)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class LensAudit(Saved):
    """How far a lens L lies from the Jacobians P of prompts, beside how far those lie
    apart; `lens_audit` makes it.

    Distances are Frobenius norms, as shares of that of the prompts' mean M; σ is how
    far a prompt lies from the mean of all prompts there are.

    Attributes:
        halves: `‖M_a − M_b‖ / ‖M‖` of the means of every other prompt, by layer.
        spread: `σ / √(‖M‖² − σ²/n)` by layer, how far a prompt lies from the mean of all
            prompts as a share of that, whose size is what M has without noise; infinite
            where these prompts do not show that it has any.
        distance: `‖L − P‖ / ‖P‖` of each prompt, `[prompt layer]`.
        distance_from_mean: `‖L − M‖ / ‖M‖`, by layer.
        expected_distance: of that, `σ √(1/n + 1/n_L) / ‖M‖` for n prompts here and n_L
            of the lens.
        n_directions: `(tr Σ)² / tr Σ²` of the prompts' covariance, by layer: along how
            many directions they vary, as if equally along each; NaN of fewer than four
            prompts, which do not tell.
        of_its_prompts: whether the prompts are those of the lens, all of them.
        prompt_weights: of each prompt in the combination of prompts that is closest to
            the lens, at its first layer.
        unexplained: the share of the lens at that layer that is not in it.
        facts_that_differ: what the lens says of itself and the traces contradict.
        remarks: differences that need not matter, and what is not known.
        lens_n_prompts: how many prompts the lens says that it is the mean of.
        accuracy: the relative error that is wanted of the lens.
        layers: of the matrices.
        provenance: how it was made; JSON-able.

    Example:
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> traces = [trace, tlc.trace(model, "w5 w6 w7 w8")]
        >>> audit = tlc.trajectories.lens_audit(lens, traces, accuracy=1.0)
        >>> audit.halves.shape, audit.needed_prompts.shape
        (torch.Size([1]), torch.Size([1]))
    """

    halves: Float[Tensor, " n_maps"]
    spread: Float[Tensor, " n_maps"]
    distance: Float[Tensor, "n_prompts n_maps"]
    distance_from_mean: Float[Tensor, " n_maps"]
    expected_distance: Float[Tensor, " n_maps"]
    n_directions: Float[Tensor, " n_maps"]
    of_its_prompts: bool
    prompt_weights: Float[Tensor, " n_prompts"]
    unexplained: float
    facts_that_differ: tuple[str, ...]
    remarks: tuple[str, ...]
    lens_n_prompts: int
    accuracy: float
    layers: tuple[int, ...]
    provenance: dict[str, Any]
    DIMS: ClassVar = {
        **dict.fromkeys(
            (
                "halves",
                "spread",
                "distance_from_mean",
                "expected_distance",
                "n_directions",
            ),
            "layer",
        ),
        "distance": "prompt layer",
        "prompt_weights": "prompt",
        "layers": "layer",
    }

    @property
    def farthest(self) -> Float[Tensor, " n_maps"]:
        """How far from their mean a right lens lies at most, by layer.

        For prompts that are not the lens's, what it exceeds at any layer in one audit of
        a thousand: `expected_distance` times the root of a quantile of the F
        distribution with D and D (n - 1) degrees of freedom, D being `n_directions`.
        Infinite where that is NaN and prompts lie apart. For the lens's own prompts, 2 %
        and rounding.
        """
        if self.of_its_prompts:
            return torch.full_like(self.expected_distance, _UNEXPLAINED + _ROUNDING)
        quantile = _quantile(self.n_directions, len(self.distance), upper=True)
        farthest = quantile.sqrt() * self.expected_distance
        # Prompts that do not lie apart at all tell, and leave nothing but rounding.
        lies_apart = self.expected_distance != 0
        return farthest.where(lies_apart, 0.0) + _ROUNDING

    @property
    def detectable(self) -> Float[Tensor, " n_maps"]:
        """How large a change of the map is found in about half of such audits, by layer.

        It is `√(farthest² − expected_distance²)`, as a share of the map's size, for a
        change of the mean map of all prompts: by other weights, another rotary
        embedding, or other text. For the lens's own prompts, all of `farthest`.
        """
        if self.of_its_prompts:
            return self.farthest
        beyond = self.farthest.square() - self.expected_distance.square()
        return beyond.clamp_min(0).sqrt()

    @property
    def needed_prompts(self) -> Float[Tensor, " n_maps"]:
        """How many prompts a lens needs for `accuracy`, by layer.

        The relative error of a mean of n is `spread / √n`, so that it is `(spread /
        accuracy)²`, at least 1: an extrapolation from the prompts here, for prompts of
        their kind. Infinite where `spread` is.
        """
        return (self.spread / self.accuracy).square().ceil().clamp_min(1)

    @property
    def faults(self) -> tuple[str, ...]:
        """What speaks against the lens, a clause each; empty if nothing does."""
        found = list(self.facts_that_differ)
        # With NaN, every comparison below would say that nothing is wrong.
        is_unknown = self._is_unknown()
        if unknown := self._layers_where(is_unknown):
            found.append(
                f"how far it lies from these prompts' Jacobians is not known at {unknown} "
                "(NaN)"
            )
        n_prompts = len(self.prompt_weights)
        n_used = int((self.prompt_weights > 0.5 / n_prompts).sum())
        # A quarter of what a lens of other prompts would leave.
        of_others = float(self.spread[0]) / math.sqrt(self.lens_n_prompts)
        is_of_these = self.unexplained < min(_UNEXPLAINED, of_others / 4)
        is_of_fewer = n_used < min(n_prompts, self.lens_n_prompts)
        is_far = ~is_unknown & (self.distance_from_mean > self.farthest)
        far = self._layers_where(is_far)
        if is_of_these and is_of_fewer:
            found.append(
                f"it is made of {n_used} of these {n_prompts} prompts, and says "
                f"{self.lens_n_prompts}"
            )
        elif far and self.of_its_prompts:
            most = float(self.distance_from_mean[is_far].max())
            found.append(
                f"at {far} up to {most:.1%} of it is not in the mean of its own prompts "
                "(other weights, another rotary embedding, other tokens, or a fit in low "
                "precision)"
            )
        elif far:
            ratios = self.distance_from_mean / self.expected_distance
            ratio = float(ratios[is_far].max())
            found.append(
                f"at {far} it lies up to {ratio:.1f} times as far from these prompts' "
                "Jacobians as is expected, which a right lens does in one audit of a "
                "thousand (other weights, another rotary embedding, other text, or fewer "
                "prompts than it says: they are not told apart)"
            )
        is_few = ~is_unknown & (self.needed_prompts > self.lens_n_prompts)
        if few := self._layers_where(is_few):
            most = float(self.needed_prompts[is_few].max())
            number = f"up to {most:.0f}"
            if math.isinf(most):
                number = f"more than {n_prompts} audited ones can tell"
            found.append(
                f"its {self.lens_n_prompts} prompts are too few for {few}: an error of "
                f"{self.accuracy:.0%} needs {number}"
            )
        return tuple(found)

    @property
    def verdict(self) -> str:
        """What the audit finds, in a sentence."""
        if self.faults:
            return f"The lens is not to be trusted here: {'; '.join(self.faults)}."
        worst = float((self.spread / math.sqrt(self.lens_n_prompts)).max())
        error = f"with an error of at most {worst:.1%}"
        if self.of_its_prompts:
            return (
                "Nothing speaks against the lens: it is the mean of these "
                f"{len(self.distance)} prompts, its own, {error}."
            )
        if math.isinf(float(self.farthest.max())):
            return (
                f"Nothing is known against the lens, but {len(self.distance)} prompts do "
                f"not tell: audit it with {_FEWEST_PROMPTS} or more."
            )
        return (
            "Nothing speaks against the lens: it lies as far from these "
            f"{len(self.distance)} prompts as a mean of {self.lens_n_prompts} of their "
            f"kind would, {error}. What moves no map by more than "
            f"{float(self.detectable.min()):.0%} of its size is too small to be seen "
            "with so few: other weights, another rotary embedding, other text."
        )

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each prompt and layer.

        Example:
            >>> lens = tlc.trajectories.product_lens([trace])
            >>> traces = [trace, tlc.trace(model, "w5 w6 w7 w8")]
            >>> table = tlc.trajectories.lens_audit(lens, traces).to_dataframe()
            >>> list(table)[:4], len(table)
            (['prompt', 'layer', 'distance', 'halves'], 2)
        """
        by_layer = {
            "halves": self.halves,
            "spread": self.spread,
            "needed_prompts": self.needed_prompts,
            "distance_from_mean": self.distance_from_mean,
            "expected_distance": self.expected_distance,
            "farthest": self.farthest,
            "detectable": self.detectable,
        }
        columns = {"distance": ("prompt layer", self.distance)}
        columns |= {name: ("layer", values) for name, values in by_layer.items()}
        columns["prompt_weight"] = ("prompt", self.prompt_weights)
        return tidy_table(columns, {"layer": self.layers}, self.provenance)

    def table(self) -> ShortTable:
        """Return distances and needed prompts of about eight layers."""
        n_layers = len(self.layers)
        step = max(1, n_layers // _N_ROWS_SHOWN)
        shown_layers = sorted({*range(0, n_layers, step), n_layers - 1})
        rows = [
            [
                self.layers[i],
                f"{float(self.distance_from_mean[i]):.3f}",
                f"{float(self.farthest[i]):.3f}",
                f"{float(self.halves[i]):.3f}",
                f"{float(self.needed_prompts[i]):.0f}",
            ]
            for i in shown_layers
        ]
        title = (
            f"{self.provenance.get('model')}: a lens of "
            f"{plural(self.lens_n_prompts, 'prompt')}, audited with {len(self.distance)}"
        )
        caption = (
            "distances as shares of the map's size; needed: prompts for an error of "
            f"{self.accuracy:.0%}"
        )
        numbers = ["layer", "from their mean", "at most", "two halves", "needed"]
        return ShortTable.of(title, [], numbers, rows, caption)

    def _summary(self) -> str:
        return (
            f"{len(self.layers)} layers, {len(self.distance)} prompts; {self.verdict}"
        )

    def _is_unknown(self) -> Bool[Tensor, " n_maps"]:
        """Say at which layers a number that the verdict hangs on is NaN."""
        numbers = (self.needed_prompts, self.distance_from_mean, self.farthest)
        is_unknown = torch.stack(numbers).isnan().any(0)
        # The numbers of the first layer hold for the whole lens.
        is_known = not math.isnan(self.unexplained)
        is_known &= not bool(self.prompt_weights.isnan().any())
        return is_unknown | (not is_known)

    def _layers_where(self, is_meant: Tensor) -> str:
        """Return the layers of a mask in words, "" for none."""
        meant = [
            layer
            for layer, is_one in zip(self.layers, is_meant.tolist(), strict=True)
            if is_one
        ]
        if not meant:
            return ""
        if len(meant) == len(self.layers):
            return "all layers"
        if len(meant) == 1:
            return f"layer {meant[0]}"
        return f"{len(meant)} layers from {meant[0]} to {meant[-1]}"


@checked
def lens_audit(
    lens: JacobianLens,
    traces: Annotated[Iterable[object], SEVERAL_TRACES],
    *,
    of_its_prompts: bool | None = None,
    accuracy: float = 0.1,
    progress: Progress | None = None,
) -> LensAudit:
    r"""Say whether a Jacobian lens is of the model that was traced, and how well its
    matrices are known.

    A lens is the mean of a matrix P of each prompt over n_L prompts, so it is wrong by
    `σ / √n_L`, where σ is how far prompts lie apart:

    .. math:: \sigma^2 = \frac1{n - 1} \sum_p \lVert P_p - M \rVert^2, \qquad
              M = \frac1n \sum_p P_p

    Each P is computed anew here, as the lens's metadata say (`tokens` of
    `product_lens`; without metadata as `JacobianLens.fit` does by default).

    Of other prompts than the lens's, the distance of the lens from M is then known:

    .. math:: \mathbb{E} \lVert L - M \rVert^2
              = \sigma^2 \Big(\frac1n + \frac1{n_L}\Big)
              + \lVert \mathbb{E} L - \mathbb{E} M \rVert^2

    and the last term is a fault. `‖L − M‖² − σ²/n` is the mean of
    `⟨L − P_p, L − P_q⟩` over pairs of different prompts (Chen and Qin 2010). How far the
    distance varies by chance depends on along how many directions D the prompts do,
    `D = (tr Σ)² / tr Σ²` of their covariance: its square over `σ² (1/n + 1/n_L)` is
    compared with the F distribution with D and D (n - 1) degrees of freedom (Dempster
    1958). That supposes Gaussian departures: right lenses of a handful of prompts are
    refused more often than once in a thousand audits. Other weights, another rotary
    embedding and text of another kind are not told apart: take prompts like those that
    the lens was fitted on. Of small changes see `LensAudit.detectable`.

    Of the very prompts of the lens, all of them, nothing but rounding may be left:
    that finds far smaller changes. Where the lens has a digest of its weights, or what
    its rotary embedding was, these are compared too.

    Args:
        lens: a `JacobianLens` of TransformerLens, fitted, loaded or from `product_lens`,
            or one of the reference implementation in memory, which is read as one
            without metadata.
        traces: at least two prompts traced with the model, with raw weights and without
            `final_norm`; four or more to tell whether the lens is of the model. Prompts
            of the lens if you have them all, else none of them.
        of_its_prompts: whether the traces are the prompts of the lens, all of them; by
            default where they are as many as it has, and it lies nearer to them than one
            of others in a thousand.
        accuracy: the relative error that is wanted of the lens.
        progress: as in `product_lens`.

    Raises:
        ValueError: fewer than two traces, a prompt twice, or not as many as the lens has with
            `of_its_prompts=True`; accuracy not in (0, 1]; a lens of another width,
            without a layer of the model, or that does not say how many prompts it has;
            and as `product_lens`.
        TypeError: as `product_lens`.

    Cost: as `product_lens`; memory for `n L d²` numbers in float32 and `3 n d²` in
    float64.

    Example:
        >>> lens = tlc.trajectories.product_lens([trace])
        >>> audit = tlc.trajectories.lens_audit(
        ...     lens, [trace, tlc.trace(model, "w5 w6 w7 w8")]
        ... )
        >>> audit.distance_from_mean.shape, audit.lens_n_prompts
        (torch.Size([1]), 1)
    """
    if not 0 < accuracy <= 1:
        raise ValueError(f"`accuracy` must lie in (0, 1], got {accuracy}")
    if not isinstance(lens.n_prompts, Integral):
        raise TypeError(
            "`lens.n_prompts` must be a whole number, how many prompts it was fitted on, "
            f"got {described(lens.n_prompts)}"
        )
    if lens.n_prompts < 1:
        raise ValueError(
            "`lens.n_prompts` must be at least 1, and without it nothing is expected of a "
            f"lens, got {lens.n_prompts}: set it to how many prompts it was fitted on"
        )
    lens = usable_lens(lens)
    estimate = LensEstimate.of_lens(lens)
    prompts: list[Tensor] = []
    first: Trace | None = None
    different = DifferentPrompts("traces")
    for item in with_progress(traces, progress, "prompts"):
        trace = checked_trace(item, first)
        different.add_traced(trace)
        if first is None:
            check_takes_lens(trace.model, trace.d_model)
            matrices = _matrices(lens, trace)
            first = trace
        if not estimate.has_tokens(trace):
            raise ValueError(
                f"`traces` must be longer than {estimate.skip_first_positions + 1} "
                f"tokens, which this lens leaves out, got {trace.n_pos}"
            )
        # In the memory of the CPU: of all layers they may not fit elsewhere.
        prompts.append(estimate.of_prompt(trace).float().cpu())
    n = len(prompts)
    if first is None or n < 2:
        raise ValueError(f"`traces` must hold at least two traced prompts, got {n}")
    if of_its_prompts and n != lens.n_prompts:
        raise ValueError(
            "with `of_its_prompts=True`, `traces` must hold all prompts of the lens, "
            f"{lens.n_prompts}, got {n}: leave it out for a part of them"
        )
    numbers = _numbers(matrices, prompts, lens.n_prompts)
    if of_its_prompts is None:
        of_its_prompts = n == lens.n_prompts and _is_nearer(numbers, n)
    weights, unexplained = _combination(
        matrices[0], torch.stack([P[0] for P in prompts]).to(matrices.device)
    )
    differing, remarks = _compared_facts(lens, first)
    return LensAudit(
        **numbers,
        of_its_prompts=of_its_prompts,
        prompt_weights=weights.cpu(),
        unexplained=unexplained,
        facts_that_differ=tuple(differing),
        remarks=tuple(remarks),
        lens_n_prompts=lens.n_prompts,
        accuracy=accuracy,
        layers=tuple(range(first.n_layers - 1)),
        provenance={
            **first.provenance,
            "estimator": estimate.metadata(),
            "lens": {
                str(name): _as_json(fact) for name, fact in metadata_of(lens).items()
            },
        },
    )


def _matrices(
    lens: UsableLens, trace: Trace
) -> Float[Tensor, "n_maps d_model d_model"]:
    """Return the matrices of a lens in float64; raise unless it has all of the model's."""
    wanted = list(range(trace.n_layers - 1))
    missing = [layer for layer in wanted if layer not in lens.jacobians]
    if missing or lens.d_model != trace.d_model:
        raise ValueError(
            f"`lens` must have a matrix of width {trace.d_model} for each of the layers "
            f"0 to {wanted[-1]} of this model, got width {lens.d_model} and layers "
            f"{sorted(lens.jacobians)}"
        )
    check_matrices_of(lens, trace.d_model)
    matrices = torch.stack([lens.jacobians[layer] for layer in wanted])
    return matrices.double().to(trace.blocks[0].X.device)


def _as_json(fact: object) -> object:
    """Return a fact as it is, or as text where JSON has no form for it."""
    try:
        json.dumps(fact)
    except (TypeError, ValueError, RecursionError):
        return described(fact)
    return fact


def _numbers(
    lens: Float[Tensor, "n_maps d_model d_model"],
    prompts: Sequence[Float[Tensor, "n_maps d_model d_model"]],
    lens_n_prompts: int,
) -> dict[str, Tensor]:
    """Return the numbers of an audit by name, each by layer."""
    n = len(prompts)
    scale = math.sqrt(1 / n + 1 / lens_n_prompts)
    by_layer: dict[str, list[Tensor]] = {}
    for layer, L in enumerate(lens):
        P = torch.stack([matrices[layer] for matrices in prompts]).to(L)
        mean = P.mean(0)
        size = mean.norm()
        departures = (P - mean).flatten(1)
        gram = departures @ departures.mT
        variance = gram.trace() / (n - 1)
        # The mean of n prompts is longer than that of all there are: it has their noise.
        size_of_all = (size.square() - variance / n).clamp_min(0).sqrt()
        spread = variance.sqrt() / size_of_all
        # Prompts without any matrix, zero by zero, do not lie apart.
        spread = spread.where(variance != 0, 0.0)
        numbers = {
            "halves": (P[::2].mean(0) - P[1::2].mean(0)).norm() / size,
            "spread": spread,
            "distance": _norms(P - L) / _norms(P),
            "distance_from_mean": (L - mean).norm() / size,
            "expected_distance": variance.sqrt() / size * scale,
            "n_directions": _n_directions(gram, L.numel()),
        }
        for name, number in numbers.items():
            by_layer.setdefault(name, []).append(number.cpu())
    # The first axis of `distance` is the prompts.
    return {name: torch.stack(values, -1) for name, values in by_layer.items()}


def _is_nearer(numbers: Mapping[str, Tensor], n: int) -> bool:
    """Say whether a lens lies nearer to n prompts than one of others ever would."""
    quantile = _quantile(numbers["n_directions"], n, upper=False)
    nearest = quantile.sqrt() * numbers["expected_distance"]
    return bool((numbers["distance_from_mean"] < nearest).any())


def _quantile(
    n_directions: Float[Tensor, " n_maps"], n: int, *, upper: bool
) -> Float[Tensor, " n_maps"]:
    """Return what `‖L − M‖²`, of what is expected, exceeds once in a thousand audits.

    Or what it falls short of. The level is shared among layers (Bonferroni).
    """
    D = n_directions.numpy()
    level = _LEVEL / len(D)
    of_f = stats.f.isf if upper else stats.f.ppf
    quantiles = of_f(level, D, D * (n - 1))
    # Where prompts do not tell, nothing is too far, and nothing too near.
    untold = np.inf if upper else 0.0
    return torch.from_numpy(np.where(np.isnan(D), untold, quantiles))


def _n_directions(
    gram: Float[Tensor, "n_prompts n_prompts"], n_entries: int
) -> Float[Tensor, ""]:
    """Return `(tr Σ)² / tr Σ²` of the covariance Σ, from inner products of departures.

    tr Σ² is estimated without bias for Gaussian departures (Srivastava 2005), and raised
    by its standard error: of few prompts, fewer directions are safe. NaN of fewer than
    four prompts.
    """
    n = len(gram)
    trace = gram.trace() / (n - 1)
    if n < _FEWEST_PROMPTS or float(trace) == 0:
        return torch.full_like(trace, torch.nan)
    of_square = gram.square().sum() / (n - 1) ** 2
    unbiased = (n - 1) ** 2 / ((n - 2) * (n + 1)) * (of_square - trace**2 / (n - 1))
    # Squares of n (n - 1) / 2 inner products, each with twice its own square as variance.
    raised = unbiased * (1 + math.sqrt(4 / (n * (n - 1))))
    directions: Tensor = trace**2 / raised.clamp_min(trace**2 / n_entries)
    return directions.clamp_min(1)


def _combination(
    L: Float[Tensor, "d_model d_model"],
    prompts: Float[Tensor, "n_prompts d_model d_model"],
) -> tuple[Float[Tensor, " n_prompts"], float]:
    """Return the weights of prompts closest to the lens, and the share that is left."""
    P = prompts.to(L).flatten(1)
    lens = L.flatten()
    # Prompts whose matrices are dependent share their weight.
    weights = torch.linalg.pinv(P @ P.mT, rtol=1e-9, hermitian=True) @ (P @ lens)
    left = lens - weights @ P
    return weights, float(left.norm() / lens.norm())


def _norms(
    matrices: Float[Tensor, "n_maps d_model d_model"],
) -> Float[Tensor, " n_maps"]:
    return torch.linalg.matrix_norm(matrices)


def _compared_facts(lens: UsableLens, trace: Trace) -> tuple[list[str], list[str]]:
    """Return what a lens says of itself and the trace contradicts, and remarks."""
    own_facts = {
        **described_for_lens(trace.model),
        "weights_digest": trace.provenance.get("weights_digest"),
    }
    differing: list[str] = []
    remarks: list[str] = []
    for name, meaning in _FACTS.items():
        fact = lens.metadata.get(name)
        if fact is None or own_facts.get(name) is None:
            remarks.append(f"it is not known whether {meaning}")
        elif fact != own_facts[name]:
            differing.append(f"{meaning} (`{name}` in its metadata)")
    try:
        check_lens_fits(lens, trace.model)
    except ValueError as error:
        differing.append(" ".join(str(error).split()))
    own_versions = trace.provenance.get("versions", {})
    versions = lens.metadata.get("versions", {})
    if not isinstance(versions, Mapping):
        versions = {}
    remarks += [
        f"it was made with {package} {version}, here is {own_versions.get(package)}"
        for package, version in versions.items()
        if version != own_versions.get(package)
    ]
    return differing, remarks
