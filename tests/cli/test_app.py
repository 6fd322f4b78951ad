"""What `--help` prints on a screen of 80 characters, and how soon."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from command_line import printed_examples
from tl_coupling.cli import COMMANDS
from tl_coupling.cli.app import GROUPS, app


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_the_list_of_commands_cuts_nothing_and_groups_them(call) -> None:
    text = call("--help").out
    assert "…" not in text
    assert "..." not in text.partition("[ARGS]...")[2]
    assert max(map(len, text.splitlines())) <= 80
    for heading, commands in GROUPS.items():
        section = text.partition(f"{heading}:\n")[2].partition("\n\n")[0]
        listed = [line.split()[0] for line in section.splitlines()]
        assert listed == list(commands)
    assert all(len(summary) <= 55 for _, summary in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_text_fits_the_screen_and_a_shell_reads_its_examples(
    call, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = call(command, "--help").out
    assert max(map(len, text.splitlines())) <= 80
    # No option's name is broken.
    assert not [line for line in text.splitlines() if line.endswith("-")]
    assert "\N{NON-BREAKING HYPHEN}" not in text
    shown = printed_examples(text)
    assert shown
    monkeypatch.chdir(tmp_path)
    for example in shown:
        words = subprocess.run(
            ["bash", "-c", f"tl-coupling() {{ printf '%s\\0' \"$@\"; }}\n{example}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")[:-1]
        # What a backslash breaks is one line to the shell.
        assert words == shlex.split(example.replace("\\\n", " "))[1:]
        for word in words:
            if Path(word).suffix in {".jsonl", ".jpg", ".png", ".csv"}:
                Path(word).touch()
        group = typer.main.get_group(app)
        context = group.make_context("tl-coupling", list(words))
        name, parsed, rest = group.resolve_command(context, words)
        assert name == command
        parsed.make_context(name, list(rest), parent=context)


def test_an_old_name_is_answered_with_the_new_one(call) -> None:
    assert "Usage" in call("trajectories", "--help").out
    assert "trajectories is now called compare-trajectories" in (
        call("trajectories", "--help").err
    )


def test_help_imports_neither_torch_nor_any_command() -> None:
    code = (
        "import sys; sys.argv = ['tl-coupling', '--help']\n"
        "from tl_coupling.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = set(printed.split())
    assert not {"torch", "matplotlib", "xarray", "tl_coupling.cli.depth"} & loaded
    assert "typer" in loaded


def sections(text: str) -> dict[str, list[str]]:
    """Return the options of a help text by the heading above them."""
    by_heading: dict[str, list[str]] = {}
    _, options_heading, below = text.partition("\nOptions:\n")
    for line in (options_heading + below).splitlines():
        if re.fullmatch(r"\S.*:", line):
            options = by_heading.setdefault(line.removesuffix(":"), [])
        elif line.startswith("  --"):
            options.append(line.split()[0].lstrip("-"))
    return by_heading


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_the_commands_own_options_and_then_those_for_the_model(
    call, command: str
) -> None:
    text = call(command, "--help").out
    listed = sections(text)
    own = set(listed["Options"])
    assert {"out", "help"} <= own
    # Written out: these say which weights are loaded, where and how, and how they read.
    for_the_model = [
        "model",
        "checkpoint",
        "label",
        "backend",
        "device",
        "prepend-bos",
        "final-norm",
        "dtype",
        "quantization",
        "memory",
    ]
    if command in ("generalization", "atlas"):
        # They load no model; a checkpoint is a row of a survey.
        assert list(listed) == ["Options"]
        return
    assert list(listed) == ["Options", "Options for the model"]
    assert set(listed["Options for the model"]) <= set(for_the_model)
    assert {"backend", "model"} <= set(listed["Options for the model"])
    assert not own & set(for_the_model)
    # None is lost, and none is there twice.
    group = typer.main.get_group(app)
    context = group.make_context("tl-coupling", [command])
    parsed = group.get_command(context, command)
    shown = [name for names in listed.values() for name in names]
    expected = [option.opts[0].lstrip("-") for option in parsed.get_params(context)]
    assert sorted(shown) == sorted(expected)
