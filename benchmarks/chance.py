"""How often the intervals of what chance gives hold what chance gave.

Untrained models are chance: the same architecture with other seeds. Their Jacobians are
made here by plain autograd over HuggingFace's own layers, and their coupling by numpy;
only the interval is of the package. For `carriers`, random frames are drawn by numpy,
and components read in them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.stages import random_model
from tl_coupling import block_parts, carriers, trace
from tl_coupling.comparisons import MeanCouplingMap, jacobian_coupling

D_MODEL = 48
VOCAB = 200
N_TOKENS = 8
N_PROMPTS = 12
KS = (2, 10)
N_LAYERS = (2, 6)
LEAST = 0.95
CARRIED_KS = (1, 2, 4, 10)
CARRIED_LAYERS = (3, 6)
# As of the other intervals whose width is not a bound.
LEAST_CARRIED = 0.93


def configs(n_layers: int) -> dict[str, Any]:
    """Return the configurations of four kinds of model: norms before branches, or also
    behind them; branches one after the other, or side by side.
    """
    from transformers import Gemma2Config, GPT2Config, GPTNeoXConfig, LlamaConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": D_MODEL,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * D_MODEL,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    gpt2 = GPT2Config(
        vocab_size=VOCAB,
        n_embd=D_MODEL,
        n_layer=n_layers,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return {
        "GPT2LMHeadModel": gpt2,
        "LlamaForCausalLM": LlamaConfig(num_key_value_heads=2, **sizes),
        "GPTNeoXForCausalLM": GPTNeoXConfig(**sizes),
        "Gemma2ForCausalLM": Gemma2Config(num_key_value_heads=2, head_dim=12, **sizes),
    }


def untrained(config: Any, seed: int) -> nn.Module:
    """Return a model at its own initialisation."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def block_jacobians(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return `∂(block(x) − x)/∂x` at the last token of every layer, `[n_layers d d]`."""
    layers = next(
        module for module in model.modules() if isinstance(module, nn.ModuleList)
    )
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda *call: calls.append(call), with_kwargs=True
        )
        for layer in layers
    ]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([_jacobian(*call) for call in calls])


def _jacobian(
    layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Tensor:
    """Return the Jacobian of a layer that was called so."""
    others = dict(keywords)
    stream = arguments[0] if arguments else others.pop("hidden_states")

    def change(row: Tensor) -> Tensor:
        rows = torch.cat([stream[:, :-1], row[None, None]], 1)
        output = layer(rows, *arguments[1:], **others)
        output = output[0] if isinstance(output, tuple) else output
        return output[0, -1] - row

    return torch.func.jacrev(change)(stream[0, -1])


def mean_coupling(J: np.ndarray, k: int) -> float:
    """Return the mean coupling of different layers, by its definition."""
    values = []
    for j, other in enumerate(J):
        U, _, Vh = np.linalg.svd(other)
        for i, of_row in enumerate(J):
            if i != j:
                A = U[:, :k].T @ of_row @ Vh[:k].T
                off = A - np.diag(np.diag(A))
                values.append(1 - np.linalg.norm(off) / np.linalg.norm(A))
    return float(np.mean(values))


def null_coverage(n_models: int) -> Iterator[dict[str, Any]]:
    """Yield how often the mean coupling of untrained models is in `null_interval`: on
    one prompt, and in the mean over twelve; each with how far its middle moves
    between models and seeds, in widths.
    """
    for n_layers in N_LAYERS:
        for kind, config in configs(n_layers).items():
            inside: dict[tuple[int, int], list[bool]] = {}
            middles: dict[tuple[int, int], list[float]] = {}
            widths: dict[tuple[int, int], list[float]] = {}
            for seed in range(n_models):
                model = untrained(config, seed)
                tokens = torch.from_numpy(
                    np.random.default_rng(seed).integers(
                        1, VOCAB, (N_PROMPTS, 1, N_TOKENS)
                    )
                )
                J = torch.stack([block_jacobians(model, prompt) for prompt in tokens])
                maps = [jacobian_coupling(of_prompt, max(KS)) for of_prompt in J]
                measured = {
                    k: [mean_coupling(of_prompt, k) for of_prompt in J.double().numpy()]
                    for k in KS
                }
                for n_prompts, result in (
                    (1, maps[0]),
                    (N_PROMPTS, MeanCouplingMap.over(maps)),
                ):
                    for k in KS:
                        low, high = result.null_interval(k, seed=seed)
                        mean = np.mean(measured[k][:n_prompts])
                        case = n_prompts, k
                        inside.setdefault(case, []).append(bool(low <= mean <= high))
                        middles.setdefault(case, []).append((low + high) / 2)
                        widths.setdefault(case, []).append(high - low)
            yield {
                "design": f"{kind}, {n_layers} layers",
                "coverage": {
                    f"{n_prompts} × k = {k}": float(np.mean(inside[n_prompts, k]))
                    for n_prompts, k in inside
                },
                "error_of_middle": max(
                    float(np.std(middles[case]) / np.mean(widths[case]))
                    for case in middles
                ),
            }


def haar(d: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random orthonormal frame."""
    Q, R = np.linalg.qr(rng.standard_normal((d, k)))
    return Q * np.sign(np.diag(R))


def mean_excess(
    components: np.ndarray, frames: Sequence[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return the mean excess of each component over pairs of different layers.

    Args:
        components: of each layer's Jacobian, `[n_layers component d d]`.
        frames: left and right vectors of each layer.
    """
    values = []
    for i, of_layer in enumerate(components):
        J = of_layer.sum(0)
        of_J = (of_layer * J).sum((-2, -1)) / (J * J).sum()
        for j, (U, V) in enumerate(frames):
            if i != j:
                diagonals = np.einsum("dk, cde, ek -> ck", U, of_layer, V)
                whole = diagonals.sum(0)
                values.append(diagonals @ whole / (whole @ whole) - of_J)
    return np.mean(values, 0)


def carried_coverage(n_seeds: int, n_means: int) -> Iterator[dict[str, Any]]:
    """Yield how often the mean excess in random frames is in `Carriers.null_interval`.

    Of attention, the MLP and the MLP acting on attention; the interval is drawn anew
    with every seed.
    """
    for n_layers in CARRIED_LAYERS:
        config = configs(n_layers)["LlamaForCausalLM"]
        config.architectures = ["LlamaForCausalLM"]
        model = random_model(config, "llama", torch.device("cpu"))
        tokens = torch.from_numpy(np.random.default_rng(0).integers(1, VOCAB, N_TOKENS))
        traced = trace(model, tokens.tolist())
        parts = [block_parts(traced, layer).matrices for layer in range(n_layers)]
        components = torch.stack(
            [
                torch.cat([of.sum(0, keepdim=True), rest])
                for of, rest in map(_split, parts)
            ]
        )
        components = components.double().numpy()
        for k in CARRIED_KS:
            rng = np.random.default_rng(k)
            drawn = np.array(
                [
                    mean_excess(
                        components,
                        [
                            (haar(D_MODEL, k, rng), haar(D_MODEL, k, rng))
                            for _ in range(n_layers)
                        ],
                    )
                    for _ in range(n_means)
                ]
            )
            shares = []
            for seed in range(n_seeds):
                result = carriers(traced, k, seed=seed, progress=False).by_branch()
                for place, label in enumerate(result.labels):
                    low, high = result.null_interval(label)
                    is_inside = (low <= drawn[:, place]) & (drawn[:, place] <= high)
                    shares.append(is_inside.mean())
            yield {
                "design": f"{n_layers} layers, k = {k}",
                "coverage": float(np.mean(shares)),
                "least": float(np.min(shares)),
            }


def _split(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads, and the MLP and the MLP acting on attention."""
    return matrices[:-2], matrices[-2:]
