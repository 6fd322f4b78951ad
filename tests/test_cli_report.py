"""The command `report` as a user meets it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

import tl_coupling as tlc
from tl_coupling.cli import main


@pytest.fixture(scope="module")
def folder_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.huggingface_model("llama").save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process: its exit status."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["tl-coupling", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return run


def test_the_command_writes_one_page(folder_model: Path, tmp_path: Path, command: Callable[..., int]) -> None:
    out = tmp_path / "new" / "page.html"
    options = ("--model", folder_model, "--prompt", "w3 w14 w15", "--k", 4, "--k", 8, "--out", out)
    line = [sys.executable, "-m", "tl_coupling", "report", *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"}, check=True)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert str(out) in done.stdout
    assert not done.stderr.strip()
    page = out.read_text(encoding="utf-8")
    traces = [tlc.trace(tlc.load_model(str(folder_model), untrained=u), "w3 w14 w15") for u in (False, True)]
    for trace in traces:
        assert f"{tlc.depth_coupling(trace, 8).mean(4):.3f}" in page
    assert command("--model", folder_model, "--prompt", "w3 w14", "--k", 4, "--no-untrained", "--out", out) == 0
    assert "untrained, " not in out.read_text(encoding="utf-8")


def test_help_has_examples(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    assert "Examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "`--k` must be at least 1, got 0"),
        (["--k", "33"], "`k` must lie in [1, 32]"),
        (["--layer", "2"], "`layer` must lie in [-2, 1]"),
        (["--input-position", "5"], "`input_position` must lie in [-2, 1]"),
        (["--model", "no-such/model"], "could not load 'no-such/model'"),
        (["--out", "{file}/report.html"], "cannot write to the output folder"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    folder_model: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    before = sorted(tmp_path.rglob("*"))
    options = {"--model": str(folder_model), "--prompt": "w1 w2", "--k": "4", "--out": str(tmp_path / "out.html")}
    options |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert command(*[part.replace("{file}", str(file)) for pair in options.items() for part in pair]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("tl-coupling: ") and message in line]
    assert len([line for line in lines if line.startswith("tl-coupling: ")]) == 1
    assert not [line for line in lines if line.startswith("Traceback")]
    assert sorted(tmp_path.rglob("*")) == before
