"""Removing subspaces from what blocks read or write: what it costs, beside controls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import (
    Count,
    Seed,
    at_least,
    checked,
    made_by,
    warn_caller,
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
    Side,
    check_layers_differ,
    removal_hooks,
)
from tl_coupling.directions.projections import Projection
from tl_coupling.directions.random_directions import frames
from tl_coupling.directions.subspaces import SIDES, Subspace
from tl_coupling.measures import seeded
from tl_coupling.progress import Progress, with_progress
from tl_coupling.prompts import Prompts, as_prompts
from tl_coupling.results import ShortTable, interval_text

if TYPE_CHECKING:
    import pandas


@made_by("directions.ablate(model, prompts, subspace)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Ablation(Effects):
    """What a model loses without a subspace, beside controls of the same rank.

    Attributes:
        loss: of the unchanged model on each prompt: mean negative log-likelihood per
            token, in nats.
        loss_change: the loss with the subspace removed, less `loss`, `[condition
            prompt]`.
        kl: `KL(unchanged ‖ ablated)` of the next token, mean over tokens, in nats.
        removed: share of the energy that was removed, over the layers and tokens: of
            what blocks write, or of what they read less its mean.
        kinds: of each condition: "shared", or its control: "random", a subspace of the
            whole stream; "norm_matched", the same, scaled at each token to
            the length that the shared one would remove there, of the stream as this
            control has changed it; "principal", the leading principal directions of
            each block's own activations, of which there is one draw; "span", in the
            span of the 50 leading ones; "unshared", directions of each block that are
            orthogonal to the shared ones and have about their gains; "low_gain",
            directions of each block with small gains.
        layers: where it was removed, at all of them together.
        prompts: ids.
        side: "read", blocks read `h − (h − μ)BBᵀ` and the stream keeps h; "write", the
            stream gets `f − fBBᵀ`.
        rank: of the subspace and of all controls.
        provenance: how it was made; JSON-able.

    Example:
        >>> traces = [tlc.trace(model, prompt) for prompt in prompts]
        >>> subspace = tlc.directions.shared_subspace(traces, rank=2, k=4)
        >>> result = tlc.directions.ablate(model, ["w1 w2 w3", "w4 w5"], subspace, n_draws=3)
        >>> result.loss_change.shape  # the subspace, 5 controls of 3 draws and 1 of 1
        torch.Size([17, 2])
        >>> result.against("span").estimate.shape
        ()
        >>> tlc.directions.Ablation.load(result.save("ablation.nc")).side
        'write'
    """

    loss: Float[Tensor, " n_prompts"]
    loss_change: Float[Tensor, "n_conditions n_prompts"]
    kl: Float[Tensor, "n_conditions n_prompts"]
    removed: Float[Tensor, "n_conditions n_prompts"]
    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    prompts: tuple[str, ...]
    side: Side
    rank: int
    provenance: dict[str, Any]
    FIRST: ClassVar = "shared"
    EFFECTS: ClassVar = ("loss_change", "kl", "removed")
    DIMS: ClassVar = {
        "loss": "prompt",
        **dict.fromkeys(EFFECTS, "condition prompt"),
        "kinds": "condition",
        "layers": "layer",
        "prompts": "prompt",
    }

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return one row for each kind: means, and intervals over prompts.

        `draws_low` and `draws_high` are the smallest and the largest mean of a draw.

        Example:
            >>> subspace = tlc.directions.shared_subspace([trace], rank=2, k=4)
            >>> result = tlc.directions.ablate(model, ["w1 w2 w3", "w4 w5"], subspace, n_draws=2)
            >>> result.to_dataframe().kind.tolist()[:3]
            ['shared', 'random', 'norm_matched']
        """
        table = super().to_dataframe()
        removed = [self._drawn(kind, "removed").mean() for kind in table["kind"]]
        table.insert(1, "removed", removed)
        return table

    def table(self) -> ShortTable:
        """Return what the model loses without each kind of subspace."""
        rows = [
            [
                line["kind"],
                f"{line['removed']:.1%}",
                f"{line['loss_change']:+.3f}",
                f"{line['low']:+.3f} to {line['high']:+.3f}",
                interval_text(
                    line["shared_less_this_low"], line["shared_less_this_high"], ".3f"
                ),
            ]
            for line in self.to_dataframe().to_dict("records")
        ]
        caption = (
            f"rank {self.rank}, mean over {len(self.prompts)} prompts, loss "
            f"{float(self.loss.mean()):.2f} nats\n"
            "intervals: 95 % t over prompts; difference: shared minus this"
        )
        numbers = ["removed", "loss", "interval", "difference"]
        title = (
            f"{self.provenance['model']}: without what its blocks {self.side} in common"
        )
        return ShortTable.of(title, ["subspace"], numbers, rows, caption)

    def _summary(self) -> str:
        return (
            f"rank {self.rank}, {self.side} side, {len(self.layers)} layers, "
            f"{len(self.prompts)} prompts: loss {float(self.loss.mean()):.2f} "
            f"{self.of('shared').mean():+.3g} nats"
        )


@checked
def ablate(
    model: nn.Module,
    prompts: Prompts,
    subspace: Subspace,
    layers: Sequence[int] | None = None,
    side: Side | None = None,
    *,
    rank: Annotated[int, at_least(0)] | None = None,
    first_position: Annotated[int, at_least(0)] = 0,
    n_draws: Count = 20,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    progress: Progress | None = None,
) -> Ablation:
    r"""Remove a subspace from what blocks read, or from what they write.

    .. math::

        \text{read: } f(h - (h - \mu) B B^\top), \qquad
        \text{write: } f(h) - f(h) B B^\top

    The skip connection keeps what it has. Controls have the same rank. A random
    subspace of the whole stream holds a share `rank / d_model` of what is there, and
    flatters any other: the controls in the span of activations, and those with the same
    gains, are the ones to beat.

    Args:
        model: a TransformerBridge or HookedTransformer, in eval mode.
        prompts: texts, token ids (a list or a tensor each) or `Prompt` objects, of at
            least two tokens; others than those
            the subspace was found on.
        subspace: what `shared_subspace` found, or one's own, `Subspace.of`: then
            "shared" is the kind of its own effect.
        layers: where it is removed, at all of them together; those of the subspace by
            default.
        side: "read" or "write": by default that of one's own subspace, and "write" of
            a shared one.
        rank: how many of its directions, the first ones, which are the most shared; all
            by default.
        first_position: tokens before it are left as they are: with 1, the first token,
            which attention sinks into in many models and which is many times longer.
        n_draws: how many subspaces of each control are drawn.
        seed: of the draws.
        prepend_bos: as in `trace`.
        progress: wraps the loop over prompts.

    Raises:
        ValueError: no prompts, a prompt of one token, without a token from
            `first_position` on, or there twice; layers that the subspace does not have,
            or one twice; a rank that it does not have; a model with other weights or of
            another width.

    Cost: for each prompt `2 + 5 · n_draws` passes of the model, in batches; memory for
    `d_model · rank` numbers for each of them and layer. One's own subspace without
    `traces` takes the controls from these prompts: a trace and the Jacobians of its
    layers for each.

    Example:
        >>> subspace = tlc.directions.shared_subspace([trace], rank=4, k=4)
        >>> nothing = tlc.directions.ablate(model, ["w1 w2 w3"], subspace, rank=0)
        >>> bool(abs(nothing.of("shared")[0]) < 1e-6)
        True

    Source: `shared_subspace` for the directions; Geiger et al. 2021 for interventions
    on subspaces.
    """
    subspace.check_fits(model)
    rank = subspace.rank if rank is None else rank
    if rank > subspace.rank:
        raise ValueError(
            f"`rank` must be at most that of the subspace, {subspace.rank}, got {rank}"
        )
    chosen = subspace.layers if layers is None else tuple(layers)
    # The subspace knows nothing of other layers, such as their mean stream.
    missing = sorted(set(chosen) - set(subspace.layers))
    if missing or not chosen:
        raise ValueError(
            f"`layers` must be among those of the subspace, {list(subspace.layers)}, "
            f"at least one, got {list(chosen)}"
        )
    check_layers_differ(chosen)
    tokens_of_prompts = tokens_by_id(
        model, as_prompts(prompts), prepend_bos, first_position
    )
    model = measured_model(model, tokens_of_prompts.values())
    side = side or subspace.default_side
    if not subspace.span.shape[-1]:
        # μ stays that of the subspace, so that its hooks do the same.
        traces = (trace(model, tokens) for tokens in tokens_of_prompts.values())
        subspace = subspace.with_controls(traces, keep_mean=True)
    generator = seeded(seed)
    conditions = _conditions(subspace, chosen, side, rank, n_draws, generator)
    ablated = [
        _ablated(model, tokens, conditions, chosen, side, first_position)
        for tokens in with_progress(
            list(tokens_of_prompts.values()), progress, "ablation"
        )
    ]
    return Ablation(
        loss=torch.stack([prompt_effects.loss for prompt_effects in ablated]),
        loss_change=torch.stack(
            [prompt_effects.loss_change for prompt_effects in ablated], -1
        ),
        kl=torch.stack([prompt_effects.kl for prompt_effects in ablated], -1),
        removed=torch.stack([prompt_effects.removed for prompt_effects in ablated], -1),
        kinds=conditions.kinds,
        layers=chosen,
        prompts=tuple(tokens_of_prompts),
        side=side,
        rank=rank,
        provenance={
            **subspace.provenance,
            "first_position": first_position,
            "n_draws": n_draws,
            "seed_of_draws": seed,
        },
    )


class _Conditions(NamedTuple):
    """The subspaces that are removed, one after the other.

    Attributes:
        kinds: of each.
        bases: by layer, `[condition d_model rank]`.
        means: by layer, what the streams are centred at; none on the write side.
    """

    kinds: tuple[str, ...]
    bases: dict[int, Float[Tensor, "n_conditions d_model rank"]]
    means: dict[int, Float[Tensor, " d_model"]]

    def some(self, which: slice, first_position: int) -> Projection:
        """Return what removes some of them, one in each row of a batch."""
        is_matched = [kind == "norm_matched" for kind in self.kinds[which]]
        return Projection(
            {layer: bases[which] for layer, bases in self.bases.items()},
            self.means,
            # The subspace itself is the first.
            {layer: bases[0] for layer, bases in self.bases.items()},
            torch.tensor(is_matched) if any(is_matched) else None,
            first_position,
        )


def _conditions(
    subspace: Subspace,
    layers: Sequence[int],
    side: Side,
    rank: int,
    n_draws: int,
    generator: torch.Generator,
) -> _Conditions:
    """Draw the controls."""
    index = SIDES.index(side)
    basis = subspace.bases[index][:, :rank]
    whole = torch.eye(len(basis), device=basis.device)
    # The same subspace at every layer, as the shared one is. The first half is
    # "random", the second half, scaled later, "norm_matched".
    random = list(frames(2 * n_draws, whole, rank, generator))
    kinds = ["shared"] + ["random"] * n_draws + ["norm_matched"] * n_draws
    span = subspace.span[index]
    # Rows of few tokens span few directions.
    has_principal = span.shape[-1] >= rank
    if not has_principal:
        warn_caller(
            f"there are no 'principal' and 'span' controls: the prompts of the subspace "
            f"had tokens for {span.shape[-1]} directions, wanted {rank}: give more"
        )
    kinds += ["principal"] * has_principal
    spans = {
        "span": span,
        "unshared": subspace.unshared[index],
        "low_gain": subspace.low_gain[index],
    }
    # A span that is narrower than the rank holds no frame of it.
    drawn = {
        kind: columns for kind, columns in spans.items() if columns.shape[-1] >= rank
    }
    kinds += [kind for kind in drawn for _ in range(n_draws)]
    bases: dict[int, Tensor] = {}
    for layer in layers:
        row = subspace.layers.index(layer)
        # The order must be that of `kinds`.
        layer_bases = [basis, *random]
        if has_principal:
            layer_bases.append(span[row, :, :rank])
        for columns in drawn.values():
            # Each layer has its own span, and so its own frames.
            layer_bases += frames(n_draws, columns[row], rank, generator)
        bases[layer] = torch.stack(layer_bases)
    # Writes are removed as they are, reads without their mean.
    means = dict(zip(subspace.layers, subspace.mean, strict=True))
    return _Conditions(tuple(kinds), bases, means if side == "read" else {})


class _Ablated(NamedTuple):
    """Effects on one prompt."""

    loss: Float[Tensor, ""]
    loss_change: Float[Tensor, " n_conditions"]
    kl: Float[Tensor, " n_conditions"]
    removed: Float[Tensor, " n_conditions"]


def _ablated(
    model: nn.Module,
    tokens: Tensor,
    conditions: _Conditions,
    layers: Sequence[int],
    side: Side,
    first_position: int,
) -> _Ablated:
    """Measure the effects on one prompt."""
    log_p_before = log_probabilities(model, tokens, dtype=torch.float32)
    loss = losses(log_p_before, tokens)
    parts = []
    # A batch has as many conditions as have logits, `[n_pos d_vocab]`, that fit.
    for which in _batches(len(conditions.kinds), rows_at_once(*log_p_before.shape[1:])):
        n_rows = which.stop - which.start
        projection = conditions.some(which, first_position)
        hooks = removal_hooks(projection, layers, side)
        log_p_after = log_probabilities(
            model, tokens, hooks, n_rows, dtype=torch.float32
        )
        # The loss of the unchanged model is one row, and broadcast.
        change = losses(log_p_after, tokens) - loss
        kl_of_tokens = kl(log_p_before, log_p_after).mean(1)
        parts.append((change, kl_of_tokens, projection.removed.double()))
    change, divergence, removed = (torch.cat(part) for part in zip(*parts, strict=True))
    return _Ablated(loss[0].cpu(), change.cpu(), divergence.cpu(), removed.cpu())


def _batches(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
