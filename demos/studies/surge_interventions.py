"""Training with one cause removed: what the blocks of a small Pythia learn when their
feedback is changed.

In a residual network every block receives nearly the same loss gradient, and reads
nearly the same stream. Is that why their Jacobians become alike? Here the gradient is
rotated by an orthogonal matrix before it enters a block, so that its size and spectrum
stay and only its direction changes: by a different matrix for each block, or by the
same one for all. And blocks learn alone, each in a run of its own, so that they cannot
adapt to each other.
"""

import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import tl_coupling as tlc
from small_models import Corpus, TrainingConfig, batches, learn, new_model
from surge_probes import dataset, mean_cosine, mean_coupling
from tl_coupling.measures import random_rotations
from tl_coupling.studies.surveys import loss

if TYPE_CHECKING:
    import xarray

INTERVENTIONS = {
    "own coordinates": "each block writes in axes of its own: true gradients",
    "own feedback": "each block's gradient is turned by its own rotation",
    "one wrong feedback": "all blocks' gradients are turned by the same rotation",
    "blocks only": "everything but the blocks is frozen",
    "blocks alone": "everything but one block is frozen; blocks of different runs are compared",
}


class _TurnedFeedback(torch.autograd.Function):
    """The identity, whose gradient is turned: `g ↦ g Q`."""

    @staticmethod
    def forward(ctx: Any, written: Tensor, Q: Tensor) -> Tensor:
        ctx.save_for_backward(Q)
        return written.view_as(written)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


def turn_feedback(model: Any, rotations: Float[Tensor, "n_layers d d"]) -> None:
    """From now on block l learns from `g Q_l` instead of the gradient g; what the model
    computes stays.
    """
    for block, Q in zip(model.gpt_neox.layers, rotations, strict=True):
        block.register_forward_hook(
            lambda _, args, output, Q=Q: (
                args[0] + _TurnedFeedback.apply(output - args[0], Q)
            ),
            prepend=True,
        )


def turn_output(model: Any, rotations: Float[Tensor, "n_layers d d"]) -> None:
    """From now on block l writes `f_l(x) Q_l` instead of `f_l(x)`, and learns from its
    true gradient.
    """
    for block, Q in zip(model.gpt_neox.layers, rotations, strict=True):
        block.register_forward_hook(
            lambda _, args, output, Q=Q: args[0] + (output - args[0]) @ Q, prepend=True
        )


def fold_output(model: Any, rotations: Float[Tensor, "n_layers d d"]) -> nn.Module:
    """Return a plain model with the weights that write turned: what a model with
    `turn_output` computes, without hooks.
    """
    from transformers import GPTNeoXForCausalLM

    plain = GPTNeoXForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for block, Q in zip(plain.gpt_neox.layers, rotations, strict=True):
            for writing in (block.attention.dense, block.mlp.dense_4h_to_h):
                writing.weight.copy_(Q.mT @ writing.weight)
                writing.bias.copy_(writing.bias @ Q)
    return plain


def freeze_all_but(model: Any, layers: Collection[int]) -> None:
    """From now on only these blocks learn: not the others, the embeddings or the final
    norm.
    """
    model.requires_grad_(False)
    for layer in layers:
        model.gpt_neox.layers[layer].requires_grad_(True)


def measured(
    model: Any, corpus: Corpus, prompts: Sequence[str]
) -> tuple[Tensor, list[float]]:
    """Jacobians of every block at the last token of each prompt, `[n_prompts n_layers d
    d]` in float64; and losses.
    """
    # Saved and loaded: the library measures TransformerLens models, which do not have
    # this one's hooks.
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        corpus.tokenizer.save_pretrained(folder)
        loaded = tlc.load_model(folder, device="cpu")
    traces = [tlc.trace(loaded, prompt) for prompt in prompts]
    J = torch.stack([tlc.block_jacobians(trace) for trace in traces])
    return J.double(), [loss(trace) for trace in traces]


def intervene(
    name: str,
    config: TrainingConfig,
    corpus: Corpus,
    prompts: Sequence[str],
    steps: Sequence[int],
    k: int,
) -> "xarray.Dataset":
    """Coupling, cosine of J between layers, and loss under one of `INTERVENTIONS`,
    `[checkpoint prompt]`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in INTERVENTIONS:
        raise ValueError(
            f"`name` must be one of {', '.join(INTERVENTIONS)}, got {name!r}"
        )

    def stages(layers: Collection[int]) -> list[tuple[Tensor, list[float]]]:
        return list(
            trained_stages(
                name, replace(config, steps=max(steps)), corpus, prompts, steps, layers
            )
        )

    all_layers = range(config.n_layers)
    if name == "blocks alone":
        # Each layer's Jacobians are from the run in which it learned; losses are means
        # over these runs.
        of_steps = [
            (
                torch.stack([J[:, layer] for layer, (J, _) in enumerate(runs)], 1),
                np.mean([losses for _, losses in runs], 0),
            )
            for runs in zip(*(stages([layer]) for layer in all_layers), strict=True)
        ]
    else:
        of_steps = stages(all_layers)
    rows = [
        [
            {
                "coupling": mean_coupling(jacobians, k),
                "cosine_of_jacobians": mean_cosine(jacobians),
                "loss": float(of_prompt),
            }
            for jacobians, of_prompt in zip(J, losses, strict=True)
        ]
        for J, losses in of_steps
    ]
    return dataset(rows, steps)


def trained_stages(
    name: str,
    config: TrainingConfig,
    corpus: Corpus,
    prompts: Sequence[str],
    steps: Collection[int],
    layers: Collection[int],
) -> Iterator[tuple[Tensor, list[float]]]:
    """Yield what `measured` gives at each step of one training run; `layers` may learn
    where blocks only do.
    """
    model: Any = new_model(config)
    generator = torch.Generator().manual_seed(config.seed)
    n = 1 if name == "one wrong feedback" else config.n_layers
    rotations = (
        random_rotations(n, config.width, generator=generator)
        .float()
        .expand(config.n_layers, -1, -1)
    )
    if name in ("own feedback", "one wrong feedback"):
        turn_feedback(model, rotations)
    if name == "own coordinates":
        turn_output(model, rotations)
    if name in ("blocks only", "blocks alone"):
        freeze_all_but(model, layers)
    for step, _ in learn(model, config, batches(config, corpus.tokens)):
        if step in steps:
            yield measured(
                fold_output(model, rotations) if name == "own coordinates" else model,
                corpus,
                prompts,
            )
