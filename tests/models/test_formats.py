"""Formats of quantised weights are named, with the way to go on: by a configuration, or
where it says nothing by the tensors of the file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import other_folders
import tl_coupling as tlc
from other_folders import changed

pytestmark = pytest.mark.both_lines

State = dict[str, Tensor]
FLOAT = "load its float checkpoint, with `quantization=` if you wish, or a GGUF file"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def packed(
    state: State, dtype: torch.dtype, per_entry: int, others: dict[str, torch.dtype]
) -> State:
    """Pack projections into codes, so many to an entry, beside tensors of that name."""
    for key in [key for key in state if "_proj" in key]:
        n_rows, n_columns = state.pop(key).shape
        module = key.removesuffix("weight")
        name = key if "weight_packed" not in others else f"{module}weight_packed"
        state[name] = torch.zeros(n_rows, n_columns // per_entry, dtype=dtype)
        for other, of_other in others.items():
            if other != "weight_packed":
                state[module + other] = torch.ones(n_rows, 1).to(of_other)
    return state


def nvfp4(state: State) -> State:
    scales = {"weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32}
    return packed(state, torch.uint8, 2, scales)


def nvfp4_of_compressed_tensors(state: State) -> State:
    scales = {
        "weight_packed": torch.uint8,
        "weight_scale": torch.float8_e4m3fn,
        "weight_global_scale": torch.float32,
    }
    return packed(state, torch.uint8, 2, scales)


def int4_of_compressed_tensors(state: State) -> State:
    scales = {"weight_packed": torch.int32, "weight_scale": torch.bfloat16}
    return packed(state, torch.int32, 8, scales)


def mlx(state: State) -> State:
    scales = {"scales": torch.float16, "biases": torch.float16}
    return packed(state, torch.uint32, 8, scales)


def in_blocks(size: int) -> Any:
    """FP8 with a scale for each block of that size, the last one cut short."""

    def coded(state: State) -> State:
        for key in [key for key in state if "_proj" in key]:
            weight = state[key]
            n_rows, n_columns = (-(-length // size) for length in weight.shape)
            state[key] = weight.to(torch.float8_e4m3fn)
            # No two are the same.
            scales = torch.arange(1.0, n_rows * n_columns + 1).view(n_rows, n_columns)
            state[f"{key}_scale_inv"] = scales
        return state

    return coded


def refused(folder: Path, **options: object) -> str:
    message = other_folders.refused(folder, **options)
    assert "hub name" not in message
    return message


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "NVFP4",
                }
            },
            "modelopt (NVFP4)",
        ),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "nvfp4"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization_config": {"bits": 4}}, "a method without a name"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ],
)
def test_by_a_configuration(
    fields: dict[str, Any], name: str, memory: str, folder_model: Path, tmp_path: Path
) -> None:
    folder = changed(folder_model, tmp_path / "coded", **fields)
    message = refused(folder, memory=memory)
    assert f"{str(folder)!r} is quantised with {name}" in message
    assert message.endswith(f", which transformers does not dequantise: {FLOAT}")


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("kind", ["float-quantized", "nvfp4-pack-quantized"])
def test_compressed_tensors_needs_its_package(
    kind: str,
    memory: str,
    folder_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tl_coupling.models.weights import quantized

    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda _: None)
    config = {"quant_method": "compressed-tensors", "format": kind}
    folder = changed(folder_model, tmp_path / "coded", quantization_config=config)
    assert refused(folder, memory=memory) == (
        f"{str(folder)!r}, which is saved in compressed-tensors ({kind}), needs "
        "compressed_tensors, which is not installed: pip install compressed-tensors, "
        f"or {FLOAT}"
    )


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nvfp4, "NVFP4"),
        (nvfp4_of_compressed_tensors, "NVFP4"),
        (int4_of_compressed_tensors, "compressed-tensors"),
        (mlx, "MLX"),
        (in_blocks(16), "FP8 with a scale for each block"),
    ],
)
def test_by_the_tensors(
    change: Any, name: str, memory: str, folder_model: Path, tmp_path: Path
) -> None:
    message = refused(changed(folder_model, tmp_path / "coded", change), memory=memory)
    assert f"in place of floating point, which looks like {name}: model.l" in message
    assert "its configuration has no `quantization_config` that says" in message
    assert message.endswith(FLOAT)


COMPRESSION = {"quant_method": "compressed-tensors", "format": "float-quantized"}


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize(
    ("fields", "change", "name"),
    [
        (
            {"compression_config": COMPRESSION},
            in_blocks(16),
            "compressed-tensors (float-quantized)",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, mlx, "MLX"),
    ],
)
def test_a_configuration_that_transformers_does_not_read(
    fields: dict[str, Any],
    change: Any,
    name: str,
    memory: str,
    folder_model: Path,
    tmp_path: Path,
) -> None:
    folder = changed(folder_model, tmp_path / "coded", change, **fields)
    message = refused(folder, memory=memory)
    assert f"in place of floating point, which looks like {name}: model.l" in message
    # It may be left over, where weights were dequantised since.
    plain = changed(folder_model, tmp_path / "plain", **fields)
    tlc.load_model(str(plain), memory=memory)


# Of 48 × 32 weights, blocks of 20 divide into thirds and halves, and blocks of 28 do not
# divide: transformers takes blocks of another size for the first, and fails on the last.
@pytest.mark.parametrize("size", [20, 28])
def test_a_last_block_that_is_not_whole(
    size: int, folder_model: Path, tmp_path: Path
) -> None:
    config = BLOCKS | {"weight_block_size": [size, size]}
    folder = changed(
        folder_model, tmp_path / "coded", in_blocks(size), quantization_config=config
    )
    message = refused(folder)
    assert f"is in FP8 with a scale for each block of {size} × {size}, and" in message
    assert "of its weights are not whole (model.layers.0." in message
    assert message.endswith(f", which transformers does not dequantise: {FLOAT}")


def test_a_scale_that_is_lost(folder_model: Path, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"

    def without_one(state: State) -> State:
        coded = in_blocks(16)(state)
        return {key: coded[key] for key in coded if key != f"{lost}_scale_inv"}

    config = BLOCKS | {"weight_block_size": [16, 16]}
    folder = changed(
        folder_model, tmp_path / "coded", without_one, quantization_config=config
    )
    message = refused(folder)
    assert f"FP8 with a scale for each block: {lost}; its configuration has" in message


def test_one_matrix_of_one_block_is_whole(folder_model: Path, tmp_path: Path) -> None:
    config = BLOCKS | {"weight_block_size": [128, 128]}
    folder = changed(
        folder_model, tmp_path / "coded", in_blocks(128), quantization_config=config
    )
    trace = tlc.trace(tlc.load_model(str(folder)), [3, 14])
    assert trace.provenance["quantization"] == "fp8"
