"""What docstring examples use: names that they share, and a folder of tiny random
models in which they run.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read when transformers is imported: examples ask the hub for nothing.
os.environ["HF_HUB_OFFLINE"] = "1"
_TESTS = Path(__file__).parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "support")]

import same_bits  # noqa: E402  (found on the path that was just set)

same_bits.round_alike()
gc.disable()

pytest_plugins = ["pytester"]


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but for what the collection of tests imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """Freeze what was imported by now: to look for garbage in it again and again takes
    a good part of the time of surveys, which ask for that before each unit.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _doctest_names(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("_example_folder"))
        request.getfixturevalue("doctest_namespace").update(
            request.getfixturevalue("_example_names")
        )
    yield
    if isinstance(request.node, pytest.DoctestItem) and (
        pyplot := sys.modules.get("matplotlib.pyplot")
    ):
        pyplot.close("all")


@pytest.fixture(scope="session")
def _example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`models/width8/step0` and others in HuggingFace format, `prompts.jsonl` and
    `scores.csv`.
    """
    import tiny

    folder = tmp_path_factory.mktemp("examples")
    steps = {f"width{width}": [2] for width in (8, 12, 16, 20, 24, 28)} | {
        "width16": [0, 2]
    }
    for n, (name, of_model) in enumerate(steps.items()):
        sizes = {
            "hidden_size": int(name[5:]),
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 4,
        }
        for step in of_model:
            path = folder / "models" / name / f"step{step}"
            tiny.huggingface_model(
                "llama", seed=10 * n + step, **sizes
            ).save_pretrained(path)
            tiny.save_tokenizer(path)
    texts = [" ".join(f"w{(7 * i + j) % 100}" for j in range(4 + i)) for i in range(4)]
    prompts = [
        {"id": f"p{i}", "task": ["sums", "riddles"][i // 2], "prompt": text}
        for i, text in enumerate(texts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    scores = "".join(f"{name},{30 + i * i % 7}\n" for i, name in enumerate(steps))
    (folder / "scores.csv").write_text("model,score\n" + scores)
    return folder


@pytest.fixture(scope="session")
def _example_names(_example_folder: Path) -> dict[str, Any]:
    """As the package's docstring says."""
    import torch

    import tiny
    import tl_coupling as tlc
    import vision_models

    folder = _example_folder
    tiny.save_tokenizer(folder)
    model = tiny.bridge(tiny.huggingface_model("llama"), folder)
    image_trace = tlc.trace(vision_models.vit("ViTModel")[0], vision_models.pixels())
    prompts, settings = (
        tlc.load_prompts(folder / "prompts.jsonl"),
        tlc.Settings(k=(2, 4), window=1),
    )
    models = {
        path.name: path / "step2" for path in sorted((folder / "models").iterdir())
    }
    return {
        "torch": torch,
        "tlc": tlc,
        "model": model,
        "trace": tlc.trace(model, tiny.TOKENS),
        "image_trace": image_trace,
        "prompts": prompts,
        "data": tlc.run_survey(
            tlc.Survey(models, prompts, settings=settings),
            folder / "survey",
            progress=False,
        ),
        "sweep": tlc.checkpoint_sweep(
            folder / "models/width16",
            prompts=prompts,
            settings=settings,
            folder=folder / "sweep",
            progress=False,
        ),
    }
