"""What the commands show on the terminal while they work."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tl_coupling.files import output_folder

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
