"""Every tensor of a checkpoint is in its model, or harmless, or the checkpoint is
refused: in memory and streamed, by call and by command.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

State = dict[str, Tensor]
# Plain and fused projections, with and without biases, tied heads, merged experts, an
# encoder.
ARCHITECTURES = (
    "bert", "falcon", "gemma2", "gpt2", "gpt_neox",
    "llama", "mixtral", "opt", "phi3", "qwen3",
)  # fmt: skip
CODES = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
MEMORIES = ["resident", "stream"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save a tiny model of an architecture, once."""
    folders: dict[str, Path] = {}

    def saved_once(architecture: str) -> Path:
        if architecture not in folders:
            folder = tmp_path_factory.mktemp(architecture)
            tiny.huggingface_model(architecture).save_pretrained(folder)
            tiny.save_tokenizer(folder)
            folders[architecture] = folder
        return folders[architecture]

    return saved_once


def changed(
    source: Path, folder: Path, change: Callable[[State], State], **fields: object
) -> Path:
    """Return a copy of a folder with other tensors, and fields of its configuration."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    state = {key: tensor.clone() for key, tensor in change(load_file(file)).items()}
    save_file(state, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(folder), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def with_one_more(state: State, draw: random.Random) -> State:
    """A tensor beside one of the file, as another configuration would have it."""
    owner = draw.choice(sorted(state)).rpartition(".")[0]
    names = [f"{owner}.{end}" for end in ("bias", "k_norm.weight", "extra", "scale")]
    name = draw.choice([name for name in names if name not in state])
    size = draw.choice([8, 32, 48])
    return state | {name: torch.randn(size, generator=torch.Generator().manual_seed(0))}


def with_one_renamed(state: State, draw: random.Random) -> State:
    old = draw.choice(sorted(state))
    owner, _, end = old.rpartition(".")
    new = draw.choice([f"{old}_", f"{owner}.other.{end}", f"other.{old}"])
    return {new if key == old else key: tensor for key, tensor in state.items()}


def with_one_in(dtype: torch.dtype) -> Callable[[State, random.Random], State]:
    def converted(state: State, draw: random.Random) -> State:
        key = draw.choice(sorted(state))
        return state | {key: state[key].to(dtype)}

    return converted


CHANGES = {
    "added": with_one_more,
    "renamed": with_one_renamed,
    **{str(dtype).removeprefix("torch."): with_one_in(dtype) for dtype in CODES},
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_left_out_in_silence(
    architecture: str,
    change: str,
    memory: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    draw = random.Random(f"{architecture} {change}")
    folder = changed(
        saved(architecture),
        tmp_path / "changed",
        lambda state: CHANGES[change](state, draw),
    )
    intact = load_file(saved(architecture) / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    (name,) = (
        key
        for key in tensors
        if key not in intact or tensors[key].dtype != intact[key].dtype
    )
    message = refused(folder, memory=memory)
    # Experts are one tensor in the model, which is what lacks one.
    assert name in message or "experts" in name


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_whole_is_measured(
    architecture: str, memory: str, saved: Callable[[str], Path]
) -> None:
    model = tlc.load_model(str(saved(architecture)), memory=memory)
    assert "head" not in tlc.trace(model, tiny.TOKENS).provenance


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_no_codes(
    dtype: torch.dtype, memory: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(
        saved("llama"),
        tmp_path / "changed",
        lambda state: {key: tensor.to(dtype) for key, tensor in state.items()},
    )
    model = tlc.load_model(str(folder), memory=memory)
    plain = tiny.huggingface_model("llama")
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype).float()
    with torch.no_grad():
        expected = plain(torch.tensor([tiny.TOKENS]), output_hidden_states=True)
    torch.testing.assert_close(
        tlc.trace(model, tiny.TOKENS).residual[:-1],
        torch.cat(expected.hidden_states[:-1]),
        rtol=1e-5,
        atol=1e-5,
    )
