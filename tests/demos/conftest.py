"""Demos and studies on the path, and a small text to train on."""

import sys
from pathlib import Path

import pytest

DEMOS = Path(__file__).parents[2] / "demos"
sys.path[:0] = [str(DEMOS), str(DEMOS / "studies")]

import small_models  # noqa: E402


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    functions = "".join(
        f"def f{i}(x):\n    return {i % 7} * x + {i % 5}  # the number {i}\n\n"
        for i in range(800)
    )
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(functions)
    return path


@pytest.fixture(scope="session")
def small_corpus(small_text: Path) -> small_models.Corpus:
    return small_models.build_corpus(small_models.read_documents(small_text), 300)


@pytest.fixture(scope="session")
def small_config() -> small_models.TrainingConfig:
    return small_models.TrainingConfig(
        width=32, n_layers=2, n_heads=2, vocabulary=300, n_ctx=16, batch=4, steps=6
    )
