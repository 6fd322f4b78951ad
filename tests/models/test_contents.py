"""Every tensor of a checkpoint is in its model, or harmless, or the checkpoint is
refused: in memory and streamed, by call and by command.
"""

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
from other_folders import changed, refused

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
# Of streamed models, those of plain weights and of merged ones stay in the fast tier.
CASES = [
    pytest.param(
        architecture,
        memory,
        marks=pytest.mark.long("one of many architectures")
        if memory == "stream" and architecture not in ("llama", "mixtral")
        else (),
    )
    for architecture in ARCHITECTURES
    for memory in MEMORIES
]


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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("architecture", "memory"), CASES)
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


@pytest.mark.parametrize(("architecture", "memory"), CASES)
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


def vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def beside(**tensors: Tensor) -> Callable[[State], State]:
    """Return what adds tensors; `__` in their names stands for a full stop."""
    return lambda state: (
        state | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    )


def scaled_codes(
    dtype: torch.dtype, highest: float, scale: str, block: int | None = None
) -> Callable[[State], State]:
    """Return what turns projections into codes with scales: one for each row, or for
    each block.
    """

    def coded(state: State) -> State:
        for key in [key for key in state if "_proj" in key]:
            weight = state[key]
            scales = weight.abs().amax(1) / highest
            state[key] = (weight / scales[:, None]).to(dtype)
            if block is not None:
                n_rows, n_columns = (-(-size // block) for size in weight.shape)
                scales = torch.full((n_rows, n_columns), float(scales.max()))
            state[key.removesuffix("weight") + scale] = scales
        return state

    return coded


SILENT = {
    "biases": beside(
        model__layers__0__self_attn__q_proj__bias=vector(32),
        model__layers__1__self_attn__k_proj__bias=vector(16),
    ),
    "norms of heads": beside(model__layers__0__self_attn__k_norm__weight=vector(8)),
    "the head's bias": beside(lm_head__bias=vector(100)),
    "FP8": scaled_codes(torch.float8_e4m3fn, 448, "weight_scale"),
    "FP8 in blocks": scaled_codes(torch.float8_e4m3fn, 448, "weight_scale_inv", 16),
    "int8": scaled_codes(torch.int8, 127, "SCB"),
    "int8 of another make": scaled_codes(torch.int8, 127, "weight_scale"),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", SILENT)
def test_what_transformers_leaves_out_is_said_by_command(
    kind: str,
    memory: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    call: Callable[..., object],
) -> None:
    folder = changed(saved("llama"), tmp_path / "changed", SILENT[kind])
    out = tmp_path / "out"
    printed = call(
        "depth", model=folder, prompt="w7 w8", memory=memory, out=out, status=2
    ).err
    (line,) = [line for line in printed.splitlines() if "tl-coupling: " in line]
    assert line == f"tl-coupling: {refused(folder, memory=memory)}"
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("biases", "holds model.layers.0.self_attn.q_proj.bias, model.layers.1.self_a"),
        ("norms of heads", "for which a LlamaForCausalLM of its configuration has no "),
        ("the head's bias", "holds lm_head.bias, for which a LlamaForCausalLM of its"),
        ("FP8", "holds float8_e4m3fn in place of floating point, which looks like FP8"),
        ("FP8 in blocks", "which looks like FP8 with a scale for each block: model.la"),
        (
            "int8",
            "holds int8 in place of floating point, which looks like bitsandbytes",
        ),
        ("int8 of another make", "holds int8 in place of floating point: model.layers"),
    ],
)
def test_three_are_named_and_what_to_do(
    kind: str, words: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    message = refused(changed(saved("llama"), tmp_path / "changed", SILENT[kind]))
    assert words in message
    advice = (
        "load its float checkpoint, with `quantization=` if you wish, or a GGUF file"
        if "8" in kind
        else "load it with its own configuration, or as the class that it was saved from"
    )
    assert message.endswith(advice)
    assert (", …" in message) == ("8" in kind)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickles_are_held_to_the_same(
    is_zip: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved("llama"), tmp_path / "pickled"))
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()

    def pickle(content: dict[str, object]) -> None:
        file = folder / "pytorch_model.bin"
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)

    pickle(state | {"step": 3})
    tlc.load_model(str(folder))
    pickle(state | {"lm_head.bias": vector(100)})
    assert "holds lm_head.bias, for which" in refused(folder)
    pickle(state | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    assert "holds int8 in place of floating point: model.norm.weight" in refused(folder)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        # transformers adds the prefix of the body.
        ("llama", "norm.weight"),
        # An old name of `LayerNorm.weight`.
        ("bert", "bert.embeddings.LayerNorm.gamma"),
    ],
)
def test_two_tensors_for_one_weight(
    architecture: str,
    name: str,
    memory: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    key = {"llama": "model.norm.weight"}.get(architecture, name).replace(
        "gamma", "weight"
    )
    source = saved(architecture)
    other = changed(source, tmp_path / "other", lambda s: s | {name: vector(32)})
    assert "more than once, under another name" in refused(other, memory=memory)
    same = changed(source, tmp_path / "same", lambda s: s | {name: s[key]})
    tlc.load_model(str(same), memory=memory)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tensor_in_two_files(
    is_same: bool, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    tiny.huggingface_model("llama").save_pretrained(folder, max_shard_size="40KB")
    tiny.save_tokenizer(folder)
    first, *_, last = sorted(folder.glob("*.safetensors"))
    state = load_file(first)
    name = next(iter(state))
    tensor = state[name] if is_same else state[name] + 1
    save_file(load_file(last) | {name: tensor}, last, {"format": "pt"})
    if is_same:
        tlc.load_model(str(folder))
    else:
        assert f"holds {name} more than once" in refused(folder)


@pytest.mark.parametrize(
    "backend",
    ["bridge", pytest.param("hooked", marks=tiny.needs_hooked_transformer)],
)
def test_a_hub_model_is_held_to_the_same(backend: str, hub: Path) -> None:
    file = next((hub / "models--gpt2").rglob("model.safetensors"))
    intact = file.read_bytes()
    try:
        state = load_file(file)
        save_file(state | {"lm_head.bias": vector(100)}, file, {"format": "pt"})
        with pytest.raises(tlc.ModelError, match=r"'gpt2' holds lm_head\.bias, for wh"):
            tlc.load_model("gpt2", backend=backend)
    finally:
        file.write_bytes(intact)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (beside(lm_head__bias=vector(100)), "holds lm_head.bias, for which a Llama"),
        (
            lambda state: {k: v for k, v in state.items() if "1.mlp.up" not in k},
            "lacks 1 of the 21 weights of a LlamaForCausalLM: model.layers.1.mlp.up_pr",
        ),
    ],
)
def test_a_base_model_with_an_adapter_is_held_to_the_same(
    change: Callable[[State], State],
    words: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """transformers says of the adapter alone what it lacks, and holds besides."""
    peft = pytest.importorskip("peft")
    folder = changed(saved("llama"), tmp_path / "adapted", change)
    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(tiny.huggingface_model("llama"), options).save_pretrained(
        folder
    )
    assert words in refused(folder)


def test_an_adapter_is_held_to_the_same(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    folder = Path(shutil.copytree(saved("llama"), tmp_path / "adapted"))
    options = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(tiny.huggingface_model("llama"), options).save_pretrained(
        folder
    )
    file = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    save_file(load_file(file) | {name: torch.ones(4, 32)}, file, {"format": "pt"})
    message = refused(folder)
    assert message.startswith("the adapter of ")
    assert f"holds {name}, for which" in message
