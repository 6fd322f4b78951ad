"""What the commands show on the terminal while they work."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tl_coupling.files import output_folder
from tl_coupling.surveys import units
from tl_coupling.surveys.units import Unit


@contextmanager
def at_work(out: Path) -> Iterator[tuple[Path, Progress]]:
    """The output folder and a place for bars, while warnings are one line each; an interrupt is one line as well."""
    console, start = Console(stderr=True), time.time()
    try:
        with output_folder(out) as folder, quiet(console), progress_bars(console) as progress:
            yield folder, progress
    except KeyboardInterrupt as error:
        said = str(error) or f"interrupted: {_written_since(start, out)}; the same command does all of it"
        typer.echo(f"tl-coupling: {said}", err=True)
        raise typer.Exit(getattr(error, "status", 130)) from None


def _written_since(start: float, folder: Path) -> str:
    """What of this run stands in the folder; times of files are rounded down."""
    paths = folder.glob("[!.]*") if folder.is_dir() else ()
    names = sorted(path.name for path in paths if path.is_file() and path.stat().st_mtime >= start - 0.01)
    return f"{folder} has {', '.join(names)} of this run" if names else "nothing was written"


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Bars that leave nothing behind."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def over_units(progress: Progress, what: str, label: Callable[[Unit], str]) -> units.Progress:
    """A bar over units of work, as `run_units` takes it: whichever is at work, or came back from elsewhere."""

    def bar(to_do: Iterable[Unit]) -> Iterator[Unit]:
        task = progress.add_task(what, total=len(to_do) if isinstance(to_do, Sized) else None)
        for unit in to_do:
            progress.update(task, description=f"{what}: {label(unit)}")
            yield unit
            progress.advance(task)

    return bar


@contextmanager
def quiet(console: Console) -> Iterator[None]:
    """Warnings as one line each; no progress bars but ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            console.print(f"warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
