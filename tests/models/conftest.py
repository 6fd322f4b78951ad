"""What tests of loading share."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny


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
