"""Folders of models that hold something else than they should, and what is said of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import tl_coupling as tlc

State = dict[str, Tensor]


def changed(
    source: Path,
    folder: Path,
    change: Callable[[State], State] | None = None,
    **fields: object,
) -> Path:
    """Return a copy of a folder with other tensors, and fields of its configuration."""
    shutil.copytree(source, folder)
    if change is not None:
        file = folder / "model.safetensors"
        # The tensors of a file share no memory.
        state = {key: tensor.clone() for key, tensor in change(load_file(file)).items()}
        save_file(state, file, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def refused(folder: Path, **options: object) -> str:
    """Return the one line that refuses to load a folder."""
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(folder), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
