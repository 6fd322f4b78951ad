"""A command at work: which models it measures, what it shows meanwhile, and what it
writes and prints at the end.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import tl_coupling as tlc
from tl_coupling.cli.options import OneModel
from tl_coupling.cli.plain_console import PlainConsole
from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import output_folder, plain, write_atomically
from tl_coupling.prompts import Prompt
from tl_coupling.traces import Trace

if TYPE_CHECKING:
    import pandas

Item = TypeVar("Item")
Measured = TypeVar("Measured")


class Run:
    """A loaded model in its role ("trained" or "untrained"), with bars, and the seconds
    that each step took.
    """

    def __init__(self, setup: OneModel, role: str, console: PlainConsole) -> None:
        self.setup, self.role, self.seconds = setup, role, dict[str, float]()
        self.name = setup.model if role == "trained" else f"untrained {setup.model}"
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
        )
        self.bars = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True
        )
        with console.status(f"loading {self.name} …"), self.timed("loading"):
            self.model = setup.load(role == "untrained")

    def trace(self, prompt: Prompt) -> Trace:
        """The traced prompt."""
        with self.timed("trace"):
            return self.setup.trace(self.model, prompt)

    def bar(self, what: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with a bar that goes away with them."""
        task = self.bars.add_task(plain(f"{self.name}: {what}"), total=None)
        yield from self.bars.track(list(items), task_id=task)
        self.bars.remove_task(task)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block took, in seconds of wall time."""
        start = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - start, 3)


class Work:
    """What a command does in its output folder.

    Attributes:
        written: files, named when all is done.
        shown: lines and tables to print then.
        seconds: of each run, what `Run.timed` noted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.console = folder, PlainConsole(stderr=True)
        self.written: list[Path] = []
        self.shown: list[str | Table] = []
        self.seconds: dict[str, dict[str, float]] = {}

    def measured(
        self, setup: OneModel, untrained: bool, measure: Callable[[Run], Measured]
    ) -> dict[str, Measured]:
        """What `measure` finds in the trained model and, if wanted, in its untrained
        twin.
        """
        if untrained and (setup.quantization is not None or setup.memory == "stream"):
            option = (
                "--memory stream" if setup.quantization is None else "--quantization"
            )
            raise ValueError(
                f"`{option}` is for weights in files, which an untrained twin has none of: --no-untrained"
            )

        # A function of its own, so that one model is freed before the next is loaded.
        def of(role: str) -> Measured:
            run = Run(setup, role, self.console)
            self.seconds[role] = run.seconds
            with run.bars:
                return measure(run)

        return {role: of(role) for role in ("trained", "untrained")[: 1 + untrained]}

    def save(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Results of runs, by run and name."""
        for run, named in results.items():
            for name, result in named.items():
                self.written.append(
                    result.save(self.folder / f"{with_suffix(name, run)}.nc")
                )

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """A file, whole or not at all."""
        self.written.append(write_atomically(self.folder / name, write))

    def finish(
        self, summary: Mapping[str, Any], pictures: Mapping[str, Callable[[], Any]]
    ) -> None:
        """Write `summary.json` and the pictures; one that cannot be drawn is left out,
        with a warning.

        The results are there by now, and a picture must not cost them.
        """
        # JSON has no NaN: undefined values are null.
        text = json.dumps(
            json.loads(json.dumps(summary), parse_constant=lambda _: None), indent=1
        )
        self.write("summary.json", lambda path: path.write_text(text))
        with self.console.status("drawing …"):
            for name, draw in pictures.items():
                try:
                    with tlc.plots.off_screen():
                        drawn = draw()
                except ValueError as error:
                    warnings.warn(f"{name} is left out: {error}", stacklevel=2)
                else:
                    self.write(
                        name, partial(getattr(drawn, "figure", drawn).savefig, dpi=150)
                    )


@contextmanager
def at_work(out: Path) -> Iterator[Work]:
    """In the block warnings are one line each, and so is an interrupt; after it what
    was found is printed.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    work, start = Work(out), time.time()

    def show(
        message: Warning | str, category: type[Warning], *_: Any, **__: Any
    ) -> None:
        if issubclass(category, UserWarning):
            work.console.print(f"warning: {message}", style="yellow", soft_wrap=True)

    try:
        with output_folder(out), warnings.catch_warnings():
            warnings.showwarning = show
            yield work
    except KeyboardInterrupt as error:
        said = (
            str(error)
            or f"interrupted: {_written_since(start, out)}; the same command does all of it"
        )
        typer.echo(plain(f"tl-coupling: {said}"), err=True)
        raise typer.Exit(getattr(error, "status", 130)) from None
    for one in work.shown:
        typer.echo(plain(one)) if isinstance(one, str) else PlainConsole().print(one)
    typer.echo(plain(f"wrote {', '.join(map(str, work.written))}"))


def _written_since(start: float, folder: Path) -> str:
    """Which files in the folder are of this run; file systems may round times down."""
    paths = folder.glob("[!.]*") if folder.is_dir() else ()
    names = sorted(
        path.name
        for path in paths
        if path.is_file() and path.stat().st_mtime >= start - 0.01
    )
    return (
        f"{folder} has {', '.join(names)} of this run"
        if names
        else "nothing was written"
    )


def with_suffix(name: str, run: str) -> str:
    """A result's file name, with a suffix for any run but the trained model's."""
    return name if run == "trained" else f"{name}-{run}"


def coupling_table(
    what: str,
    caption: str,
    runs: Mapping[str, Mapping[str, CouplingMap]],
    ks: list[int],
    diagonal: bool = False,
    spreads: Mapping[str, Mapping[int, float]] | None = None,
) -> Table:
    """Mean coupling (and its spread over prompts) of every run's maps, which have the
    same names, beside the null.
    """
    rows = []
    for name, result in runs["trained"].items():
        for k in ks:
            cells = []
            for run, maps in runs.items():
                spread = f" ± {spreads[run][k]:.3f}" if spreads else ""
                cells.append(
                    f"{maps[name].mean(k, off_diagonal=not diagonal):.3f}{spread}"
                )
            null = result.null(k, off_diagonal=not diagonal)
            rows.append([name if k == ks[0] else "", k, *cells, f"{null:.3f}"])
    title = f"{result.provenance['model']}: {what}"
    return table_of(
        title, ["map"], ["k", *runs, "null"], rows, f"{caption}\nnull: random subspaces"
    )


def every_choice(title: str, rows: "pandas.DataFrame") -> Table:
    """Rows of `measure_table` for one model: a column for each checkpoint, or run, and
    its null.
    """
    keys = ["measure", "orientation", "pairs", "k"]
    by_run = {
        name: table.set_index(keys)
        for name, table in rows.groupby("checkpoint", sort=False)
    }
    first, *_ = by_run.values()
    cells = []
    for key in first.index:
        numbers = [
            f"{table.loc[key, what]:.3f}"
            for table in by_run.values()
            for what in ("mean", "null")
        ]
        cells.append(
            [
                *(key[:3] if key[3] == first.index[0][3] else ("", "", "")),
                key[3],
                *numbers,
            ]
        )
    columns = [name for run in by_run for name in (run, "null")]
    caption = "means over pairs of layers, different ones or all, and over prompts\nnull: random subspaces"
    return table_of(title, keys[:3], ["k", *columns], cells, caption)


def table_of(
    title: str,
    names: Iterable[str],
    numbers: Iterable[str],
    rows: Iterable[Iterable[Any]],
    caption: str,
) -> Table:
    """A table with columns of names, on the left, and of numbers."""
    table = Table(title=title, caption=caption)
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
