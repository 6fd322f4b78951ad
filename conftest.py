"""Names that docstring examples use: a tiny random model and its trace, and that of an image."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Read when transformers is imported: examples ask the hub for nothing.
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "tests"))

gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: to look for garbage in it again and again takes a good part of the time of importing."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    if not isinstance(request.node, pytest.DoctestItem):
        return
    names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
    names |= request.getfixturevalue("_example_names")


@pytest.fixture(scope="session")
def _example_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import torch

    import tiny
    import tl_coupling as tlc
    import vision_models

    folder = tmp_path_factory.mktemp("example_tokenizer")
    tiny.save_tokenizer(folder)
    model = tiny.bridge(tiny.huggingface_model("llama"), folder)
    image_trace = tlc.trace(vision_models.vit("ViTModel")[0], vision_models.pixels())
    names = {"model": model, "trace": tlc.trace(model, tiny.TOKENS), "image_trace": image_trace}
    return {"torch": torch, "tlc": tlc, **names}
