"""What the commands show on the terminal while they work."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from torch import nn


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


def load_with_bar(progress: Progress, name: str, **loading: Any) -> "nn.Module":
    """`load_model`, with a bar while it lasts."""
    from tl_coupling.models import load_model

    task = progress.add_task(f"loading {run_name(name, **loading)}", total=None)
    model = load_model(name, **loading)
    progress.remove_task(task)
    return model


def run_name(name: str, untrained: bool = False, **_: Any) -> str:
    """What bars call a model."""
    return f"untrained {name}" if untrained else name


def bar(progress: Progress, description: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """Wraps a loop into a bar that is gone when the loop is."""

    def over(items: Iterable[int]) -> Iterator[int]:
        task = progress.add_task(description, total=None)
        yield from progress.track(list(items), task_id=task)
        progress.remove_task(task)

    return over


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Note how long the block took, in seconds of wall time."""
    start = time.perf_counter()
    yield
    seconds[what] = round(time.perf_counter() - start, 3)
