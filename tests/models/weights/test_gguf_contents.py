"""Of a GGUF file every key and tensor is taken up, or the file is refused: what
transformers skips would be another model.
"""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model_folders
import tiny
import tl_coupling as tlc
from tl_coupling.models.patched_transformers import Reading
from tl_coupling.models.weights.gguf_contents import CompletedConfig, GgufContents

# transformers reads these files, in one version for both lines of TransformerLens.
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
    ),
]
# Longer than the wavelengths that are scaled.
TOKENS = [(7 * i) % 97 + 1 for i in range(60)]
N_PAIRS = tiny.D_MODEL // 4 // 2
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def save_gguf(path: Path, **options: Any) -> Any:
    return model_folders.save_gguf(path, max_position_embeddings=128, **options)


def llama_3_factors(n_pairs: int) -> np.ndarray:
    """By what llama.cpp's converter says that each pair's angle is divided
    (`LlamaModel.generate_extra_tensors`), for the scaling of `LLAMA_3`.
    """
    factors = []
    for pair in range(n_pairs):
        wavelength = 2 * math.pi * 10000.0 ** (pair / n_pairs)
        if wavelength < 64 / 4:
            factors.append(1.0)
        elif wavelength > 64 / 1:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, dtype=np.float32)


def stream_of(path: Path, **options: Any) -> torch.Tensor:
    return tlc.trace(tlc.load_model(str(path), **options), TOKENS).residual


def expected_stream(plain: Any) -> torch.Tensor:
    """The residual stream as HuggingFace's own model has it, but for its last row."""
    with torch.no_grad():
        states = plain(
            torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True
        ).hidden_states
    return torch.cat(states)[:-1]


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(path), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_scaled_rotations_of_pairs_are_those_of_llama_3(path: Path) -> None:
    factors = llama_3_factors(N_PAIRS)
    assert len(set(factors)) > 2
    plain = save_gguf(
        path, tensors={"rope_freqs.weight": factors}, rope_parameters=LLAMA_3
    )
    unscaled = save_gguf(path.with_name("unscaled.gguf"))
    torch.testing.assert_close(
        stream_of(path)[:-1], expected_stream(plain), rtol=1e-4, atol=1e-4
    )
    difference = expected_stream(plain) - expected_stream(unscaled)
    assert difference.norm() > 0.01 * expected_stream(plain).norm()
    # The copy in the cache is the same model, and so is what is streamed from it.
    assert torch.equal(stream_of(path), stream_of(path, memory="stream"))


@pytest.mark.parametrize(
    ("settings", "rope_parameters"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {"llama.rope.scale_linear": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.finetuned": True,
            },
            YARN,
        ),
    ],
)
def test_scaled_rotations_by_keys(
    path: Path, settings: dict[str, Any], rope_parameters: dict[str, Any]
) -> None:
    plain = save_gguf(path, settings=settings, rope_parameters=rope_parameters)
    torch.testing.assert_close(
        stream_of(path)[:-1], expected_stream(plain), rtol=1e-4, atol=1e-4
    )
    twin = tlc.load_model(str(path), untrained=True)
    told = twin.original_model.config.rope_parameters
    assert told["rope_type"] == rope_parameters["rope_type"]


def test_biases_that_a_configuration_can_have(path: Path) -> None:
    plain = save_gguf(path, attention_bias=True, mlp_bias=True)
    torch.testing.assert_close(
        stream_of(path)[:-1], expected_stream(plain), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.5),
        ("attention.sliding_window", 16),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("expert_count", 8),
        ("expert_weights_scale", 2.5),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("never.heard.of", 1),
        ("residual_scale", 0.22),
        ("rope.dimension_sections", [2, 1, 1, 0]),
        ("rope.freq_base_swa", 500.0),
        ("rope.scaling.alpha", 1000.0),
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.type", "ntk"),
        ("use_parallel_residual", True),
    ],
)
def test_a_key_without_a_place_is_refused_by_name(
    path: Path, key: str, value: Any
) -> None:
    save_gguf(path, settings={f"llama.{key}": value})
    shown = f"llama.{key} = {value}"
    for untrained in (False, True):
        assert f"holds {shown}, for which transformers has no place" in refused(
            path, untrained=untrained
        )


def test_a_key_of_nobody_is_refused(path: Path) -> None:
    save_gguf(path, settings={"attention.temper": 2.0})
    assert "holds attention.temper, for which" in refused(path)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "general.type": "model",
            "general.finetune": "tiny",
            "general.alignment": 32,
            "general.tags": ["text", "tiny"],
            "tokenizer.ggml.pre": "default",
            "tokenizer.chat_template": "{{ messages }}",
            "quantize.imatrix.file": "imatrix.dat",
            "llama.rope.dimension_count": 8,
            "llama.attention.key_length": 8,
            "llama.attention.value_length": 8,
            "llama.attention.causal": True,
            "llama.attention.scale": 8**-0.5,
            "llama.attention.sliding_window": 4096,
            "llama.attn_logit_softcapping": 0.0,
            "llama.expert_count": 0,
            "llama.expert_used_count": 0,
            "llama.logit_scale": 1.0,
            "llama.rope.scaling.type": "none",
            "llama.tensor_data_layout": "Meta AI original pth",
        },
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
    ],
)
def test_keys_that_say_nothing_change_nothing(
    path: Path, settings: dict[str, Any]
) -> None:
    plain = save_gguf(path, settings=settings)
    torch.testing.assert_close(
        stream_of(path)[:-1], expected_stream(plain), rtol=1e-4, atol=1e-4
    )


def test_a_head_narrower_than_its_rotation_says_is_refused(path: Path) -> None:
    save_gguf(path, settings={"llama.rope.dimension_count": 4})
    assert "of another shape" in refused(path)
    save_gguf(
        path,
        settings={"llama.rope.dimension_count": 4, "llama.attention.key_length": 8},
    )
    assert "holds llama.rope.dimension_count = 4, for which" in refused(path)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",
        "blk.1.ffn_down.bias",
        "blk.0.attn_q_norm.weight",
        "blk.1.post_attention_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q.scale",
        "output.bias",
        "rope_factors_long.weight",
        "sideways.weight",
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(path: Path, name: str) -> None:
    save_gguf(path, tensors={name: np.ones(32, dtype=np.float32)})
    assert f"holds {name}, for which transformers has no place" in refused(path)


def test_what_lacks_is_named_beside_what_has_no_place(path: Path) -> None:
    """In one message, as of any checkpoint: the check is the same."""
    save_gguf(path, renamed=("blk.1.ffn_up", "blk.1.ffn_upper"))
    message = refused(path)
    assert (
        "lacks 1 of the 21 weights of a LlamaForCausalLM: model.layers.1.mlp.up"
        in message
    )
    assert "what it holds besides: blk.1.ffn_upper.weight;" in message


def test_each_tensor_has_one_weight_as_its_place(path: Path) -> None:
    plain = save_gguf(path, tensors={"sideways.weight": np.ones(3, dtype=np.float32)})
    contents = GgufContents.from_file(str(path), path)
    places = contents.places(plain, Reading((), {}, {}, None))
    weights = [place.weight for place in places.values()]
    assert sorted(weights) == sorted([*plain.state_dict(), "sideways.weight"])
    for tensor, place in places.items():
        if tensor.name != "sideways.weight":
            weight = plain.state_dict()[place.weight]
            assert tensor.shape == tuple(weight.shape)
            assert tensor.holds_numbers


def test_factors_of_another_number_of_pairs_are_refused(path: Path) -> None:
    save_gguf(path, tensors={"rope_freqs.weight": np.ones(7, dtype=np.float32)})
    assert "holds rope_freqs.weight, for which transformers has no place" in refused(
        path
    )


def test_an_adapter_alone_says_what_to_do(path: Path) -> None:
    save_gguf(path, settings={"general.type": "adapter"})
    assert "is an adapter alone: merge it" in refused(path)


def config_of(path: Path, architecture: str, settings: dict[str, Any]) -> Any:
    """Return the configuration of a file without weights. `settings` are keys of the
    architecture, and tensors.
    """
    from gguf import GGUFWriter
    from transformers import PretrainedConfig

    writer = GGUFWriter(path, architecture)
    add: dict[type, Any] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    sizes = {
        "context_length": 8192,
        "embedding_length": 256,
        "block_count": 2,
        "feed_forward_length": 512,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "vocab_size": 100,
    }
    for key, value in (sizes | settings).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            add[type(value)](f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields, _ = PretrainedConfig.get_config_dict(path.parent, gguf_file=path.name)
    contents = GgufContents.from_file(str(path), path)
    return CompletedConfig(contents, fields).config()


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        (
            "gemma3",
            {"rope.freq_base": 1e6, "attention.key_length": 32, **LINEAR},
            {
                "rope_parameters": {
                    # llama.cpp scales layers alone that see everything.
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "linear",
                        "factor": 8.0,
                        "rope_theta": 1e6,
                    },
                }
            },
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 0.0},
            {"attn_logit_softcapping": 40.0, "final_logit_softcapping": None},
        ),
        ("gemma2", {"block_count": 46}, {"query_pre_attn_scalar": 32}),
        ("phi3", {"attention.sliding_window": 2047}, {"sliding_window": 2047}),
        ("qwen3", {"attention.key_length": 64}, {"head_dim": 64}),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_feed_forward_length": 96},
            {"moe_intermediate_size": 96},
        ),
        (
            "starcoder2",
            {"rope.freq_base": 5e4},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        ),
        ("nemotron", {"attention.layer_norm_epsilon": 0.25}, {"norm_eps": 0.25}),
        (
            "falcon",
            {"attention.layer_norm_epsilon": 0.25},
            {"layer_norm_epsilon": 0.25},
        ),
        (
            "stablelm",
            {"rope.dimension_count": 16, "rope.freq_base": 5e4},
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        (
            "phi3",
            {
                "rope.dimension_count": 8,
                "rope.scaling.attn_factor": 1.25,
                "rope.scaling.original_context_length": 4096,
                "rope_factors_long.weight": np.full(4, 2.0, dtype=np.float32),
                "rope_factors_short.weight": np.full(4, 1.5, dtype=np.float32),
            },
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.25,
                    "long_factor": [2.0] * 4,
                    "short_factor": [1.5] * 4,
                    "attention_factor": 1.25,
                    "original_max_position_embeddings": 4096,
                }
            },
        ),
    ],
)
def test_other_architectures_are_told_what_they_have_a_place_for(
    path: Path, architecture: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = config_of(path, architecture, settings)
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("architecture", "setting", "value"),
    [
        # Phi 3 in transformers knows LongRoPE alone.
        ("phi3", "rope.scaling.factor", 8.0),
        ("qwen2", "attention.sliding_window", 512),
        ("qwen2", "attn_logit_softcapping", 50.0),
        ("gpt2", "rope.freq_base", 1e4),
        ("gemma3", "attention.scale", 0.3),
    ],
)
def test_other_architectures_refuse_the_rest(
    path: Path, architecture: str, setting: str, value: Any
) -> None:
    message = f"{architecture}.{setting} = {value}"
    with pytest.raises(tlc.ModelError, match=re.escape(message)):
        config_of(path, architecture, {setting: value})
