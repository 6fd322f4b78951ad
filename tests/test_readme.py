"""README runs as it stands: its Python from top to bottom as one script, then its commands, without a network."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tl_coupling.models import loading

pytestmark = pytest.mark.on_4_only

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"(?:<!-- needs (?P<needs>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)


class Block(NamedTuple):
    """A block of README, and what a comment above it says that it needs."""

    needs: str | None
    language: str
    text: str


BLOCKS = [Block(**found.groupdict()) for found in FENCE.finditer(README.read_text())]


def commands(needs: str | None) -> list[list[str]]:
    """What stands after `tl-coupling` in the shell blocks."""
    text = "".join(b.text for b in BLOCKS if b.language == "sh" and b.needs == needs).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["tl-coupling"]]


@pytest.fixture(scope="module")
def folder(smollm2: nn.Module) -> Iterator[Path]:
    """Where the Python of README has run; its models take 200 MB, so it does not stay."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "readme.py").write_text("\n".join(b.text for b in BLOCKS if b.language == "python" and not b.needs))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        command = [sys.executable, "readme.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "said.txt").write_text(done.stdout)
        yield folder


def test_python_runs_from_top_to_bottom(folder: Path) -> None:
    said = (folder / "said.txt").read_text()
    coupling, null = map(float, re.findall(r"k = 10: mean coupling (\S+), random subspaces (\S+)", said)[0])
    assert coupling > 3 * null
    assert float(re.findall(r"untrained: (\S+)", said)[0]) < 2 * null
    script = (folder / "readme.py").read_text()
    pictures = re.findall(r'savefig\("(.+?)"\)', script)
    assert len(pictures) >= 8
    assert all((folder / name).stat().st_size > 5_000 for name in pictures)
    assert {"france.nc", "prompts.jsonl", "scores.csv", "survey", "sweep"} <= {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def stand_in(smollm2: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the embedded model, which the tests of each command measure: its kind and tokenizer, but narrow."""
    folder = tmp_path_factory.mktemp("stand_in")
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.from_pretrained(loading.embedded_folder(), **narrow, head_dim=32, num_hidden_layers=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    smollm2.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", commands(None), ids=lambda command: command[0])
def test_command_runs(folder: Path, stand_in: Path, command: list[str], call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(loading, "embedded_folder", lambda: stand_in)
    assert call(*command).out.strip()
    out = folder / command[command.index("--out") + 1]
    assert out.stat().st_size > 10_000 if out.is_file() else list(out.glob("*.json"))


@pytest.mark.parametrize("command", commands("the hub"), ids=lambda command: command[0])
def test_command_that_needs_the_hub_knows_its_options(command: list[str], call) -> None:
    said = call(command[0], "--help").out
    assert all(re.search(rf"(?<!\S){option}\b", said) for option in command if option.startswith("--"))


def test_every_command_is_shown() -> None:
    from tl_coupling.cli import app

    shown = {command[0] for needs in (None, "the hub") for command in commands(needs)}
    assert shown == {command.name for command in app.registered_commands}


def test_what_blocks_need_is_known() -> None:
    assert {block.needs for block in BLOCKS} == {None, "the hub", "TransformerLens 3.9"}
    assert {block.language for block in BLOCKS} == {"python", "sh"}


def test_make_targets_are_there() -> None:
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", "".join(b.text for b in BLOCKS if b.language == "sh")))
    assert {"demo", "test", "notebooks"} <= named
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_picture_is_small_and_there() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README.read_text())
    assert pictures
    assert all(5_000 < (README.parent / name).stat().st_size < 200_000 for name in pictures)
