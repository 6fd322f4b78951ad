"""Progress bars: the caller's own, or one where somebody is looking."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
# What wraps a loop (`tqdm.tqdm` does); False for no bar.
Progress = Callable[[Iterable[Any]], Iterable[Any]] | Literal[False]


def with_progress(items: Sequence[Item], progress: Progress | None, what: str) -> Iterable[Item]:
    """The items, wrapped by `progress`. `None`: by a bar in a terminal or notebook, if they take over a second."""
    if progress is None:
        return tqdm(items, desc=what, leave=False, delay=1, disable=not (sys.stderr.isatty() or _in_notebook()))
    return progress(items) if progress else items


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
