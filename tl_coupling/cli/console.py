"""A command at work: which models it measures, what it shows meanwhile, and what it
writes and prints at the end.
"""

import json
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

import tl_coupling as tlc
from tl_coupling.blocks import Trace
from tl_coupling.cli.bars import Bars
from tl_coupling.cli.options import OneModel
from tl_coupling.cli.plain_console import PlainConsole
from tl_coupling.cli.tables import printed
from tl_coupling.files import output_folder, plain, write_atomically
from tl_coupling.prompts import Prompt
from tl_coupling.results import Saved, ShortTable

Item = TypeVar("Item")
Measured = TypeVar("Measured")
# Pictures by file name, drawn when they are called: each gives its Axes or Figure.
Pictures = dict[str, Callable[[], object]]
# File systems may round the time of a file down.
_CLOCK_SECONDS = 0.01
_FILES_WIDTH = 79
# The resolution of pictures. Pages show them at 100 dots an inch; twice as many are
# sharp everywhere.
_DPI = 200


class Run:
    """A loaded model in its role ("trained" or "untrained"), with bars, and the seconds
    that each step took.
    """

    def __init__(self, setup: OneModel, role: str, bars: Bars) -> None:
        self.setup = setup
        self.role = role
        self.bars = bars
        self.seconds: dict[str, float] = {}
        self.name = setup.model if role == "trained" else f"untrained {setup.model}"
        with bars.stage(f"loading {self.name} …"), self.timed("loading"):
            self.model = setup.load(untrained=role == "untrained")

    def trace(self, prompt: Prompt) -> Trace:
        """Return the traced prompt."""
        with self.timed("trace"):
            return self.setup.trace(self.model, prompt)

    def bar(self, description: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a loop, which a bar shows."""
        return self.bars.loop(f"{self.name}: {description}", items)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block took, in seconds of wall time."""
        start = time.perf_counter()
        yield
        self.seconds[step] = round(time.perf_counter() - start, 3)


class Work:
    """What a command does in its output folder.

    Attributes:
        written: files, named when all is done.
        shown: lines and tables to print then.
        seconds: of each run, what `Run.timed` noted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.console = PlainConsole(stderr=True)
        self.written: list[Path] = []
        self.shown: list[str | ShortTable] = []
        self.seconds: dict[str, dict[str, float]] = {}

    def measured(
        self,
        setup: OneModel,
        untrained: bool,
        measure: Callable[[Run], Measured],
        bars: Bars | None = None,
    ) -> dict[str, Measured]:
        """Return, by role, what `measure` gives of the model and of its untrained twin.

        The twin is measured where `untrained` says so. By default each loop has a bar.
        """
        if not untrained:
            return {"trained": self.measured_as("trained", setup, measure, bars)}
        if setup.quantization is not None:
            _refuse_untrained("--quantization")
        if setup.memory == "stream":
            _refuse_untrained("--memory stream")
        return {
            role: self.measured_as(role, setup, measure, bars)
            for role in ("trained", "untrained")
        }

    def measured_as(
        self,
        role: str,
        setup: OneModel,
        measure: Callable[[Run], Measured],
        bars: Bars | None = None,
    ) -> Measured:
        """Return what `measure` gives of a model, "trained" or "untrained"."""
        # A function of its own, so that one model is freed before the next is loaded.
        run = Run(setup, role, bars or Bars(self.console))
        self.seconds[role] = run.seconds
        with run.bars.measuring():
            return measure(run)

    def save(self, results: Mapping[str, Mapping[str, Saved]]) -> None:
        """Write results of runs, which are given by role and by name."""
        for role, named_results in results.items():
            for name, result in named_results.items():
                path = self.folder / f"{file_stem(name, role)}.nc"
                self.written.append(result.save(path))

    def show_runs(self, results: Mapping[str, Saved]) -> None:
        """Print the short tables of runs, one below the other, at the end."""
        tables = {role: result.table() for role, result in results.items()}
        self.shown.append(ShortTable.stacked(tables))

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file, whole or not at all."""
        self.written.append(write_atomically(self.folder / name, write))

    def finish(self, summary: Mapping[str, object], pictures: Pictures) -> None:
        """Write `summary.json` and the pictures.

        A picture that cannot be drawn is left out, with a warning: the results are
        there by now, and a picture must not cost them.
        """
        # JSON has no NaN: undefined values are null.
        defined_values = json.loads(json.dumps(summary), parse_constant=lambda _: None)
        text = json.dumps(defined_values, indent=1)
        self.write("summary.json", lambda path: path.write_text(text))
        with self.console.stage("drawing …"):
            for name, draw in pictures.items():
                self._draw(name, draw)

    def _draw(self, name: str, draw: Callable[[], object]) -> None:
        try:
            with tlc.plots.off_screen():
                drawn = draw()
        except ValueError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
            return
        # Axes are saved as their Figure.
        figure: Any = getattr(drawn, "figure", drawn)
        self.write(name, partial(figure.savefig, dpi=_DPI))


def _refuse_untrained(option: str) -> None:
    raise ValueError(
        f"`{option}` is for weights in files, and an untrained twin has none: "
        "give --no-untrained"
    )


@contextmanager
def work_in(out: Path) -> Iterator[Work]:
    """Enter a block of work in the folder `out`, and print its results after it.

    In the block warnings are one line each, and so is an interrupt.
    """
    from transformers.utils import logging

    # transformers has bars of its own, which would tear those of `Run`.
    logging.disable_progress_bar()
    work = Work(out)
    start = time.time()
    # A result may warn wherever it is read: in a summary, a picture and a table.
    said: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], *_: object, **__: object
    ) -> None:
        # Deprecations in libraries are no concern of whoever runs a command.
        if issubclass(category, UserWarning) and str(message) not in said:
            said.add(str(message))
            work.console.print(f"warning: {message}", style="yellow", soft_wrap=True)

    try:
        with output_folder(out), warnings.catch_warnings():
            warnings.showwarning = show
            yield work
    except KeyboardInterrupt as error:
        # A survey says for itself what is finished; other interrupts are empty.
        message = str(error) or (
            f"interrupted: {_written_since(start, out)}; "
            "the same command does all of it"
        )
        typer.echo(plain(f"tl-coupling: {message}"), err=True)
        raise typer.Exit(getattr(error, "status", 130)) from None
    # Standard output holds results alone, and only of a command that finished; bars and
    # warnings go to standard error.
    for line_or_table in work.shown:
        if isinstance(line_or_table, str):
            typer.echo(plain(line_or_table))
        else:
            PlainConsole().print(printed(line_or_table))
    typer.echo(plain(_what_was_written(work)))


def _what_was_written(work: Work) -> str:
    """Return the folder, and the files in it that were written, by whole names."""
    inside = [path for path in work.written if path.parent == work.folder]
    names = [path.name for path in inside]
    names += [str(path) for path in work.written if path not in inside]
    lines = textwrap.wrap(
        ", ".join(names),
        width=_FILES_WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([f"wrote to {work.folder}:", *lines])


def _written_since(start: float, folder: Path) -> str:
    """Say which files and folders in the folder are of this run."""
    # A dot in front is that of a file which was being written.
    paths = folder.glob("[!.]*") if folder.is_dir() else ()
    since = start - _CLOCK_SECONDS
    names = sorted(path.name for path in paths if _has_files_since(since, path))
    if not names:
        return "nothing was written"
    return f"{folder} has {', '.join(names)} of this run"


def _has_files_since(since: float, path: Path) -> bool:
    """Return whether a file, or any file in a folder, was written since a time."""
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.is_file() and file.stat().st_mtime >= since for file in files)


def file_stem(name: str, role: str) -> str:
    """Return a result's file name, with a suffix for any model but the trained one."""
    return name if role == "trained" else f"{name}-{role}"
