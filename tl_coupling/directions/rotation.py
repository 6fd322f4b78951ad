"""Rotating what blocks read or write: how much hangs on how blocks stand to each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import cos, radians, sin
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import (
    Count,
    Finite,
    Seed,
    at_least,
    checked,
    made_by,
)
from tl_coupling.blocks import trace
from tl_coupling.directions.effects import (
    Effects,
    kl,
    log_probabilities,
    losses,
    measured_model,
    rows_at_once,
    tokens_by_id,
)
from tl_coupling.directions.interventions import (
    RotatedSide,
    check_layers_differ,
    check_takes_hooks,
    rotation_hooks,
)
from tl_coupling.jacobians import chosen_layers
from tl_coupling.measures import random_rotations, seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompts, as_prompts
from tl_coupling.results import ROTATIONS, ShortTable, interval_text, plural

# How much memory the rotations of one pass may take.
_BYTES_OF_ROTATIONS = 200_000_000


@made_by("directions.rotate(model, prompts)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Rotation(Effects):
    """What a model loses where blocks read or write in rotated directions.

    Attributes:
        loss: of the unchanged model on each prompt: mean negative log-likelihood per
            token, in nats.
        loss_change: the loss with blocks rotated, less `loss`, `[condition prompt]`.
        kl: `KL(unchanged ‖ rotated)` of the next token, mean over tokens, in nats.
        kinds: of each condition: "together", one rotation for all layers; "apart", a
            rotation of its own for each; "alone", that of a single layer; "shrunk", of
            which there is one, multiplied by cos θ instead, which loses as much and
            adds nothing.
        layers: where, at all of them in one pass.
        prompts: ids.
        side: "read", "write" or "both".
        angle: θ in degrees.
        provenance: how it was made; JSON-able.

    Example:
        >>> result = tlc.directions.rotate(model, ["w1 w2 w3", "w4 w5"], n_draws=3)
        >>> result.loss_change.shape
        torch.Size([7, 2])
        >>> result.against("apart").estimate.shape
        ()
        >>> tlc.directions.Rotation.load(result.save("rotation.nc")).side
        'write'
    """

    loss: Float[Tensor, " n_prompts"]
    loss_change: Float[Tensor, "n_conditions n_prompts"]
    kl: Float[Tensor, "n_conditions n_prompts"]
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    prompts: tuple[str, ...]
    side: RotatedSide
    angle: float
    provenance: dict[str, Any]
    FIRST: ClassVar = "first"
    EFFECTS: ClassVar = ("loss_change", "kl")
    DIMS: ClassVar = {
        "loss": "prompt",
        **dict.fromkeys(EFFECTS, "condition prompt"),
        "kinds": "condition",
        "layers": "layer",
        "prompts": "prompt",
    }

    def table(self) -> ShortTable:
        """Return what the model loses, a row for each kind of rotation."""
        rows = [
            [
                ROTATIONS[line["kind"]],
                f"{line['loss_change']:+.3f}",
                interval_text(line["low"], line["high"], ".3f"),
                interval_text(
                    line["first_less_this_low"], line["first_less_this_high"], ".3f"
                ),
                f"{line['kl']:.3f}",
            ]
            for line in self.to_dataframe().to_dict("records")
        ]
        caption = (
            f"mean over {plural(len(self.prompts), 'prompt')}, loss "
            f"{float(self.loss.mean()):.2f} nats; KL of the next token\n"
            "intervals: 95 % t over prompts; difference: the first row minus this"
        )
        title = (
            f"{self.provenance['model']}: {plural(len(self.layers), 'layer')} rotated "
            f"by {self.angle:g}°, {self.side} side"
        )
        numbers = ["loss", "interval", "difference", "KL"]
        return ShortTable.of(title, ["blocks"], numbers, rows, caption)

    def _summary(self) -> str:
        return (
            f"{self.side} side by {self.angle:g}°, {len(self.layers)} layers, "
            f"{len(self.prompts)} prompts: loss {float(self.loss.mean()):.2f} "
            f"{self.of().mean():+.3g} nats ({self.kinds[0]})"
        )


@checked
def rotate(
    model: nn.Module,
    prompts: Prompts,
    layers: Sequence[int] | None = None,
    side: RotatedSide = "write",
    *,
    angle: Finite = 90.0,
    first_position: Annotated[int, at_least(0)] = 0,
    n_draws: Count = 20,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    progress: Progress | None = None,
) -> Rotation:
    r"""Rotate what blocks read or write, and measure what the model loses.

    .. math::

        \text{write: } R f(h), \qquad \text{read: } f(R h), \qquad
        \text{both: } R f(R^\top h), \qquad
        R = \cos\theta\, I + \sin\theta\, K

    K is a random skew-symmetric matrix with `K² = −I`: R is orthogonal, and turns every
    vector by the angle θ. The skip connection keeps what it has. A block's Jacobian
    becomes `R J` (write), `J R` (read, with J at R h) or `R J Rᵀ` (both, with J at Rᵀ
    h): singular values of a given J stay as they are. Two rotations are compared, by
    the same angle at every block:

    - *together*, one R for all layers. The coupling matrices `Uᵀ J V` of these blocks
      stay as they are, on each side, as R moves the singular vectors of all blocks
      alike. On one side what a block writes no longer stands to what the next reads as
      it did; with "both" it does, and only the embedding, the unembedding and other
      layers are where they were.
    - *apart*, an R of its own for each layer: coupling between them is destroyed, by
      90° down to what random subspaces have.

    If what matters is that blocks are coupled, together costs less than apart. Both
    also move the stream, and not as far: displacements of one rotation add up where
    blocks write alike, those of several do not. "shrunk" multiplies by cos θ in place of
    R: it loses what R loses, and adds nothing. Of blocks that read through a norm, it
    changes little on the read side.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, token ids (a list or a tensor each) or `Prompt` objects, of at
            least two tokens.
        layers: the blocks, rotated in one pass; all by default. Of a single one,
            rotations are "alone".
        side: what is rotated.
        angle: θ in degrees. With 90 nothing is left of a vector in its own direction,
            as after a Haar-random rotation of a wide stream; 180 is `R = −I`, 0
            changes nothing. Where the width is odd, one direction stays.
        first_position: tokens before it are left as they are, as in `ablate`.
        n_draws: how many rotations of each kind are drawn.
        seed: of the draws.
        prepend_bos: as in `trace`.
        progress: wraps the loop over batches of rotations.

    Raises:
        ValueError: no prompts, a prompt of one token, without a token from
            `first_position` on, or there twice; no layers, one twice or out of range.

    Cost: for each prompt a trace and `2 + 2 · n_draws` passes of the model, in batches;
    a QR decomposition in float64, `[d_model d_model]`, for each layer and draw; memory
    for `d_model²` numbers for each layer and row of a batch.

    Example:
        >>> nothing = tlc.directions.rotate(model, ["w1 w2 w3"], angle=0, n_draws=1)
        >>> bool(abs(nothing.loss_change).max() < 1e-6)
        True

    Source: this package's; the coupling that it keeps or destroys is the paper's.
    """
    check_takes_hooks(model)
    tokens = tokens_by_id(model, as_prompts(prompts), prepend_bos, first_position)
    # The first prompt's trace names the model, and knows its layers.
    model = measured_model(model, tokens.values())
    traced = trace(model, next(iter(tokens.values())))
    chosen = chosen_layers(traced, layers)
    check_layers_differ(chosen)
    conditions = _conditions(traced.d_model, chosen, angle, n_draws, seeded(seed))
    kinds = _kinds(chosen, n_draws)
    before = {
        name: losses(log_probabilities(model, ids, dtype=torch.float32), ids)
        for name, ids in tokens.items()
    }
    n_rows = _rows_of_batch(model, tokens, len(chosen), traced.d_model)
    changes: list[Tensor] = []
    divergences: list[Tensor] = []
    for _ in with_progress(
        range(0, len(kinds), n_rows), progress, "rotations of blocks"
    ):
        batch = list(islice(conditions, n_rows))
        rotations = {
            layer: torch.stack([condition[layer] for condition in batch])
            for layer in chosen
        }
        hooks = rotation_hooks(rotations, side, first_position)
        of_prompts = []
        for name, ids in tokens.items():
            log_p = log_probabilities(model, ids, dtype=torch.float32)
            log_p_rotated = log_probabilities(
                model, ids, hooks, len(batch), dtype=torch.float32
            )
            change = losses(log_p_rotated, ids) - before[name]
            of_prompts.append((change, kl(log_p, log_p_rotated).mean(1)))
        change, divergence = (
            torch.stack(effects, -1) for effects in zip(*of_prompts, strict=True)
        )
        changes.append(change.cpu())
        divergences.append(divergence.cpu())
    return Rotation(
        loss=torch.cat(list(before.values())).cpu(),
        loss_change=torch.cat(changes),
        kl=torch.cat(divergences),
        kinds=kinds,
        layers=tuple(chosen),
        prompts=tuple(tokens),
        side=side,
        angle=float(angle),
        provenance={
            "model": traced.provenance.get("model"),
            "weights_digest": traced.provenance.get("weights_digest"),
            "first_position": first_position,
            "n_draws": n_draws,
            "seed_of_draws": seed,
        },
    )


def _rows_of_batch(
    model: Any, tokens: Mapping[str, Tensor], n_layers: int, d_model: int
) -> int:
    """Return how many conditions have logits and rotations that fit into memory."""
    longest = max(map(len, tokens.values()))
    n_rows = rows_at_once(longest, model.cfg.d_vocab)
    bytes_of_row = n_layers * d_model**2 * torch.float32.itemsize
    return max(1, min(n_rows, _BYTES_OF_ROTATIONS // bytes_of_row))


def _kinds(layers: Sequence[int], n_draws: int) -> tuple[str, ...]:
    """Return the kinds of the conditions, in the order in which they are drawn."""
    if len(layers) == 1:
        return (*["alone"] * n_draws, "shrunk")
    return (*["together"] * n_draws, *["apart"] * n_draws, "shrunk")


def _conditions(
    d: int,
    layers: Sequence[int],
    angle: float,
    n_draws: int,
    generator: torch.Generator,
) -> Iterator[dict[int, Float[Tensor, "d d"]]]:
    """Draw what each condition multiplies by, for each layer, in the order of `_kinds`."""
    if len(layers) > 1:
        for _ in range(n_draws):
            yield dict.fromkeys(layers, random_rotation(d, angle, generator))
    for _ in range(n_draws):
        yield {layer: random_rotation(d, angle, generator) for layer in layers}
    yield dict.fromkeys(layers, cos(radians(angle)) * torch.eye(d))


def random_rotation(
    d: int, angle: float, generator: torch.Generator
) -> Float[Tensor, "d d"]:
    """Return a random orthogonal matrix that turns every vector by an angle in degrees.

    It is `cos θ I + sin θ K`, with K a quarter turn in planes that are drawn at random.
    """
    Q = random_rotations(d, generator=generator)
    n_planes = d // 2
    first, second = Q[:, :n_planes], Q[:, n_planes : 2 * n_planes]
    K = first @ second.mT - second @ first.mT
    # The directions in no plane: one where d is odd.
    fixed = Q[:, 2 * n_planes :]
    theta = radians(angle)
    R = cos(theta) * torch.eye(d).double() + sin(theta) * K
    R = R + (1 - cos(theta)) * fixed @ fixed.mT
    return R.float()
