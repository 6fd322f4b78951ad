"""The patch for TransformerLens is still needed."""

from contextlib import nullcontext
from pathlib import Path

import pytest

import model_folders
import tl_coupling as tlc
from tl_coupling.models import loading

pytestmark = pytest.mark.both_lines


@pytest.mark.filterwarnings("ignore:Hook alias")
def test_transformer_lens_still_installs_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.check_call", commands.append)
    monkeypatch.setattr(loading, "nothing_installed", nullcontext)
    model_folders.save("llava", tmp_path / "model")
    tlc.load_model(str(tmp_path / "model"))
    # Needed as long as a supported version does so: see `pyproject.toml`.
    assert commands, "delete models/patched_transformer_lens.py: nothing is installed"
