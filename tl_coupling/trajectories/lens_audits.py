"""How far a Jacobian lens can be trusted: whether it is of the model that was traced, and
how well its matrices are known.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.models import JacobianLens, check_takes_lens, described_for_lens
from tl_coupling.progress import Progress, with_progress
from tl_coupling.results import Saved, tidy_table
from tl_coupling.trajectories.lenses import (
    SEVERAL_TRACES,
    LensEstimate,
    checked_trace,
)

if TYPE_CHECKING:
    import pandas

# In times of the distance that is expected of a lens, how far it may lie from prompts.
_FARTHEST = 2.0
# The rounding of a lens that was saved in float16.
_ROUNDING = 1e-3
# Below this share of a lens that prompts do not explain, it is a mean of theirs.
_UNEXPLAINED = 0.02
# What must be the same where both say it; the names of faults.
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
            ("halves", "spread", "distance_from_mean", "expected_distance"),
            "layer",
        ),
        "distance": "prompt layer",
        "prompt_weights": "prompt",
        "layers": "layer",
    }

    @property
    def farthest(self) -> Float[Tensor, " n_maps"]:
        """Twice the expected distance, beyond which a lens is taken for another's."""
        return _FARTHEST * self.expected_distance + _ROUNDING

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
        far = self._layers_where(self.distance_from_mean > self.farthest)
        if far:
            ratio = float((self.distance_from_mean / self.expected_distance).max())
            found.append(
                f"at {far} it lies up to {ratio:.1f} times as far from these prompts' "
                "Jacobians as is expected (other weights, another rotary embedding, "
                "other text, or fewer prompts than it says)"
            )
        n_prompts = len(self.prompt_weights)
        n_used = int((self.prompt_weights > 0.5 / n_prompts).sum())
        is_of_these = self.unexplained < _UNEXPLAINED
        if is_of_these and n_used < min(n_prompts, self.lens_n_prompts):
            found.append(
                f"it is made of {n_used} of these {n_prompts} prompts, and says "
                f"{self.lens_n_prompts}"
            )
        few = self._layers_where(self.needed_prompts > self.lens_n_prompts)
        if few:
            most = float(self.needed_prompts.max())
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
        return (
            "Nothing speaks against the lens: it lies as far from these "
            f"{len(self.distance)} prompts as a mean of {self.lens_n_prompts} of their "
            f"kind would, with an error of at most {worst:.1%}."
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
        }
        columns = {"distance": ("prompt layer", self.distance)}
        columns |= {name: ("layer", values) for name, values in by_layer.items()}
        columns["prompt_weight"] = ("prompt", self.prompt_weights)
        return tidy_table(columns, {"layer": self.layers}, self.provenance)

    def _summary(self) -> str:
        return (
            f"{len(self.layers)} layers, {len(self.distance)} prompts; {self.verdict}"
        )

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
    `product_lens`; without metadata as `JacobianLens.fit` does by default). A lens of
    other weights, or of another rotary embedding, lies farther from M than a mean of
    n_L prompts could; where the lens has a digest of its weights, or what its rotary
    embedding was, that is compared too. Text of another kind looks the same as other
    weights: take prompts like those that the lens was fitted on.

    Args:
        lens: a `JacobianLens` of TransformerLens, fitted, loaded or from `product_lens`.
        traces: at least two prompts traced with the model, with raw weights and without
            `final_norm`. More make it sharper; they need not be, but
            may be, prompts of the lens.
        accuracy: the relative error that is wanted of the lens.
        progress: as in `product_lens`.

    Raises:
        ValueError: fewer than two traces, accuracy not in (0, 1], a lens of another
            width or without a layer of the model; and as `product_lens`.
        TypeError: as `product_lens`.

    Cost: as `product_lens`; memory for `(5 L + n) d²` numbers in float64.

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
    estimate = LensEstimate.of_lens(lens)
    prompts: _Prompts | None = None
    first: Trace | None = None
    for item in with_progress(traces, progress, "prompts"):
        trace = checked_trace(item, first)
        if prompts is None:
            check_takes_lens(trace.model, trace.d_model)
            first = trace
            prompts = _Prompts(_matrices(lens, trace))
        if not estimate.has_tokens(trace):
            raise ValueError(
                f"`traces` must be longer than {estimate.skip_first_positions + 1} "
                f"tokens, which this lens leaves out, got {trace.n_pos}"
            )
        prompts.add(estimate.of_prompt(trace))
    if first is None or prompts is None or prompts.n < 2:
        n_prompts = 0 if prompts is None else prompts.n
        raise ValueError(
            f"`traces` must hold at least two traced prompts, got {n_prompts}"
        )
    differing, remarks = _compared_facts(lens, first)
    return LensAudit(
        **prompts.measured(lens.n_prompts),
        facts_that_differ=tuple(differing),
        remarks=tuple(remarks),
        lens_n_prompts=lens.n_prompts,
        accuracy=accuracy,
        layers=tuple(range(first.n_layers - 1)),
        provenance={
            **first.provenance,
            "estimator": estimate.metadata(),
            "lens": {str(name): fact for name, fact in lens.metadata.items()},
        },
    )


def _matrices(
    lens: JacobianLens, trace: Trace
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
    matrices = torch.stack([lens.jacobians[layer] for layer in wanted])
    return matrices.double().to(trace.blocks[0].X.device)


class _Prompts:
    """Sums over prompts, which are forgotten, but for their first layer's matrices."""

    def __init__(self, lens: Float[Tensor, "n_maps d_model d_model"]) -> None:
        self.lens = lens
        self.n = 0
        # Of every other prompt.
        self.sums = [torch.zeros_like(lens), torch.zeros_like(lens)]
        self.squares = torch.zeros(len(lens), dtype=torch.float64, device=lens.device)
        self.distances: list[Tensor] = []
        self.first_layer: list[Tensor] = []

    def add(self, P: Float[Tensor, "n_maps d_model d_model"]) -> None:
        """Take the matrices of a prompt."""
        sizes = _norms(P)
        self.sums[self.n % 2] += P
        self.squares += sizes.square()
        self.distances.append(_norms(P - self.lens) / sizes)
        self.first_layer.append(P[0].flatten())
        self.n += 1

    def measured(self, lens_n_prompts: int) -> dict[str, Any]:
        """Return the numbers of an audit."""
        n = self.n
        even, odd = self.sums
        mean = (even + odd) / n
        size = _norms(mean)
        halves = _norms(even / math.ceil(n / 2) - odd / (n // 2)) / size
        # Where all prompts are alike, rounding leaves less than nothing.
        between = (self.squares - n * size.square()).clamp_min(0) / (n - 1)
        # The mean of n prompts is longer than that of all there are: it has their noise.
        size_of_all = (size.square() - between / n).clamp_min(0).sqrt()
        spread = between.sqrt() / size_of_all
        # Zero by zero: prompts without any matrix, which do not lie apart.
        spread = spread.nan_to_num(nan=0.0, posinf=torch.inf)
        scale = math.sqrt(1 / n + 1 / lens_n_prompts)
        weights, unexplained = self._combination()
        return {
            "halves": halves.cpu(),
            "spread": spread.cpu(),
            "distance": torch.stack(self.distances).cpu(),
            "distance_from_mean": (_norms(self.lens - mean) / size).cpu(),
            "expected_distance": (between.sqrt() / size * scale).cpu(),
            "prompt_weights": weights.cpu(),
            "unexplained": unexplained,
        }

    def _combination(self) -> tuple[Float[Tensor, " n_prompts"], float]:
        """Return the weights of prompts closest to the lens, and the share that is left."""
        prompts = torch.stack(self.first_layer)
        lens = self.lens[0].flatten()
        gram = prompts @ prompts.mT
        # Prompts that are given twice share their weight.
        weights = torch.linalg.pinv(gram, rtol=1e-9, hermitian=True) @ (prompts @ lens)
        left = lens - weights @ prompts
        return weights, float(left.norm() / lens.norm())


def _norms(
    matrices: Float[Tensor, "n_maps d_model d_model"],
) -> Float[Tensor, " n_maps"]:
    return torch.linalg.matrix_norm(matrices)


def _compared_facts(lens: JacobianLens, trace: Trace) -> tuple[list[str], list[str]]:
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
        lens.validate_model(trace.model)
    except ValueError as error:
        differing.append(" ".join(str(error).split()))
    own_versions = trace.provenance.get("versions", {})
    versions = lens.metadata.get("versions", {})
    remarks += [
        f"it was made with {package} {version}, here is {own_versions.get(package)}"
        for package, version in versions.items()
        if version != own_versions.get(package)
    ]
    return differing, remarks
