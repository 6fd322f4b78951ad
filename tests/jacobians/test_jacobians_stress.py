"""Tiny models with what only trained ones have: streams that grow to 1e5, massive
activations, σ₁ ≫ σ₂.

Each has a derivative that autograd over the original model gives, so each is to be
measured, and right.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

ARCHITECTURES = (
    "bloom",
    "falcon",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "qwen3",
)
POSITIONS = (0, 4, 7)
# Modules of these names write to the residual stream; in Gemma and OLMo 2 a norm
# follows them.
WRITERS = (
    "o_proj",
    "out_proj",
    "c_proj",
    "dense",
    "down_proj",
    "fc2",
    "dense_4h_to_h",
    "w2",
)
PRE_NORMS = (
    "final_layer_norm",
    "input_layernorm",
    "ln_1",
    "ln_2",
    "pre_feedforward_layernorm",
    "self_attn_layer_norm",
)
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def writers(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and matrices of what writes to the stream, attention first; the norms'
    weights where they follow.
    """
    named = dict(layer.named_parameters())
    if hasattr(layer, "post_feedforward_layernorm"):
        chosen = [name for name in named if name.split(".")[0] in POST_NORMS]
    else:
        matrices = [
            name
            for name in named
            if name.endswith("weight") and name.split(".")[-2] in WRITERS
        ]
        experts = [name for name in named if name.endswith("experts.down_proj")]
        chosen = matrices + experts
    return [(name, named[name]) for name in chosen]


@torch.no_grad()
def growing(hf_model: nn.Module) -> None:
    """Each branch writes as much as makes the stream about 1e5 at the end."""
    for layer in tiny.layers_of(hf_model):
        for _, weight in writers(layer):
            weight.mul_(1e5)


@torch.no_grad()
def massive_first_token(hf_model: nn.Module) -> None:
    """Two coordinates of the first token's embedding, a thousand times the others."""
    embedding = hf_model.get_input_embeddings().weight
    embedding[tiny.TOKENS[0], [3, 7]] = 1e3 * embedding.std()


@torch.no_grad()
def huge_embeddings(hf_model: nn.Module) -> None:
    hf_model.get_input_embeddings().weight.mul_(1e3)


@torch.no_grad()
def dominant_direction(hf_model: nn.Module) -> None:
    """What the MLP writes lies along one direction, σ₁/σ₂ = 1e4; a norm that follows
    makes it as small as before.
    """
    for layer in tiny.layers_of(hf_model):
        matrices = [
            p
            for name, p in layer.named_parameters()
            if p.ndim > 1 and _is_of_mlp_output(name)
        ]
        for weight in matrices:
            U, S, Vh = torch.linalg.svd(weight, full_matrices=False)
            S[..., 0] = 1e4 * S[..., 1]
            weight.copy_(U * S[..., None, :] @ Vh)


def _is_of_mlp_output(name: str) -> bool:
    is_of_attention = "attn" in name or "attention" in name
    return not is_of_attention and any(part in WRITERS for part in name.split("."))


@torch.no_grad()
def stiff(hf_model: nn.Module) -> None:
    """Two coordinates are massive in every token, and norms give them no weight, as in
    Gemma 3.

    A move of 1 % of the stream is then larger than all other coordinates, which are
    what the block reads.
    """
    massive = torch.tensor([3, 7])
    # Of both signs: their mean, which LayerNorm takes off, is zero.
    hf_model.get_input_embeddings().weight[:, massive] = torch.tensor([300.0, -300.0])
    for layer in tiny.layers_of(hf_model):
        for name, weight in layer.named_parameters():
            if weight.shape == (tiny.D_MODEL,) and name.split(".")[0] in PRE_NORMS:
                is_gemmas = "Gemma" in type(layer).__name__
                weight.mul_(100)
                weight[massive] = -1.0 if is_gemmas else 0.0


STRESSES = (growing, stiff, massive_first_token, huge_embeddings, dominant_direction)


def stressed() -> list[Any]:
    """BLOOM normalises its embeddings, so that what is planted there is massive in none
    of its blocks.
    """
    in_long_tier = pytest.mark.long("one of many architectures")
    return [
        pytest.param(name, stress, marks=[] if name == "llama" else in_long_tier)
        for name, stress in itertools.product(ARCHITECTURES, STRESSES)
        if (name, stress) != ("bloom", stiff)
    ]


@pytest.mark.parametrize(("architecture", "stress"), stressed())
def test_stressed_blocks_are_measured_and_right(
    architecture: str, stress: Callable[[nn.Module], None], tokenizer_folder: Path
) -> None:
    tied = {"tie_word_embeddings": True} if stress is huge_embeddings else {}
    hf_model = tiny.huggingface_model(architecture, **tied)
    stress(hf_model)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    # float32 rounds what is small beside what is massive.
    relative = 2e-4 if stress in (stiff, dominant_direction) else 1e-5
    for layer in range(tiny.N_LAYERS):
        pairs = [(position, position) for position in POSITIONS]
        expected = tiny.oracle_jacobians(hf_model, tiny.TOKENS, layer, pairs)
        for position in POSITIONS:
            J = tlc.block_jacobian(trace, layer, position=position)
            of_token = expected[position, position]
            # J comes with the rounding of the identity that is taken from it.
            assert (
                float((J - of_token).norm()) <= relative * float(of_token.norm()) + 1e-5
            ), (layer, position)


def test_streams_and_spectra_are_as_extreme_as_they_are_said_to_be(
    tokenizer_folder: Path,
) -> None:
    def traced(
        stress: Callable[[nn.Module], None], architecture: str = "llama"
    ) -> tlc.Trace:
        hf_model = tiny.huggingface_model(architecture)
        stress(hf_model)
        return tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)

    for architecture in ("llama", "gemma2"):
        norms = traced(growing, architecture).residual.norm(dim=-1)
        assert float(norms[-1].max()) > 1e5 > 100 * float(norms[0].max())
    first, *others = traced(massive_first_token).residual[0].norm(dim=-1).tolist()
    assert first > 100 * max(others)
    S = torch.linalg.svdvals(tlc.block_jacobian(traced(dominant_direction), 1))
    assert float(S[0] / S[1]) > 100
