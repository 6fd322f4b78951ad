"""Tiny random models of the registry's architectures, and TransformerLens models around
copies of them.
"""

import copy
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
import transformers
from torch import nn

from zoo.configs import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    DECODERS,
    N_CTX,
    N_HEADS,
    VOCAB,
    at_depth,
)
from zoo.pretrain import PretrainModel
from zoo.towers import AUDIO, SEQ2SEQ, VISION, WITH_TOWERS

CONFIGS = {**DECODERS, **WITH_TOWERS, **VISION, **AUDIO, **SEQ2SEQ}

# Registry names that are no class of transformers: the class whose modules the adapter
# expects.
_CLASSES = {
    "BloomModel": "BloomForCausalLM",
    "GPT2LMHeadCustomModel": "GPT2LMHeadModel",
    "Gemma1ForCausalLM": "GemmaForCausalLM",
    "JetMoEForCausalLM": "JetMoeForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "NanoGPTForCausalLM": "GPT2LMHeadModel",
    "NeoForCausalLM": "GPTNeoForCausalLM",
    "NeoXForCausalLM": "GPTNeoXForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
    "Wav2Vec2ForPreTraining": "Wav2Vec2Model",
}
# TransformerLens' own implementation, which its loader of legacy checkpoints fills as
# well.
NATIVE: dict[str, dict[str, Any]] = {
    "MinGPTForCausalLM": {"act_fn": "gelu"},
    "NeelSoluOldForCausalLM": {"act_fn": "solu_ln"},
    "TransformerLensNative": {
        "act_fn": "gelu",
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
    },
}


PRETRAIN = "TransformerLensPretrain"


def buildable() -> set[str]:
    """Every registry name that a model can be built for."""
    return CONFIGS.keys() | _CLASSES.keys() | NATIVE.keys() | {PRETRAIN}


def original_model(
    name: str, n_layers: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return the model that a bridge is put around: HuggingFace's class, or
    TransformerLens' own.
    """
    if name == PRETRAIN:
        return randomised(lambda: PretrainModel(n_layers).to(dtype).eval())
    if name not in NATIVE:
        class_name = _CLASSES.get(name, name)
        config = CONFIGS.get(name) or CONFIGS[class_name]
        model = random_model(class_name, at_depth(config, n_layers), dtype=dtype)
        model.config.architectures = [name]
        return model
    from transformer_lens.model_bridge.sources.native import NativeModel

    config = _bridge_config(n_layers, init_weights=False, **NATIVE[name])
    return randomised(lambda: NativeModel(config).to(dtype).eval())


def random_model(
    class_name: str,
    config: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return a random HuggingFace model of this class whose blocks are far from linear
    (its own initialisation is tiny).
    """
    model_class = getattr(transformers, class_name)
    filled = model_class.config_class(**config)
    with _without_timm():
        model = randomised(
            lambda: model_class._from_config(
                filled, dtype=dtype, attn_implementation="eager"
            ).eval(),
            seed,
        )
    model.config.architectures = [class_name]
    return model


def randomised(make: Any, seed: int = 0) -> nn.Module:
    """Return what `make` builds, with every weight drawn anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.15)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def bridge(model: nn.Module, tokenizer: Any = None) -> nn.Module:
    """Return a TransformerBridge around a copy of the model, so that the original stays
    an independent witness.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import transformers as _  # noqa: F401  (attaches boot_transformers)
    from transformer_lens.model_bridge.sources._bridge_builder import (
        build_bridge_from_module,
    )

    model = copy.deepcopy(model)
    dtype = next(model.parameters()).dtype
    if isinstance(model, PretrainModel):
        from transformer_lens.model_bridge.supported_architectures.pretrain import (
            build_pretrain_bridge,
        )

        return build_pretrain_bridge(
            model, _bridge_config(len(model.blocks)), dtype=dtype
        ).eval()
    if not hasattr(model, "config"):
        return build_bridge_from_module(
            model, "TransformerLensNative", tl_config=model.cfg, tokenizer=tokenizer
        ).eval()
    with _nothing_installed():
        return TransformerBridge.boot_transformers(
            "local/tiny", hf_model=model, tokenizer=tokenizer, device="cpu", dtype=dtype
        ).eval()


def _bridge_config(n_layers: int, **others: Any) -> Any:
    from transformer_lens.config import TransformerBridgeConfig

    return TransformerBridgeConfig(**_SIZES, n_layers=n_layers, **others)


@contextmanager
def _nothing_installed() -> Iterator[None]:
    """Keep TransformerLens from running `pip install torchvision`, and from asking for
    it: text alone is measured.
    """
    from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter

    def refuse(command: Any, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"the zoo installs nothing: {command}")

    with (
        mock.patch.object(subprocess, "check_call", refuse),
        mock.patch.object(
            ArchitectureAdapter, "_check_required_libraries", create=True
        ),
    ):
        yield


@contextmanager
def _without_timm() -> Iterator[None]:
    """Gemma3n's tower for images comes from the package timm: an empty one in its
    place.
    """
    from transformers.models.gemma3n import modeling_gemma3n

    def from_config(config: Any, **given: Any) -> nn.Module:
        if isinstance(config, transformers.Gemma3nVisionConfig):
            return nn.Identity()
        return transformers.AutoModel.from_config(config, **given)

    with mock.patch.object(
        modeling_gemma3n, "AutoModel", SimpleNamespace(from_config=from_config)
    ):
        yield


_SIZES: dict[str, Any] = {
    "d_model": D_MODEL,
    "d_head": D_HEAD,
    "n_heads": N_HEADS,
    "d_mlp": D_MLP,
    "n_ctx": N_CTX,
    "d_vocab": VOCAB,
}
_NORMS = ("LN", "LNPre", "RMS", "RMSPre", None)
HOOKED: dict[str, dict[str, Any]] = {
    **{
        f"HookedTransformer, normalization {norm}": {
            "normalization_type": norm,
            "act_fn": "gelu",
        }
        for norm in _NORMS
    },
    "HookedTransformer, attention only": {"attn_only": True},
    "HookedTransformer, gated MLP, rotary, grouped": {
        "act_fn": "silu",
        "gated_mlp": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": D_HEAD,
        "normalization_type": "RMS",
        "n_key_value_heads": 2,
    },
    "HookedTransformer, local attention": {
        "act_fn": "gelu",
        "use_local_attn": True,
        "window_size": 4,
        "attn_types": ["local", "global", "local"],
    },
    "HookedTransformer, parallel attention and MLP": {
        "act_fn": "gelu",
        "parallel_attn_mlp": True,
    },
    "HookedTransformer, shortformer": {
        "act_fn": "gelu",
        "positional_embedding_type": "shortformer",
    },
    "HookedTransformer, alibi": {
        "act_fn": "gelu",
        "positional_embedding_type": "alibi",
    },
}


def hooked_transformer(name: str, n_layers: int, dtype: torch.dtype) -> nn.Module:
    """Return a HookedTransformer straight from its config, as its constructor leaves
    it.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        **_SIZES, n_layers=n_layers, dtype=dtype, device="cpu", **HOOKED[name]
    )
    return randomised(lambda: HookedTransformer(config))
