"""Progress bars: the caller's own, or one in a terminal or notebook."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
# Wraps a loop, as `tqdm.tqdm` does; True for a bar, False for none.
Progress = Callable[[Iterable[Any]], Iterable[Any]] | bool


def with_progress(items: Iterable[Item], progress: Progress | None, what: str) -> Iterable[Item]:
    """The items, wrapped by `progress`; `None` shows a bar in a terminal or notebook if they take over a second."""
    if callable(progress):
        return progress(items)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    watched = sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"
    return tqdm(items, desc=what, leave=False, delay=1) if progress or (progress is None and watched) else items
