"""Tiny random models of every architecture that is tested, built from a config; no hub, no download."""

import copy
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

HAS_HOOKED_TRANSFORMER = importlib.metadata.version("transformer-lens").startswith("3.")
needs_hooked_transformer = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="HookedTransformer left TransformerLens in 4.0"
)

N_LAYERS, D_MODEL, N_HEADS, D_MLP, VOCAB = 2, 32, 4, 48, 100
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "intermediate_size": D_MLP,
    "max_position_embeddings": 32,
}
_GROUPED = {"num_key_value_heads": 2}
_GPT_LIKE: dict[str, Any] = {"n_embd": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": 32}

CONFIGS: dict[str, dict[str, Any]] = {
    # As on the hub: with n_ctx, which HookedTransformer reads, and an MLP four times as wide, which it assumes.
    "gpt2": {**_GPT_LIKE, "n_ctx": 32},
    "gpt_neox": {**_LLAMA_LIKE, "rotary_pct": 0.5},
    "llama": {**_LLAMA_LIKE, **_GROUPED},
    # A window shorter than the prompt, so that the mask really slides.
    "mistral": {**_LLAMA_LIKE, **_GROUPED, "sliding_window": 4},
    "gemma2": {**_LLAMA_LIKE, **_GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "qwen3": {**_LLAMA_LIKE, **_GROUPED, "head_dim": 8},
    "phi": {**_LLAMA_LIKE, "partial_rotary_factor": 0.5},
    "olmo2": {**_LLAMA_LIKE, **_GROUPED},
    "gptj": {**_GPT_LIKE, "rotary_dim": 4, "n_inner": D_MLP},
    "gpt_neo": {
        "hidden_size": D_MODEL,
        "num_layers": N_LAYERS,
        "num_heads": N_HEADS,
        "intermediate_size": D_MLP,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 32,
    },
    "opt": {
        "hidden_size": D_MODEL,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "ffn_dim": D_MLP,
        "word_embed_proj_dim": D_MODEL,
        "max_position_embeddings": 32,
    },
    "mixtral": {**_LLAMA_LIKE, **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {"hidden_size": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS},
    "falcon": {
        "hidden_size": D_MODEL,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "ffn_hidden_size": D_MLP,
    },
    "mpt": {"d_model": D_MODEL, "n_layers": N_LAYERS, "n_heads": N_HEADS, "expansion_ratio": 2, "max_seq_len": 32},
}


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer over `w0 … w99`, with a BOS token that it does not prepend by itself."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{i}": i for i in range(1, VOCAB)} | {"<s>": 0}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<s>"
    ).save_pretrained(folder)


def huggingface_model(
    architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """A random HuggingFace model whose blocks are far from linear (its own initialisation is tiny)."""
    given = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0} | CONFIGS[architecture]
    config = AutoConfig.for_model(architecture, **given | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.15)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.config.architectures = [type(model).__name__]
    return model


def bridge(hf_model: nn.Module, tokenizer_folder: Path) -> nn.Module:
    """A TransformerBridge around a copy of the model, so that the original stays an independent witness."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import transformers  # noqa: F401

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    return TransformerBridge.boot_transformers(
        "local/tiny",
        hf_model=copy.deepcopy(hf_model),
        tokenizer=tokenizer,
        device="cpu",
        dtype=next(hf_model.parameters()).dtype,
    ).eval()


def layers_of(hf_model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a HuggingFace model."""
    lists = [m for m in hf_model.modules() if isinstance(m, nn.ModuleList) and len(m) == N_LAYERS]
    return lists[0]


def oracle_jacobian(
    hf_model: nn.Module, tokens: list[int], layer: int, input_position: int, output_position: int
) -> torch.Tensor:
    """`J_{t1 t2}` by a loop of `torch.autograd.grad` over the whole HuggingFace model, one output entry at a time."""
    leaf: dict[str, torch.Tensor] = {}

    def patch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        X = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        leaf["X"] = X
        return ((X, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": X})

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        leaf["Y"] = output[0] if isinstance(output, tuple) else output

    module = layers_of(hf_model)[layer]
    handles = [module.register_forward_pre_hook(patch, with_kwargs=True), module.register_forward_hook(keep)]
    try:
        hf_model(torch.tensor([tokens]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    rows = [
        torch.autograd.grad(leaf["Y"][0, output_position, i], leaf["X"], retain_graph=True)[0][0, input_position]
        for i in range(D_MODEL)
    ]
    J = torch.stack(rows)
    return J - torch.eye(D_MODEL, dtype=J.dtype) if input_position == output_position else J


def add_to_hub_cache(cache: Path, name: str, revisions: dict[str, nn.Module]) -> None:
    """Write models into `cache` as huggingface_hub does: `models--…/refs/REVISION` and `snapshots/<40 hex>/`."""
    folder = cache / ("models--" + name.replace("/", "--"))
    for revision, model in revisions.items():
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        model.save_pretrained(snapshot)
        save_tokenizer(snapshot)
