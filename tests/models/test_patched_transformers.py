"""The patches of transformers are still needed."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model_folders
import tiny
import tl_coupling as tlc
from tl_coupling.models.patched_transformers import noted_readings
from tl_coupling.models.weights import streaming

pytestmark = pytest.mark.both_lines


def test_transformers_still_reads_weights_that_stay_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    can_go = "delete `skip_reading_weights`: transformers reads no such weight"
    assert hasattr(core_model_loading, "spawn_materialize"), can_go
    spawn = core_model_loading.spawn_materialize
    read: list[str] = []

    def watched(*args: Any, **options: Any) -> Callable[[], Any]:
        job = spawn(*args, **options)
        return lambda: read.append("a weight") or job()

    model_folders.save("mamba", tmp_path / "model")
    monkeypatch.setattr(core_model_loading, "spawn_materialize", watched)
    tlc.load_model(str(tmp_path / "model"), memory="stream")
    assert not read
    monkeypatch.setattr(streaming, "skip_reading_weights", nullcontext)
    tlc.load_model(str(tmp_path / "model"), memory="stream")
    assert read, can_go


def test_transformers_still_says_nothing_of_some_tensors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny.huggingface_model("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    # A bias that is none of the masks that GPT-2's class declares harmless, and a weight
    # that is there twice.
    biases = {
        "transformer.h.0.attn.bias": torch.ones(32),
        "ln_f.weight": torch.ones(32),
    }
    save_file(load_file(file) | biases, file, {"format": "pt"})
    with noted_readings() as readings:
        _, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
    can_go = "delete `noted_readings`: transformers reports what it leaves out"
    assert not report["unexpected_keys"], can_go
    (reading,) = readings
    assert reading.files == (str(file),)
    assert reading.places["transformer.h.0.attn.bias"].weight not in reading.weights
    placed = {
        reading.places[name] for name in ("ln_f.weight", "transformer.ln_f.weight")
    }
    assert placed == {("transformer.ln_f.weight", None)}
    assert reading.weights["transformer.ln_f.weight"] == (torch.float32, (32,), True)


def test_functions_of_transformers_are_put_back() -> None:
    from transformers import PreTrainedModel, core_model_loading

    rename = core_model_loading.rename_source_key
    read = PreTrainedModel._load_pretrained_model
    with noted_readings():
        assert core_model_loading.rename_source_key is not rename
    with pytest.raises(OSError, match="no-such-folder"), noted_readings():
        PreTrainedModel.from_pretrained("./no-such-folder")
    assert core_model_loading.rename_source_key is rename
    assert PreTrainedModel._load_pretrained_model is read


def test_another_thread_is_left_alone(tmp_path: Path) -> None:
    model = tiny.huggingface_model("llama")
    model.save_pretrained(tmp_path)

    def load() -> None:
        type(model).from_pretrained(tmp_path)

    with noted_readings() as readings:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        assert readings == []
        load()
        assert len(readings) == 1
