"""Tiny random models of every architecture that is tested, built from a config; no hub,
no download.
"""

import hashlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from zoo import models
from zoo.configs import D_MODEL as D_MODEL
from zoo.configs import DECODERS, VOCAB, at_depth
from zoo.models import random_model
from zoo.oracle import Oracle

HAS_HOOKED_TRANSFORMER = importlib.metadata.version("transformer-lens").startswith("3.")
needs_hooked_transformer = pytest.mark.skipif(
    not HAS_HOOKED_TRANSFORMER, reason="HookedTransformer left TransformerLens in 4.0"
)

N_LAYERS = 2
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]

# By what transformers calls the architecture: the class that TransformerLens' registry
# names.
_COMMON = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi": "PhiForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "opt": "OPTForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "mpt": "MptForCausalLM",
}
# One for each other way to build a block: what most tests need not repeat.
_UNUSUAL = {
    "bert": "BertForMaskedLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mamba": "MambaForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "openai-gpt": "OpenAIGPTLMHeadModel",
    "phi3": "Phi3ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
}
_CLASSES = _COMMON | _UNUSUAL
COMMON = tuple(_COMMON)


LONG = pytest.mark.long("one of many architectures")


def in_tiers(architectures: Iterable[str]) -> list[Any]:
    """Return parameters of a test: unusual architectures are in the long tier."""
    return [
        pytest.param(name, marks=LONG) if name in _UNUSUAL else name
        for name in architectures
    ]


def configs(n_layers: int) -> dict[str, dict[str, Any]]:
    """Return the config of every architecture, so many layers deep."""
    return {
        architecture: at_depth(DECODERS[class_name], n_layers)
        for architecture, class_name in _CLASSES.items()
    }


CONFIGS = configs(N_LAYERS)


def save_tokenizer(folder: Path) -> None:
    """Save a word-level tokenizer over `w0 … w99`, with a BOS token that it does not
    prepend by itself.
    """
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
    """Return a random HuggingFace model whose blocks are far from linear (its own
    initialisation is tiny).
    """
    return random_model(
        _CLASSES[architecture], CONFIGS[architecture] | changes, seed, dtype
    )


def layers_of(hf_model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a HuggingFace model."""
    return hf_model.get_submodule(_path_of_layers(hf_model))


def cache_argument(hf_model: nn.Module) -> str:
    """Return the name under which a HuggingFace model takes its cache and returns it:
    a newer one from transformers 5.24 on.
    """
    parameters = inspect.signature(hf_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _path_of_layers(hf_model: nn.Module) -> str:
    modules = hf_model.named_modules()
    return next(
        path
        for path, m in modules
        if isinstance(m, nn.ModuleList) and len(m) == N_LAYERS
    )


def bridge(hf_model: nn.Module, tokenizer_folder: Path) -> nn.Module:
    """Return a TransformerBridge around a copy of the model, so that the original stays
    an independent witness.
    """
    return models.bridge(
        hf_model, PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    )


def oracle_jacobian(
    hf_model: nn.Module,
    tokens: list[int],
    layer: int,
    input_position: int,
    output_position: int,
) -> torch.Tensor:
    """`J_{t1 t2}` by a loop of `torch.autograd.grad` over the whole HuggingFace model,
    one output entry at a time.
    """
    pair = (input_position, output_position)
    return oracle_jacobians(hf_model, tokens, layer, [pair])[pair]


def oracle_jacobians(
    hf_model: nn.Module, tokens: list[int], layer: int, pairs: list[tuple[int, int]]
) -> dict[tuple[int, int], torch.Tensor]:
    """Return the same of several `(t1, t2)`."""
    inputs = {"input_ids": torch.tensor([tokens]), "use_cache": False}
    return Oracle(hf_model, _path_of_layers(hf_model), inputs).jacobians(layer, pairs)


def add_to_hub_cache(cache: Path, name: str, revisions: dict[str, nn.Module]) -> None:
    """Write models into `cache` as huggingface_hub does: `models--…/refs/REVISION` and
    `snapshots/<40 hex>/`.
    """
    folder = cache / ("models--" + name.replace("/", "--"))
    for revision, model in revisions.items():
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        model.save_pretrained(snapshot)
        save_tokenizer(snapshot)
