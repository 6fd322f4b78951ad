"""The patch of transformers is still needed."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import model_folders
import tl_coupling as tlc
from tl_coupling.models.weights import streaming

pytestmark = pytest.mark.both_lines


def test_transformers_still_reads_weights_that_stay_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    can_go = "delete models/patched_transformers.py: transformers reads no such weight"
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
