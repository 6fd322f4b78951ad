"""What headers say of a file's tensors, against the tensors themselves."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import model_folders
from tl_coupling.models.file_tensors import FileTensor, tensors_in

# The dtype, whether its entries are numbers as they are, and whether whole ones.
DTYPES = {
    torch.float64: (True, False),
    torch.float32: (True, False),
    torch.float16: (True, False),
    torch.bfloat16: (True, False),
    torch.float8_e4m3fn: (False, False),
    torch.float8_e5m2: (False, False),
    torch.complex64: (False, False),
    torch.int64: (False, True),
    torch.int32: (False, True),
    torch.int8: (False, True),
    torch.uint8: (False, True),
    torch.uint32: (False, True),
    torch.bool: (False, True),
}
CONTENT = {
    f"tensor {n}": torch.ones(n, 2).to(dtype) for n, dtype in enumerate(DTYPES, 1)
}


def save_safetensors(file: Path) -> None:
    save_file(CONTENT, file)


def save_pickle(file: Path) -> None:
    torch.save({**CONTENT, "step": 3, "name": "text"}, file)


def save_old_pickle(file: Path) -> None:
    # As torch saved until 1.6, which knew these.
    dtypes = (torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8)
    old = {name: tensor for name, tensor in CONTENT.items() if tensor.dtype in dtypes}
    torch.save(old, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("file", "save"),
    [
        ("model.safetensors", save_safetensors),
        ("pytorch_model.bin", save_pickle),
        ("old.bin", save_old_pickle),
    ],
)
def test_headers_say_what_the_tensors_are(file: str, save, tmp_path: Path) -> None:
    save(path := tmp_path / file)
    described = list(tensors_in([str(path)]))
    assert len(described) == (5 if file == "old.bin" else len(CONTENT))
    for tensor in described:
        expected = CONTENT[tensor.name]
        assert tensor.dtype == expected.dtype
        assert tensor.shape == tuple(expected.shape)
        assert tensor.dtype_name == str(expected.dtype).removeprefix("torch.")
        holds = (tensor.holds_numbers, tensor.holds_whole_numbers)
        assert holds == DTYPES[expected.dtype]
        assert torch.equal(tensor.read().view(torch.uint8), expected.view(torch.uint8))


def test_a_dtype_that_torch_does_not_know_holds_no_numbers() -> None:
    tensor = FileTensor("", "name", "F4", (2,))
    assert not tensor.holds_numbers
    assert not tensor.holds_whole_numbers
    assert tensor.dtype_name == "F4"


def test_what_is_in_a_gguf_file_is_not_known_here(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert list(tensors_in([str(tmp_path / "model.gguf")])) == []


def test_a_tensor_of_a_gguf_file_is_dequantised(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    plain = model_folders.save_gguf(path)
    names = {
        "blk.0.ffn_up.weight": "mlp.up_proj",
        "blk.0.attn_norm.weight": "input_layernorm",
    }
    for name, part in names.items():
        tensor = FileTensor(str(path), name, torch.float32, ())
        weight = plain.get_parameter(f"model.layers.0.{part}.weight")
        assert torch.equal(tensor.read(), weight)
    # Its own reader knows where they are in a model.
    assert list(tensors_in([str(path)])) == []
