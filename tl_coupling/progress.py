"""Progress bars: the caller's own, or one in a terminal or notebook."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
# Wraps a loop, as `tqdm.tqdm` does; True for a bar, False for none.
Progress = Callable[[Iterable[Any]], Iterable[Any]] | bool
_END = object()


def with_progress(
    items: Iterable[Item], progress: Progress | None, what: str
) -> Iterable[Item]:
    """The items, wrapped by `progress`; `None` shows a bar in a terminal or notebook if
    they take over a second.

    ValueError or TypeError where a function `progress` does not yield each item once,
    in order: what is measured in the loop would be of some of them, without a word.
    """
    if callable(progress):
        return _each(_Loop(items), progress)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    watched = sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"
    return (
        tqdm(items, desc=what, leave=False, delay=1)
        if progress or (progress is None and watched)
        else items
    )


class _Loop(Generic[Item]):
    """The items of a loop, as a caller's function gets them; `taken` are those that it
    has not given back yet.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = items
        self.left = iter(items)
        self.taken: deque[Item] = deque()

    def __len__(self) -> int:
        # TypeError where the number is not known, as of any iterator.
        return len(self.items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Item]:
        # Those that can be counted can be looked through more than once.
        self.left = iter(self.items)
        self.taken.clear()
        for item in self.left:
            self.taken.append(item)
            yield item


def _each(
    loop: _Loop[Item], progress: Callable[[Iterable[Any]], Iterable[Any]]
) -> Iterator[Item]:
    """What `progress` yields, if that is each item of the loop."""
    wrapped = progress(loop)
    wanted = "`progress` must yield each item of the loop that it wraps once and in order, as `tqdm.tqdm` does"
    if not isinstance(wrapped, Iterable):
        raise TypeError(
            f"{wanted}, got a function that returns {type(wrapped).__name__}"
        )
    n_yielded = 0
    for item in wrapped:
        if not loop.taken or loop.taken.popleft() is not item:
            raise ValueError(f"{wanted}, got another after {n_yielded}")
        n_yielded += 1
        yield item
    if loop.taken or next(loop.left, _END) is not _END:
        raise ValueError(f"{wanted}, got {n_yielded} and no more")
