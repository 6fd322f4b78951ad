"""Quantised models against float32 models with the same weights, dequantised here by
hand, and what is refused.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from model_folders import save_gguf
from tl_coupling.models.weights.quantized import dequantised
from zoo.oracle import Oracle

pytestmark = pytest.mark.both_lines

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed",
)
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)

# The 16 quantiles of a normal distribution between which NF4 chooses (Dettmers et al.
# 2023, appendix E).
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def saved(architecture: str, folder: Path, **changes: Any) -> Path:
    tiny.huggingface_model(architecture, **changes).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


def huggingface(folder: Path, kind: str | None = None) -> nn.Module:
    """The model as HuggingFace loads and quantises it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
    }
    on_loading = (
        BitsAndBytesConfig(**four_bits)
        if kind == "nf4"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    quantization = {} if kind is None else {"quantization_config": on_loading}
    # Eager, as bridges compute.
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | quantization
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def decoded(layer: Any) -> np.ndarray:
    """The matrix of a quantised layer, from its integers, scales and code: bitsandbytes
    computes nothing.
    """
    integers = layer.weight.data.numpy()
    if layer.weight.dtype == torch.int8:
        return integers * layer.weight.SCB.numpy()[:, None] / 127
    state = layer.weight.quant_state
    codes = np.stack([integers >> 4, integers & 15], -1).reshape(-1, state.blocksize)
    return (np.array(NF4)[codes] * state.absmax.numpy()[:, None]).reshape(state.shape)


def float_twin(folder: Path, kind: str) -> nn.Module:
    """A plain float32 model of HuggingFace's with the dequantised weights."""
    packed, plain = huggingface(folder, kind), huggingface(folder)
    n_changed = 0
    for name, layer in packed.named_modules():
        if type(layer).__name__ in ("Linear4bit", "Linear8bitLt"):
            weight, matrix = (
                plain.get_submodule(name).weight,
                torch.from_numpy(decoded(layer)).float(),
            )
            matrix = (
                matrix if type(plain.get_submodule(name)) is nn.Linear else matrix.T
            )
            assert (
                0.001 < float((matrix - weight.data).norm() / weight.data.norm()) < 0.2
            )
            weight.data = matrix.contiguous()
            n_changed += 1
    assert n_changed >= 4 * tiny.N_LAYERS
    return plain


def check_all(model: nn.Module, plain: nn.Module) -> None:
    """Stream, Jacobians, singular values and depth coupling against those of a float32
    model.
    """
    trace, position = tlc.trace(model, tiny.TOKENS), len(tiny.TOKENS) - 1
    with torch.no_grad():
        stream = plain(
            torch.tensor([tiny.TOKENS]), output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(
        trace.residual[:-1], torch.cat(stream[:-1]), rtol=1e-5, atol=1e-5
    )
    pairs = [(position, position), (2, position)]
    of_layers = [
        tiny.oracle_jacobians(plain, tiny.TOKENS, layer, pairs)
        for layer in range(trace.n_layers)
    ]

    def close(got: Tensor, expected: Tensor) -> None:
        assert float((got - expected).norm()) <= 1e-5 * float(expected.norm())

    for layer, expected in enumerate(of_layers):
        for t1, t2 in pairs:
            close(
                tlc.block_jacobian(trace, layer, input_position=t1, output_position=t2),
                expected[t1, t2],
            )
    J = np.stack(
        [expected[position, position].double().numpy() for expected in of_layers]
    )
    U, S, Vh = np.linalg.svd(J)
    result = tlc.depth_coupling(trace, k=6)
    close(result.singular_values, torch.from_numpy(S[:, :6]).float())
    for l1 in range(len(J)):
        for l2 in range(len(J)):
            A = U[l2, :, :6].T @ J[l1] @ Vh[l2, :6].T
            expected = 1 - np.linalg.norm(A - np.diag(np.diag(A))) / np.linalg.norm(A)
            assert abs(float(result.coupling(6)[l1, l2]) - expected) <= 1e-5


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
# Linear layers one by one; matrices of GPT-2 and NeoX, which bridges take apart, the
# first transposed.
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox"])
def test_what_is_measured_are_the_dequantised_weights(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    folder = saved(architecture, tmp_path)
    plain = float_twin(folder, kind)
    model = tlc.load_model(str(folder), quantization=kind)
    check_all(model, plain)
    provenance = tlc.trace(model, tiny.TOKENS).provenance
    assert provenance["quantization"] == kind
    assert provenance["quantized"].startswith("on loading, by bitsandbytes 0.")
    assert (
        provenance["weights"]
        == f"dequantised{', one block at a time' if architecture == 'llama' else ' on loading'}"
    )
    assert (
        provenance["n_params"]
        == tlc.trace(tlc.load_model(str(folder)), tiny.TOKENS).provenance["n_params"]
    )


@needs_bitsandbytes
def test_weights_are_packed_again_when_nothing_is_measured(tmp_path: Path) -> None:
    model = tlc.load_model(str(saved("llama", tmp_path)), quantization="nf4")

    def layers() -> dict[str, tuple[str, str, int]]:
        named = (
            (n, m)
            for n, m in model.named_modules()
            if isinstance(m, nn.Linear) and "_proj" in n
        )
        return {
            name: (type(m).__name__, str(m.weight.dtype), id(m.weight))
            for name, m in named
        }

    packed_layers = layers()
    assert {kind for kind, *_ in packed_layers.values()} == {"Linear4bit"}
    trace = tlc.trace(model, tiny.TOKENS)
    with trace.blocks[0].evaluation():
        inside = layers()
        assert {
            described[:2] for name, described in inside.items() if ".0." in name
        } == {("Linear", "torch.float32")}
        assert {
            described[:2] for name, described in inside.items() if ".1." in name
        } == {("Linear4bit", "torch.uint8")}
    tlc.block_jacobians(trace)
    assert layers() == packed_layers


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_running_the_model_itself_changes_nothing(kind: str, tmp_path: Path) -> None:
    """bitsandbytes rewrites 4-bit weights for some processors when they are used, and
    moves int8's scales.
    """
    model = tlc.load_model(
        str(saved("llama", tmp_path, hidden_size=64)), quantization=kind
    )
    J_of_packed = tlc.block_jacobians(tlc.trace(model, tiny.TOKENS))
    with torch.no_grad():
        model(torch.tensor([tiny.TOKENS]))
    assert torch.equal(tlc.block_jacobians(tlc.trace(model, tiny.TOKENS)), J_of_packed)


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_checkpoint_that_was_saved_quantised(kind: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "float")
    huggingface(folder, kind).save_pretrained(tmp_path / "packed")
    tiny.save_tokenizer(tmp_path / "packed")
    first = tlc.trace(tlc.load_model(str(folder), quantization=kind), tiny.TOKENS)
    second = tlc.trace(tlc.load_model(str(tmp_path / "packed")), tiny.TOKENS)
    assert torch.equal(tlc.block_jacobians(first), tlc.block_jacobians(second))
    assert (second.provenance["quantization"], second.provenance["quantized"]) == (
        kind,
        "as saved",
    )
    with pytest.raises(
        tlc.ModelError,
        match=rf"is quantised already \({kind}\): leave `quantization` out$",
    ):
        tlc.load_model(str(tmp_path / "packed"), quantization="nf4")
    with pytest.raises(
        tlc.ModelError,
        match=rf"are quantised or are to be \({kind}\): leave one of the two out$",
    ):
        tlc.load_model(str(tmp_path / "packed"), memory="stream")
    # Its configuration alone is used.
    assert (
        "quantization"
        not in tlc.trace(
            tlc.load_model(str(tmp_path / "packed"), untrained=True), [3]
        ).provenance
    )


@needs_bitsandbytes
@pytest.mark.parametrize("part", ["nested_absmax", "nested_quant_map"])
def test_scales_of_scales_that_are_lost(part: str, tmp_path: Path) -> None:
    """Without them, bitsandbytes takes scales in 8 bits as they are."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = saved("llama", tmp_path / "float")
    twice = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=twice)
    packed.save_pretrained(tmp_path / "packed")
    tiny.save_tokenizer(tmp_path / "packed")
    tlc.load_model(str(tmp_path / "packed"))
    file = tmp_path / "packed" / "model.safetensors"
    state = load_file(file)
    lost = f"model.layers.0.self_attn.q_proj.weight.{part}"
    save_file({key: state[key] for key in state if key != lost}, file, {"format": "pt"})
    with pytest.raises(tlc.ModelError, match=r"self_attn\.q_proj\.weight"):
        tlc.load_model(str(tmp_path / "packed"))


@needs_bitsandbytes
def test_a_model_that_the_user_quantised(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    folder = saved("llama", tmp_path)
    trace = tlc.trace(
        tiny.bridge(huggingface(folder, "nf4"), tokenizer_folder), tiny.TOKENS
    )
    assert trace.provenance["quantization"] == "nf4"
    again = tlc.trace(tlc.load_model(str(folder), quantization="nf4"), tiny.TOKENS)
    assert torch.equal(tlc.block_jacobians(trace), tlc.block_jacobians(again))
    state = again.model.blocks[0].mlp.out.original_component.weight.quant_state
    # What bitsandbytes does on some processors, in the user's own forward pass.
    state.packing_format_for_cpu = True
    with pytest.raises(
        ValueError,
        match="has rounded the scales of these 4-bit weights to bfloat16, as it does when",
    ):
        tlc.block_jacobian(again, 0)
    # What it makes of them when the model is saved afterwards.
    state.packing_format_for_cpu = False
    state.absmax = state.absmax[None]
    with pytest.raises(
        ValueError, match="with their scales in another order: quantise"
    ):
        tlc.block_jacobian(again, 0)


@needs_bitsandbytes
def test_a_quantised_model_in_memory_keeps_its_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bitsandbytes would rewrite its weights when it is first run."""
    from bitsandbytes.nn import modules

    def rewritten(*_: object) -> None:
        raise AssertionError("the weights are rewritten")

    # Not of versions that have one layout.
    monkeypatch.setattr(
        modules, "_convert_weight_packed_for_cpu", rewritten, raising=False
    )
    folder = saved("llama", tmp_path)
    packed = huggingface(folder, "nf4")
    layers = [part for part in packed.modules() if isinstance(part, modules.Linear4bit)]
    assert layers
    for part in layers:
        part.support_avx512bf16_for_cpu = True
    trace = tlc.trace(packed, tiny.TOKENS)
    assert trace.provenance["quantization"] == "nf4"
    by_name = tlc.trace(tlc.load_model(str(folder), quantization="nf4"), tiny.TOKENS)
    torch.testing.assert_close(
        tlc.block_jacobians(trace), tlc.block_jacobians(by_name), rtol=0, atol=1e-6
    )
    assert all(part.support_avx512bf16_for_cpu for part in layers)


@needs_bitsandbytes
@pytest.mark.parametrize(
    ("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_rows_are_whole_blocks_bitsandbytes_dequantises_alike(
    kind: str, nested: bool, dtype: torch.dtype
) -> None:
    """Where they are not, its kernel for the CPU is wrong: it returns what is 26 % off,
    where 4 bits lose 9 %.
    """
    from bitsandbytes import functional

    weight = torch.randn(
        96, 192, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    data, state = functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested
    )
    layer = SimpleNamespace(weight=SimpleNamespace(data=data, quant_state=state))
    assert torch.equal(dequantised(layer), functional.dequantize_4bit(data, state))


def test_weights_in_bfloat16_are_computed_in_float32(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    trace = tlc.trace(tlc.load_model(str(folder), dtype=torch.bfloat16), tiny.TOKENS)
    plain = huggingface(folder)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    oracle = Oracle(
        plain,
        "model.layers",
        {"input_ids": torch.tensor([tiny.TOKENS])},
        trace.residual,
    )
    for layer in range(trace.n_layers):
        expected = oracle.jacobians(layer, [(2, 7)])[2, 7]
        got = tlc.block_jacobian(trace, layer, input_position=2, output_position=7)
        assert float((got - expected).norm()) <= 1e-5 * float(expected.norm())


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_model_is_run_in_float32_whatever_its_other_weights_are_in(
    kind: str, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path)
    trace = tlc.trace(
        tlc.load_model(str(folder), quantization=kind, dtype=torch.bfloat16),
        tiny.TOKENS,
    )
    # Embeddings and norms in bfloat16, int8 of those values.
    for parameter in (plain := huggingface(folder)).parameters():
        parameter.data = parameter.data.bfloat16().float()
    for name, layer in trace.model.named_modules():
        if isinstance(layer, nn.Linear) and "_proj" in name:
            path = name.replace("_original_component.", "").removesuffix(
                "._original_component"
            )
            weight = torch.from_numpy(decoded(layer)).float()
            # Four bits are dequantised in the dtype that was quantised.
            weight = weight.bfloat16().float() if kind == "nf4" else weight
            plain.get_submodule(
                path.replace("blocks", "model.layers")
            ).weight.data = weight
    with torch.no_grad():
        stream = plain(
            torch.tensor([tiny.TOKENS]), output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(
        trace.residual[:-1], torch.cat(stream[:-1]), rtol=1e-5, atol=1e-5
    )
    assert tlc.block_jacobians(trace).dtype == torch.float32


def test_fp8_is_dequantised_by_transformers(tmp_path: Path) -> None:
    """A checkpoint of weights in float8 with a scale for each block of 32 × 32, and the
    same in float32.
    """
    from safetensors.torch import load_file, save_file

    folder = saved("llama", tmp_path / "fp8", intermediate_size=64)
    plain = huggingface(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if "_proj" in name]:
        blocks = (
            plain.get_parameter(name)
            .data.unflatten(0, (-1, min(32, len(state[name]))))
            .unflatten(2, (-1, 32))
        )
        scales = blocks.abs().amax((1, 3)) / 448
        stored = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        state |= {name: stored.reshape(state[name].shape), f"{name}_scale_inv": scales}
        plain.get_parameter(name).data = (
            stored.float() * scales[:, None, :, None]
        ).reshape(state[name].shape)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
        "activation_scheme": "dynamic",
    }
    edit_config(folder, quantization_config=config)
    model = tlc.load_model(str(folder))
    check_all(model, plain)
    assert tlc.trace(model, tiny.TOKENS).provenance["quantization"] == "fp8"


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@needs_gguf
def test_a_gguf_file(tmp_path: Path) -> None:
    plain = save_gguf(tmp_path / "tiny.Q8_0.gguf")
    model = tlc.load_model(str(tmp_path / "tiny.Q8_0.gguf"))
    check_all(model, plain)
    trace = tlc.trace(model, "w3w4")
    assert trace.str_tokens == ("w", "3", "w", "4") or trace.str_tokens == ("w3", "w4")
    assert trace.provenance["quantization"] == "gguf"
    twin = tlc.load_model(str(tmp_path / "tiny.Q8_0.gguf"), untrained=True)
    assert twin.W_E.shape == model.W_E.shape
    assert "quantization" not in tlc.trace(twin, tiny.TOKENS).provenance


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        tlc.load_model(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_what_is_no_kind_of_quantisation(folder_model: Path, as_a_user: None) -> None:
    message = refused(str(folder_model), quantization="nf5")
    assert message == """`quantization` must be "nf4" or "int8", got 'nf5'"""


def test_without_bitsandbytes(
    folder_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "bitsandbytes" else find_spec(name),
    )
    install = 'needs bitsandbytes, which is not installed: pip install "tl-coupling[quantized]"'
    assert (
        refused(str(folder_model), quantization="int8")
        == f'`quantization="int8"` {install}'
    )
    saved_in = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    edit_config(
        folder := Path(shutil.copytree(folder_model, tmp_path / "packed")),
        quantization_config=saved_in,
    )
    assert refused(str(folder)) == f"{str(folder)!r}, which is saved in nf4, {install}"


@pytest.mark.parametrize("method", ["gptq", "awq", "unheard-of"])
def test_what_transformers_does_not_dequantise(
    method: str, folder_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folder_model, tmp_path / "packed"))
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    assert (
        f"is quantised with {method}, which transformers does not dequantise: load its float"
        in refused(str(folder))
    )


def test_what_does_not_go_with_quantisation(folder_model: Path) -> None:
    streamed = refused(str(folder_model), quantization="nf4", memory="stream")
    assert streamed.endswith(
        "are quantised or are to be (nf4): leave one of the two out"
    )
    assert (
        refused("some.gguf", quantization="nf4")
        == "'some.gguf' is quantised already (gguf): leave `quantization` out"
    )
    message = refused(str(folder_model), quantization="nf4", dtype=torch.float64)
    assert message.startswith(
        '`dtype` with `quantization="nf4"` must be float32, bfloat16 or float16'
    )
    assert "exclude each other" in refused(
        str(folder_model), quantization="nf4", untrained=True
    )
    assert 'leave `backend="hooked"` out' in refused(
        "gpt2", quantization="nf4", backend="hooked"
    )


@needs_gguf
def test_a_gguf_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused("no-such.gguf").startswith(
        "there is no file 'no-such.gguf': wanted a GGUF file"
    )
    save_gguf(good_file := tmp_path / "whole.gguf")
    (cut := tmp_path / "cut.gguf").write_bytes(good_file.read_bytes()[:5000])
    (bad_file := tmp_path / "other.gguf").write_text("no GGUF at all" * 100)
    (empty := tmp_path / "empty.gguf").touch()
    for damaged in (cut, bad_file, empty):
        assert "the file is damaged, or not a GGUF file" in refused(str(damaged))
    save_gguf(unknown := tmp_path / "unknown.gguf", "starship")
    assert (
        "load the same model from a folder or hub name in HuggingFace format"
        in refused(str(unknown))
    )
    assert "starship" in refused(str(unknown))
    assert "has no checkpoints, it is a GGUF file" in refused(
        str(good_file), checkpoint=3
    )
