"""Folders in HuggingFace format with tiny random models of many kinds, and with what
nobody should run.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import tiny

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_SHORT = {**SMALL, "max_position_embeddings": 32}
_TOWER = {key: size for key, size in SMALL.items() if key != "vocab_size"} | {
    "image_size": 8,
    "patch_size": 4,
}
_TWO_STACKS = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
}

# The class, and its configuration.
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bert": ("BertForMaskedLM", lambda: transformers.BertConfig(**_SHORT)),
    # Two more rows of its table are not positions.
    "roberta": (
        "RobertaForMaskedLM",
        lambda: transformers.RobertaConfig(
            **SMALL, max_position_embeddings=34, pad_token_id=1
        ),
    ),
    "mamba": (
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
    ),
    "rwkv": (
        "RwkvForCausalLM",
        lambda: transformers.RwkvConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, context_length=16
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**_SHORT),
            vision_config=transformers.CLIPVisionConfig(**_TOWER),
            image_token_index=99,
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(
                **_SHORT, num_key_value_heads=2, head_dim=8
            ),
            vision_config=transformers.SiglipVisionConfig(**_TOWER),
            mm_tokens_per_image=4,
            image_token_id=99,
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(**_T5, decoder_start_token_id=0),
    ),
    "bart": (
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(**_TWO_STACKS),
    ),
    "hubert": (
        "HubertModel",
        lambda: transformers.HubertConfig(
            **SMALL,
            conv_dim=(32,),
            conv_kernel=(3,),
            conv_stride=(2,),
            num_conv_pos_embedding_groups=2,
        ),
    ),
    "vit": ("ViTModel", lambda: transformers.ViTConfig(**_TOWER)),
}


def save(kind: str, folder: Path) -> nn.Module:
    """Return a random model of one kind with a tokenizer, saved; as HuggingFace builds
    it under another seed than ours.
    """
    class_name, config = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, class_name)(config()).eval()
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return model


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


def bring_own_code(folder: Path, witness: Path) -> None:
    """Let a saved Llama name a Python file of its own, which writes `witness` when it
    is run.
    """
    (folder / "modeling_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(witness)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    named = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": named})
    )


def bring_own_tokenizer(folder: Path, witness: Path) -> None:
    """Let the tokenizer of a saved model name a Python file of its own, which writes
    `witness` when it is run.
    """
    (folder / "tokenization_own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PreTrainedTokenizerFast\n"
        f"Path({str(witness)!r}).touch()\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text()) | {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    path.write_text(json.dumps(given))


def poison_weights(folder: Path, witness: Path) -> None:
    """Replace a model's weights by a pickle that writes `witness`."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(witness)))


def poison_adapter(folder: Path, witness: Path) -> None:
    """Put a PEFT adapter beside a model, whose weights are a pickle that writes
    `witness`.
    """
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "gpt2"})
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Evil(witness)))


def poison_chat_template(folder: Path, witness: Path) -> None:
    """Give a tokenizer a template that would write `witness` if it were rendered
    without a sandbox.
    """
    attack = "{{ cycler.__init__.__globals__.os.system('touch " + str(witness) + "') }}"
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"chat_template": attack})
    )
    (folder / "chat_template.jinja").write_text(attack)


def save_gguf(
    path: Path,
    architecture: str = "llama",
    block_count: int | None = None,
    renamed: tuple[str, str] = ("", ""),
    settings: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> nn.Module:
    """Return a Llama as llama.cpp keeps it, in Q8_0 (blocks of 32, a scale each); the
    same with its dequantised weights.

    The file may say that it has another number of layers, tensors may have a part of
    their name replaced, and it may hold further keys and tensors. `changes` are those
    of the Llama's configuration.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    plain: Any = tiny.huggingface_model("llama", intermediate_size=64, **changes)
    config, kind = plain.config, GGMLQuantizationType.Q8_0
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(
        config.num_hidden_layers if block_count is None else block_count
    )
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = ["<s>", "w", *"0123456789", *(f"w{i}" for i in range(10))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        words + [f"unused{i}" for i in range(config.vocab_size - len(words))]
    )
    writer.add_token_types([3] + [1] * (config.vocab_size - 1))
    writer.add_token_merges([f"w {i}" for i in range(10)])
    writer.add_bos_token_id(0)
    names = {
        "model.layers": "blk", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in plain.named_parameters():
        weight = parameter.detach().numpy()
        if weight.ndim == 2:
            weight = quants.dequantize(quants.quantize(weight, kind), kind)
            parameter.data = torch.from_numpy(weight)
        # llama.cpp rotates neighbouring entries of a head, HuggingFace the two halves.
        if n_heads := next((n for part, n in heads.items() if part in name), None):
            weight = (
                weight.reshape(n_heads, 2, -1, *weight.shape[1:])
                .swapaxes(1, 2)
                .reshape(weight.shape)
            )
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        name = name.replace(*renamed) if renamed[0] else name
        if weight.ndim == 2:
            writer.add_tensor(
                name,
                quants.quantize(np.ascontiguousarray(weight), kind),
                raw_dtype=kind,
            )
        else:
            writer.add_tensor(name, weight)
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in (settings or {}).items():
        add[type(value)](key, value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain
