"""Steering along directions: what it does, what the derivative says, and controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import Count, Positive, Seed, checked, made_by
from tl_coupling.blocks import Trace, trace
from tl_coupling.directions.downstream import carry, change_of_logits
from tl_coupling.directions.effects import (
    Effects,
    kl,
    log_probabilities,
    rows_at_once,
)
from tl_coupling.directions.interventions import (
    Directions,
    own_facts,
    steering_hooks,
)
from tl_coupling.directions.onward import Onward
from tl_coupling.directions.random_directions import span_vectors, unit_vectors
from tl_coupling.jacobians import block_jacobians
from tl_coupling.measures import seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompts, as_prompts
from tl_coupling.results import DifferentPrompts, ShortTable, interval_text
from tl_coupling.spectra import eigh

if TYPE_CHECKING:
    import pandas

SIGNS = (1, -1)


@made_by("directions.steer(model, prompts, directions)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Steering(Effects):
    r"""What steering along directions does to a model's next token, with controls.

    The stream at one token is moved by `± ε ‖h‖ v`, and the model's prediction at that
    token is compared with its own. Controls are moved as far. Of the two signs, + is
    the first.

    Attributes:
        kl: `KL(unchanged ‖ steered)` of the next token, in nats.
        surprise: change of `−log p` of the token that the unchanged model finds most
            likely, in nats: its probability becomes `p · exp(−surprise)`.
        logit_difference: change of the difference of the two largest logits of the
            unchanged model.
        predicted_kl: `½ ε² ‖h‖² gᵀ(diag p − ppᵀ)g`, with g the derivative of the logits
            along v. The measured one tends to it as ε falls.
        amplification: `‖P v‖`, how much longer v is where it leaves the last block.
        alignment: `gᵀ(diag p − ppᵀ)g / ‖P v‖²`, how much the prediction depends on what
            arrives there.
        kinds: of each direction: "direction", or its control: "random", of the whole
            stream; "rotated", in the span of several directions; "low_gain", in that of
            the half of the block's singular vectors with the smaller gains;
            "activations", drawn as the stream's activations vary.
        scales: ε.
        prompts: ids.
        provenance: how it was made; JSON-able.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=1, k=2)
        >>> result = tlc.directions.steer(model, ["w1 w2 w3", "w4 w5"], directions, n_draws=3)
        >>> result.kl.shape  # directions and 4 controls of 3, scales, signs, prompts
        torch.Size([14, 3, 2, 2])
        >>> result.against("random").estimate.shape
        (3,)
        >>> path = result.save("steering.nc")
        >>> tlc.directions.Steering.load(path).scales == result.scales
        True
    """

    kl: Float[Tensor, "n_directions n_scales n_signs n_prompts"]
    surprise: Float[Tensor, "n_directions n_scales n_signs n_prompts"]
    logit_difference: Float[Tensor, "n_directions n_scales n_signs n_prompts"]
    predicted_kl: Float[Tensor, "n_directions n_scales n_prompts"]
    amplification: Float[Tensor, "n_directions n_prompts"]
    alignment: Float[Tensor, "n_directions n_prompts"]
    kinds: tuple[str, ...]
    scales: tuple[float, ...]
    prompts: tuple[str, ...]
    provenance: dict[str, Any]
    FIRST: ClassVar = "direction"
    EFFECTS: ClassVar = ("kl", "predicted_kl", "surprise", "logit_difference")
    DIMS: ClassVar = {
        **dict.fromkeys(
            ("kl", "surprise", "logit_difference"), "direction scale sign prompt"
        ),
        "predicted_kl": "direction scale prompt",
        "amplification": "direction prompt",
        "alignment": "direction prompt",
        "kinds": "direction",
        "scales": "scale",
        "prompts": "prompt",
    }

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return one row for each kind and scale: means, and intervals over prompts.

        `draws_low` and `draws_high` are the smallest and the largest mean of a draw,
        both signs together.

        Example:
            >>> directions = tlc.directions.directions_of(trace, layer=1, k=2)
            >>> prompts = ["w1 w2 w3", "w4 w5"]
            >>> result = tlc.directions.steer(model, prompts, directions, scales=[0.1])
            >>> result.to_dataframe().kind.tolist()
            ['direction', 'random', 'rotated', 'low_gain', 'activations']
        """
        import pandas

        rows: list[dict[str, object]] = []
        for kind in dict.fromkeys(self.kinds):
            interval, less = self._intervals(kind)
            predicted = self.of(kind, "predicted_kl").mean(0)
            drawn = self.draws(kind)
            for i, scale in enumerate(self.scales):
                rows.append(
                    {
                        "kind": kind,
                        "scale": scale,
                        "kl": interval.estimate[i],
                        "kl_low": interval.low[i],
                        "kl_high": interval.high[i],
                        "draws_low": drawn[:, i].min(),
                        "draws_high": drawn[:, i].max(),
                        "predicted_kl": predicted[i],
                        "direction_less_this": less.estimate[i],
                        "direction_less_this_low": less.low[i],
                        "direction_less_this_high": less.high[i],
                        "n_prompts": len(self.prompts),
                    }
                )
        return pandas.DataFrame(rows)

    def _drawn(
        self, kind: str | None, effect: str | None
    ) -> Float[np.ndarray, "n_draws n_scales n_prompts"]:
        """Return an effect of each direction of a kind, mean over both signs."""
        drawn = super()._drawn(kind, effect)
        # Even in ε, the prediction is the same for both signs, and has no axis of them.
        return drawn if effect == "predicted_kl" else drawn.mean(2)

    def table(self) -> ShortTable:
        """Return what each kind of direction does to the next token, at every scale."""
        rows = [
            [
                # A kind is named in the first of its rows alone.
                line["kind"] if line["scale"] == self.scales[0] else "",
                f"{line['scale']:.3g}",
                f"{line['kl']:.3g}",
                f"{line['predicted_kl']:.3g}",
                interval_text(
                    line["direction_less_this_low"],
                    line["direction_less_this_high"],
                    ".3g",
                ),
            ]
            for line in self.to_dataframe().to_dict("records")
        ]
        caption = (
            f"KL of the next token in nats, mean over {len(self.prompts)} prompts\n"
            "difference: singular vectors minus this, 95 % t interval over prompts"
        )
        numbers = ["ε", "KL", "predicted", "difference"]
        title = f"{self.provenance['model']}: steering"
        return ShortTable.of(title, ["along"], numbers, rows, caption)

    def _summary(self) -> str:
        n = self.kinds.count("direction")
        kl_of = self.of("direction")[:, -1].mean()
        kl_of_random = self.of("random")[:, -1].mean()
        return (
            f"{n} directions, {len(self.prompts)} prompts; "
            f"at ε = {self.scales[-1]:g}: KL {kl_of:.3g} nats, random {kl_of_random:.3g}"
        )


@checked
def steer(
    model: nn.Module,
    prompts: Prompts,
    directions: Directions,
    scales: Sequence[Positive] = (0.03, 0.1, 0.3),
    *,
    position: int = -1,
    n_draws: Count = 20,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    progress: Progress | None = None,
) -> Steering:
    r"""Steer a model along directions, and along controls, at one token of each prompt.

    .. math::

        h_t \leftarrow h_t \pm \varepsilon \|h_t\| v, \qquad
        \mathrm{KL} \approx \tfrac12 \varepsilon^2 \|h_t\|^2
        \, g^\top (\mathrm{diag}\, p - p p^\top) g

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, token ids (a list or a tensor each) or `Prompt` objects.
        directions: at their hook point they are added; `directions_of` makes them, and
            `Directions.of` takes any. Of the prompt that they were found on nothing is
            assumed.
        scales: ε.
        position: the token that is moved and whose prediction is read; the last by
            default.
        n_draws: how many directions of each control are drawn.
        seed: of the draws.
        prepend_bos: as in `trace`.
        progress: wraps the loop over prompts.

    Raises:
        ValueError: no prompts, one twice, no scales, a position out of range, directions
            of a model with other weights or of another width.

    Cost: for each prompt the Jacobians from the layer on, and for every direction, draw,
    scale and sign a pass of the later blocks on the one token, in batches. Of a model
    whose rest cannot be run so, or does not give the whole model's prediction, a pass of
    the whole model each.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=0, k=2)
        >>> result = tlc.directions.steer(model, ["w1 w2 w3"], directions, [0.01, 0.1])
        >>> ratio = result.of("direction", "kl") / result.of("direction", "predicted_kl")
        >>> bool(abs(ratio[0, 0] - 1) < 0.1)
        True
    """
    directions.check_fits(model)
    if not scales:
        raise ValueError("`scales` is empty: wanted at least one")
    named_prompts = as_prompts(prompts)
    different = DifferentPrompts("prompts")
    places = []
    for prompt in with_progress(named_prompts, progress, "tracing"):
        traced = trace(model, prompt, prepend_bos=prepend_bos)
        different.add_traced(traced)
        places.append(_Place.from_trace(traced, directions, position))
    # All prompts are traced by now: controls are drawn from the streams of all.
    generator = seeded(seed)
    vectors, kinds = _add_controls(directions, places, n_draws, generator)
    steered = [
        _steered(place, vectors, directions, scales)
        for place in with_progress(places, progress, "steering")
    ]
    provenance = directions.provenance
    if own := own_facts(provenance):
        provenance = different.provenance | own
    return Steering(
        kl=torch.stack([prompt_effects.kl for prompt_effects in steered], -1),
        surprise=torch.stack(
            [prompt_effects.surprise for prompt_effects in steered], -1
        ),
        logit_difference=torch.stack(
            [prompt_effects.logit_difference for prompt_effects in steered], -1
        ),
        predicted_kl=torch.stack(
            [prompt_effects.predicted_kl for prompt_effects in steered], -1
        ),
        amplification=torch.stack(
            [prompt_effects.amplification for prompt_effects in steered], -1
        ),
        alignment=torch.stack(
            [prompt_effects.alignment for prompt_effects in steered], -1
        ),
        kinds=kinds,
        scales=tuple(scales),
        prompts=tuple(prompt.id for prompt in named_prompts),
        provenance={
            **provenance,
            "hook_point": directions.hook_point,
            "position": position,
            "n_draws": n_draws,
            "seed": seed,
        },
    )


class _Place(NamedTuple):
    """One token of one prompt, where directions are added.

    Attributes:
        trace: the prompt.
        position: the token, from 0.
        J: of the block whose directions these are, and of all later ones.
        first: how many of these the directions do not pass: 1 on the write side.
    """

    trace: Trace
    position: int
    J: Float[Tensor, "n_layers d d"]
    first: int

    @classmethod
    def from_trace(
        cls, traced: Trace, directions: Directions, position: int
    ) -> "_Place":
        t = traced.position_index(position)
        # The block's own J says which gains are low, the later ones what becomes of a
        # step.
        layers = range(traced.layer_index(directions.layer), traced.n_layers)
        J = block_jacobians(traced, layers, position=t, progress=False)
        return cls(traced, t, J, 1 if directions.side == "write" else 0)

    @property
    def row(self) -> slice:
        """The position, as a slice."""
        return slice(self.position, self.position + 1)

    def stream(self, directions: Directions) -> Float[Tensor, "n_pos d_model"]:
        """Return the stream where the directions are added."""
        # Depth l is what enters block l; what it wrote is there one depth later.
        return self.trace.residual[directions.layer + self.first]


def _add_controls(
    directions: Directions,
    places: Sequence[_Place],
    n_draws: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "n d"], tuple[str, ...]]:
    """Return the directions and those of all controls, and the kind of each."""
    own = directions.vectors
    d = own.shape[1]
    span = torch.linalg.qr(own.mT).Q
    low_gain = _low_gains(directions, places)
    stream = torch.cat([_later_tokens(place.stream(directions)) for place in places])
    centred = (stream - stream.mean(0)).to(own)
    # Random sums of centred rows vary as the stream's activations do.
    mixed = torch.randn(n_draws, len(centred), generator=generator).to(own) @ centred
    drawn = {
        "direction": own,
        "random": unit_vectors(n_draws, d, generator).to(own),
        "rotated": span_vectors(n_draws, span, generator),
        "low_gain": span_vectors(n_draws, low_gain.to(own), generator),
        "activations": mixed,
    }
    if len(own) == 1:
        # All that is in the span of one direction is that direction.
        del drawn["rotated"]
    if not bool(centred.any()):
        # One token alone does not vary.
        del drawn["activations"]
    kinds = [kind for kind, vectors in drawn.items() for _ in vectors]
    vectors = torch.cat(list(drawn.values()))
    return vectors / vectors.norm(dim=1, keepdim=True), tuple(kinds)


def _low_gains(
    directions: Directions, places: Sequence[_Place]
) -> Float[Tensor, "d half"]:
    """Return the singular vectors of smaller gain of the block, over all prompts."""
    J = torch.stack([place.J[0] for place in places]).double()
    # Gains of what is written are those of the left singular vectors.
    if directions.side == "write":
        J = J.mT
    gram = (J.mT @ J).mean(0)
    # Eigenvalues ascend.
    _, eigenvectors = eigh(gram)
    return eigenvectors[:, : len(gram) // 2]


def _later_tokens(
    stream: Float[Tensor, "n_pos d_model"],
) -> Float[Tensor, "n_rows d_model"]:
    """Return the rows of all tokens but the first, which is many times longer than
    others where attention sinks into it; of one token, its row.
    """
    return stream[1:] if len(stream) > 1 else stream


class _Steered(NamedTuple):
    """Effects on one prompt."""

    kl: Float[Tensor, "n n_scales n_signs"]
    surprise: Float[Tensor, "n n_scales n_signs"]
    logit_difference: Float[Tensor, "n n_scales n_signs"]
    predicted_kl: Float[Tensor, "n n_scales"]
    amplification: Float[Tensor, " n"]
    alignment: Float[Tensor, " n"]


def _steered(
    place: _Place,
    vectors: Float[Tensor, "n d"],
    directions: Directions,
    scales: Sequence[float],
) -> _Steered:
    """Measure the effects on one prompt, and predict them."""
    # Both signs of one scale after the other: `[scale sign]` once it is unfolded.
    steps = [scale * sign for scale, sign in product(scales, SIGNS)]
    h = place.stream(directions)[place.position].double()
    # The moved streams have shape `[n_vectors n_steps d_model]`.
    moved = h + h.norm() * torch.einsum(
        "s,nd->nsd", torch.tensor(steps).to(h), vectors.to(h)
    )
    onward = Onward(place.trace, directions.layer + place.first, place.position)
    whole = _Whole(place.trace.model, place, directions.hook_point)
    # One step is made in both ways, by hooks in the whole model and in its rest.
    if onward.agrees(moved[0, -1], whole.log_probabilities(vectors[:1], steps[-1])[0]):
        log_p_before = onward.log_probabilities(h[None])[0]
        effects = onward.measure_batches(
            moved.flatten(0, 1), partial(_effects, log_p_before)
        )
    else:
        log_p_before = whole.unchanged()
        effects = whole.measure_steps(vectors, steps, partial(_effects, log_p_before))
    sign_effects = effects.reshape(len(vectors), len(scales), len(SIGNS), -1)
    # On the write side the first block has run already.
    arrived = carry(place.J[place.first :], vectors)
    amplification = arrived.norm(dim=1).double()
    change = change_of_logits(place.trace, arrived, place.position).double()
    p = log_p_before.exp().to(change)
    # `gᵀ(diag p − ppᵀ)g` is the variance of the logits' change under p.
    variance = (change.square() @ p) - (change @ p).square()
    distances = torch.tensor(scales).double().to(h) * h.norm()
    return _Steered(
        kl=sign_effects[..., 0],
        surprise=sign_effects[..., 1],
        logit_difference=sign_effects[..., 2],
        predicted_kl=variance[:, None] * distances.square() / 2,
        amplification=amplification,
        alignment=variance / amplification.square(),
    )


class _Whole(NamedTuple):
    """The whole model with the directions added by hooks at one token.

    Attributes:
        model: with TransformerLens's hooks.
        place: the token.
        name: the hook point.
    """

    model: nn.Module
    place: _Place
    name: str

    def log_probabilities(
        self, vectors: Float[Tensor, "n d"], scale: float
    ) -> Float[Tensor, "n d_vocab"]:
        """Return the prediction after one step along each vector."""
        tokens = self.place.trace.tokens
        assert tokens is not None
        hooks = steering_hooks(vectors, scale, self.name, self.place.position)
        return log_probabilities(
            self.model, tokens, hooks, len(vectors), self.place.row
        )[:, 0]

    def unchanged(self) -> Float[Tensor, " d_vocab"]:
        """Return the model's own prediction."""
        tokens = self.place.trace.tokens
        assert tokens is not None
        return log_probabilities(self.model, tokens, positions=self.place.row)[0, 0]

    def measure_steps(
        self,
        vectors: Float[Tensor, "n d"],
        steps: Sequence[float],
        measure: Callable[[Float[Tensor, "n d_vocab"]], Float[Tensor, "n effect"]],
    ) -> Float[Tensor, "n_rows effect"]:
        """Return what is measured of the predictions, for each vector and step."""
        n_pos = self.place.trace.n_pos
        d_vocab = len(self.unchanged())
        batches = vectors.split(rows_at_once(n_pos, d_vocab))
        step_effects = [
            torch.cat([measure(self.log_probabilities(b, step)) for b in batches])
            for step in steps
        ]
        # Rows go vector by vector, as those for `Onward` do.
        return torch.stack(step_effects, dim=1).flatten(0, 1)


def _effects(
    log_p_before: Float[Tensor, " d_vocab"], log_p_after: Float[Tensor, "n d_vocab"]
) -> Float[Tensor, "n effect"]:
    """Return KL, surprise and logit difference of each prediction."""
    first, second = log_p_before.topk(2).indices.tolist()
    surprise = log_p_before[first] - log_p_after[:, first]
    # Differences of log-probabilities are differences of logits.
    margin = (
        log_p_after[:, first]
        - log_p_after[:, second]
        - (log_p_before[first] - log_p_before[second])
    )
    return torch.stack([kl(log_p_before, log_p_after), surprise, margin], dim=1)
