"""README and the pages run as they stand: the Python of each page, then all commands,
without a network.
"""

import json
import math
import os
import pydoc
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import pages
import tl_coupling.cli
from tl_coupling.models import loading

BLOCKS = [block for path in pages.PAGES for block in pages.blocks(path)]
OF_README = pages.blocks(pages.README)
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.needs]
COMMANDS = [
    command for block in BLOCKS if not block.needs for command in block.commands()
]
NOT_RUN = [command for block in BLOCKS if block.needs for command in block.commands()]
TEXTS = {
    path: path.read_text()
    for path in (pages.README, *sorted((pages.ROOT / "docs").rglob("*.md")))
    # What the build of the site writes is no source.
    if "_made" not in path.parts
}
# One that takes seconds.
PAGE_OF_FAST_TIER = "docs/how-to/vision.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def run_pages(folder: Path, *names: str) -> dict[str, str]:
    """Run the Python of pages in a folder; return what each block prints."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "pages", *names]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "printed.json").read_text())


@pytest.fixture(scope="module")
def folder(smollm2: nn.Module) -> Iterator[Path]:
    """Where the Python of the pages has run; its models take 200 MB, so it does not
    stay.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_pages(folder)
        yield folder


def check_output(blocks: list[pages.Block], printed: dict[str, str]) -> None:
    """Compare word by word; of numbers, what differs between machines is left open."""
    for block in blocks:
        expected, got = block.prints or "", printed[f"{block.page}:{block.line}"]
        assert NUMBER.sub("#", expected) == NUMBER.sub("#", got), (
            f"{block.page}:{block.line}"
        )
        for one, other in zip(
            NUMBER.findall(expected), NUMBER.findall(got), strict=True
        ):
            in_last_place = 10.0 ** -len(one.partition(".")[2])
            assert math.isclose(
                float(one), float(other), rel_tol=0.005, abs_tol=1.5 * in_last_place
            ), got


def test_a_page_runs_by_itself_and_prints_what_it_says(tmp_path: Path) -> None:
    """The others are in the long tier, one after the other."""
    of_page = [
        block for block in PYTHON if block.page == PAGE_OF_FAST_TIER and block.prints
    ]
    assert of_page
    check_output(of_page, run_pages(tmp_path, PAGE_OF_FAST_TIER))


@pytest.mark.long("runs the Python of all pages")
@pytest.mark.xdist_group("pages")
def test_python_runs_from_top_to_bottom(folder: Path) -> None:
    printed = json.loads((folder / "printed.json").read_text())
    assert list(printed) == [f"{block.page}:{block.line}" for block in PYTHON]
    assert len(printed) >= 25
    pictures = [
        name
        for block in PYTHON
        for name in re.findall(r'savefig\(\s*"(.+?)"', block.text)
    ]
    assert len(pictures) >= 12
    assert all((folder / name).stat().st_size > 5_000 for name in pictures)
    assert {"france.nc", "prompts.jsonl", "scores.csv", "survey", "sweep"} <= {
        path.name for path in folder.iterdir()
    }


@pytest.mark.long("runs the Python of all pages")
@pytest.mark.xdist_group("pages")
def test_pages_print_what_they_say(folder: Path) -> None:
    printed = json.loads((folder / "printed.json").read_text())
    with_output = [block for block in PYTHON if block.prints]
    assert len(with_output) > 10
    check_output(with_output, printed)


@pytest.fixture(scope="module")
def stand_in(smollm2: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of the embedded model, which the tests of each command measure: its kind
    and tokenizer, but narrow.
    """
    folder = tmp_path_factory.mktemp("stand_in")
    narrow = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.from_pretrained(
        loading.embedded_folder(), **narrow, head_dim=32, num_hidden_layers=16
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    smollm2.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long("runs the Python of all pages")
@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_command_runs(
    folder: Path,
    stand_in: Path,
    command: list[str],
    call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(loading, "embedded_folder", lambda: stand_in)
    if command[0] == "lens-audit":
        # In place of the one that the page made, of the embedded model.
        trace = tl_coupling.trace(tl_coupling.load_model(str(stand_in)), "One lens")
        tl_coupling.trajectories.product_lens([trace]).save("lens.pt")
    assert call(*command).out.strip()
    out = folder / command[command.index("--out") + 1]
    assert out.stat().st_size > 10_000 if out.is_file() else list(out.glob("*.json"))


def test_commands_that_are_not_run_know_their_options(call) -> None:
    """Those that need more than is here, and those in running text."""
    in_text = [
        found.split()
        for text in TEXTS.values()
        for found in re.findall(r"`tl-coupling ([a-z][^`]*)`", text)
    ]
    options_of: dict[str, set[str]] = {}
    for name, *options in [*NOT_RUN, *in_text]:
        options_of.setdefault(name, set()).update(
            option for option in options if option.startswith("--")
        )
    assert len(NOT_RUN) >= 6
    for name, options in options_of.items():
        help_text = call(name, "--help").out
        assert not [
            option
            for option in options
            if not re.search(rf"(?<!\S){option}\b", help_text)
        ], name


def test_every_command_is_shown() -> None:
    assert {command[0] for command in COMMANDS} == tl_coupling.cli.COMMANDS.keys()


def test_what_readme_shows_is_run_on_a_page() -> None:
    printed = {block.text: block.prints for block in PYTHON}
    for block in OF_README:
        if block.language == "python":
            assert printed[block.text] == block.prints
    shown = [command for block in OF_README for command in block.commands()]
    assert shown
    assert all(command in COMMANDS for command in shown)


def test_readme_begins_with_the_two_commands_of_a_clone(tmp_path: Path) -> None:
    """In a folder with nothing made, each sets up what it needs, before it uses it."""
    text = TEXTS[pages.README]
    first = next(block for block in OF_README if block.language == "sh")
    assert [line.partition("#")[0].split() for line in first.text.splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
    ]
    assert first.text in text.partition("\n## Install\n")[2].partition("\n## ")[0]
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((pages.ROOT / name).read_text())
    uses = {
        "demo": {".venv/demo": ".venv/bin/tl-coupling depth --model smollm2-135m "},
        "test": {
            f"{name}/ready": f"{name}/bin/python -m pytest "
            for name in (".venv", ".venv-tl3")
        },
    }
    # Who only looks waits for no tool of developers.
    extras_installed = {"demo": {"smollm2"}, "test": {"smollm2", "dev,smollm2"}}
    for target, uses_by_stamp in uses.items():
        command = ["make", "--dry-run", "--always-make", target]
        # Not what the make that runs the tests was given.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "MFLAGS"))
        }
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for stamp, use in uses_by_stamp.items():
            name = stamp.partition("/")[0]
            steps = [
                f"-m venv {name}\n",
                f"{name}/bin/pip install ",
                f"touch {stamp}",
                use,
            ]
            places = [done.stdout.index(step) for step in steps]
            assert places == sorted(places), (target, done.stdout)
        extras = set(re.findall(r"-e '\.\[([\w,]+)\]'", done.stdout))
        assert extras == extras_installed[target]


def test_readme_shows_the_means_of_docs_start() -> None:
    """That code is run, and what it prints compared; the tests of the command compare
    all that the demo prints.
    """
    first = next(block for block in OF_README if block.language == "sh")
    rows = re.findall(r"(\d+) │ +(0\.\d+) │ +0\.\d+ │ (0\.\d+) │", first.prints or "")
    means = next(
        block.prints
        for block in PYTHON
        if block.page == "docs/start.md" and block.prints
    )
    assert rows == re.findall(
        r"k = (\d+): mean coupling (\S+), random subspaces (\S+)", means
    )


def test_nothing_is_run_twice() -> None:
    assert len({block.text for block in PYTHON}) == len(PYTHON)
    assert len({tuple(command) for command in COMMANDS}) == len(COMMANDS)


def test_what_is_not_run_says_why() -> None:
    reasons = {block.needs for block in (*BLOCKS, *OF_README)}
    assert reasons == {
        "a minute",
        *(
            None,
            "the hub",
            "the hub, and SLURM",
            "a dask cluster",
            "tensorboard",
            "W&B",
            "Lightning",
            "TransformerLens 3.9",
            "a package index",
        ),
        *("a model of your own", "a script of its own, which worker processes import"),
    }
    languages = {block.language for block in (*BLOCKS, *OF_README)}
    assert languages == {"python", "sh", "bibtex"}
    for block in (*BLOCKS, *OF_README):
        if block.language == "sh" and not block.needs:
            assert len(block.commands()) == len(
                block.text.replace("\\\n", " ").splitlines()
            ), block


def test_every_page_with_code_is_run() -> None:
    """But for docs/PAPER.md, which has a test of its own, and docs/report.md, which
    shows what the build of it runs.
    """
    elsewhere = {
        pages.README,
        pages.ROOT / "docs" / "PAPER.md",
        pages.ROOT / "docs" / "report.md",
    }
    assert {path for path in TEXTS if pages.blocks(path)} - elsewhere <= set(
        pages.PAGES
    )


def test_links_and_names_lead_somewhere() -> None:
    for path in (pages.README, *pages.PAGES):
        text = re.sub(r"```.*?```", "", TEXTS[path], flags=re.DOTALL)
        targets = [
            target
            for target in re.findall(r"\]\(([^)#]+)", re.sub(r"`.*?`", "", text))
            if ":" not in target
        ]
        assert not [
            target for target in targets if not (path.parent / target).exists()
        ], path
        names = re.findall(r"\{py:\w+\}`~?(tl_coupling[\w.]+)`", text)
        names += [
            name.replace("tlc.", "tl_coupling.", 1)
            for name in re.findall(r"`(tlc\.[\w.]+)[(`]", text)
        ]
        assert not [name for name in names if pydoc.locate(name) is None], path


def test_every_make_target_is_named_and_there() -> None:
    phony = re.findall(
        r"^\.PHONY: (.+)$", (pages.ROOT / "Makefile").read_text(), re.MULTILINE
    )
    guide = (pages.ROOT / "CONTRIBUTING.md").read_text()
    named = {
        target
        for text in (guide, *TEXTS.values())
        for target in re.findall(r"`make ([\w-]+)", text)
    }
    assert named == {target for line in phony for target in line.split()} - {"clean"}


def test_picture_is_small_and_there() -> None:
    pictures = re.findall(
        r"!\[.+?\]\((?:https?://\S+/)?(docs/.+?)\)", pages.README.read_text()
    )
    assert pictures
    assert all(
        5_000 < (pages.ROOT / name).stat().st_size < 200_000 for name in pictures
    )
