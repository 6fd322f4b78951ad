"""What the commands show on the terminal while they work."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tl_coupling.files import output_folder


@contextmanager
def at_work(out: Path) -> Iterator[tuple[Path, Progress]]:
    """The output folder and a place for bars, while warnings are one line each."""
    console = Console(stderr=True)
    with output_folder(out) as folder, quiet(console), progress_bars(console) as progress:
        yield folder, progress


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Bars that leave nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


@contextmanager
def quiet(console: Console) -> Iterator[None]:
    """Warnings as one line each; no progress bars but ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            console.print(f"warning: {message}", style="yellow", highlight=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
