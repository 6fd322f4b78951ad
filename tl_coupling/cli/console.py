"""What the commands show while they work, and what they write and print at the end: pictures, a summary, tables."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.files import output_folder, write_atomically

_COLUMNS = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


class _Bars(Progress):
    """Bars that leave nothing behind, and leave the terminal to others until there is one."""

    def add_task(self, *args: Any, **kwargs: Any) -> TaskID:
        self.start()
        return super().add_task(*args, **kwargs)


@contextmanager
def at_work(out: Path) -> Iterator[tuple[Path, Progress]]:
    """The output folder, and a place for bars. In the block warnings are one line each, and so is an interrupt."""
    console, start = Console(stderr=True), time.time()
    progress = _Bars(*_COLUMNS, console=console, transient=True)
    try:
        with output_folder(out) as folder, _quiet(console):
            try:
                yield folder, progress
            finally:
                if progress.live.is_started:
                    progress.stop()
    except KeyboardInterrupt as error:
        said = str(error) or f"interrupted: {_written_since(start, out)}; the same command does all of it"
        typer.echo(f"tl-coupling: {said}", err=True)
        raise typer.Exit(getattr(error, "status", 130)) from None


def _written_since(start: float, folder: Path) -> str:
    """Which files in the folder are of this run; file systems may round times down."""
    paths = folder.glob("[!.]*") if folder.is_dir() else ()
    names = sorted(path.name for path in paths if path.is_file() and path.stat().st_mtime >= start - 0.01)
    return f"{folder} has {', '.join(names)} of this run" if names else "nothing was written"


@contextmanager
def _quiet(console: Console) -> Iterator[None]:
    """Warnings as one line each; no bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            console.print(f"warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def write_pictures(folder: Path, pictures: Mapping[str, Callable[[], Any]]) -> list[Path]:
    """Draw every picture into the file of its name; one that cannot be drawn is left out, with a warning.

    The results are there by now, and a picture must not cost them.
    """
    from tl_coupling.plots.labels import off_screen

    written = []
    for name, draw in pictures.items():
        try:
            with off_screen():
                drawn = draw()
        except ValueError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
            continue
        figure = getattr(drawn, "figure", drawn)
        written.append(write_atomically(folder / name, partial(figure.savefig, dpi=150)))
    return written


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """`summary.json`; undefined values are `null`, because JSON has no NaN."""
    text = json.dumps(_defined(summary), indent=1, allow_nan=False)
    return write_atomically(folder / "summary.json", lambda path: path.write_text(text))


def coupling_table(what: str, caption: str, runs: Mapping[str, Mapping[str, CouplingMap]], ks: list[int]) -> Table:
    """Mean coupling (and its spread over prompts) of every run's maps, which have the same names, beside the null."""
    trained = runs["trained"]
    model = next(iter(trained.values())).provenance["model"]
    table = Table("map", title=f"{model}: {what}", caption=f"{caption}\nnull: random subspaces")
    for heading in ("k", *runs, "null"):
        table.add_column(heading, justify="right")
    for name, result in trained.items():
        for k in ks:
            cells = []
            for one in (maps[name] for maps in runs.values()):
                spread = f" ± {one.spread_of_mean(k):.3f}" if isinstance(one, MeanCouplingMap) else ""
                cells.append(f"{one.mean(k):.3f}{spread}")
            words = name if k == ks[0] else ""
            table.add_row(words, str(k), *cells, f"{result.null(k):.3f}", end_section=k == ks[-1])
    return table


def table_of(
    title: str, names: Iterable[str], numbers: Iterable[str], rows: Iterable[Iterable[Any]], caption: str
) -> Table:
    """A table with columns of names, on the left, and of numbers."""
    table = Table(title=escape(title), caption=caption)
    for justify, headings in (("left", names), ("right", numbers)):
        for heading in headings:
            table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def show(written: list[Path], *tables: Table, lines: Iterable[str] = ()) -> None:
    """Print lines, tables, and where the files are."""
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for table in tables:
        console.print(table)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def with_suffix(name: str, run: str) -> str:
    """A result's file name, with a suffix for any run but the trained model's."""
    return name if run == "trained" else f"{name}-{run}"


def _defined(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _defined(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
