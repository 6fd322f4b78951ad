"""Progress bars: the caller's own, or one in a terminal or notebook; lines in a log."""

import os
import sys
import time
from collections import deque
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from datetime import timedelta
from operator import length_hint
from types import TracebackType
from typing import Any, Generic, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
# Wraps a loop, as `tqdm.tqdm` does; True for a bar, False for none.
Progress = Callable[[Iterable[Any]], Iterable[Any]] | bool
# No item of a loop is this object.
_END = object()
# A log gets no line of a loop that is done sooner, and then one so often.
SECONDS_TO_FIRST_LINE = 10.0
SECONDS_BETWEEN_LINES = 30.0


def with_progress(
    items: Iterable[Item], progress: Progress | None, description: str
) -> Iterable[Item]:
    """Return the items, wrapped by `progress`.

    Args:
        items: what is looped over.
        progress: `None` shows a bar in a terminal or notebook if they take over a
            second; `True` does so too, and in a log shows a line now and then.
        description: of what is measured in the loop, for the bar.

    Raises:
        ValueError, TypeError: a function `progress` does not yield each item once, in
            order. What is measured in the loop would be of some of them, without a
            word.
    """
    if callable(progress):
        return _checked_items(_Loop(items), progress)
    if is_watched() and progress is not False:
        # A loop that is done within a second shows no bar.
        # tqdm looks at this itself, but not in notebooks.
        is_off = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
        return tqdm(items, desc=description, leave=False, delay=1, disable=is_off)
    return log_progress(items, description) if progress is True else items


class JoinedLoops:
    """One loop in place of several, so that one bar shows all of a measurement.

    Measurements of a part get `part(name)` as their `progress`: their loops have no bars
    of their own and go on in this one. It goes on to the start of a loop that begins, to
    the end of one that ends, and to its own end when the block is left: work that is
    not done, or that nobody counts, leaves no gap, and it never goes back.

    Args:
        work: of each part by name, in the order in which they are measured, the steps
            of each of its loops. One step is as much time in every loop, as well as that
            is known beforehand.
        progress: as in `with_progress`, of the one loop.
        description: as there.

    Example:
        >>> from tl_coupling.progress import JoinedLoops
        >>> work = {"depth": [6], "tokens": [16]}
        >>> with JoinedLoops(work, None, "both") as loops:
        ...     depth = tlc.depth_coupling(trace, 4, progress=loops.part("depth"))
        ...     own = tlc.self_coupling(trace, 0, 1, k=4, progress=loops.part("tokens"))
    """

    def __init__(
        self,
        work: Mapping[str, Sequence[int]],
        progress: Progress | None,
        description: str,
    ) -> None:
        self.n_steps = 0
        # By part, the first step and the end of each of its loops.
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for name, loops in work.items():
            self._spans[name] = []
            for n_steps in loops:
                span = (self.n_steps, self.n_steps + n_steps)
                self._spans[name].append(span)
                self.n_steps += n_steps
        steps = with_progress(range(self.n_steps), progress, description)
        self._steps = iter(steps)
        # A loop that is asked for its next item is done with those before.
        self._n_asked = 0

    def __enter__(self) -> "JoinedLoops":
        self._go_on_to(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._go_on_to(self.n_steps)
        elif isinstance(self._steps, Generator):
            # Its bar goes away.
            self._steps.close()

    def part(self, name: str) -> Callable[[Iterable[Item]], Iterator[Item]]:
        """Return the `progress` of a part's loops, which come in the order of `work`."""
        spans = iter(self._spans[name])
        # A loop that was not foreseen does not go on.
        _, end_of_part = self._spans[name][-1]

        def yield_each(items: Iterable[Item]) -> Iterator[Item]:
            start, end = next(spans, (end_of_part, end_of_part))
            # 0 where it is not known.
            n_items = length_hint(items)
            self._go_on_to(start)
            for n_done, item in enumerate(items, start=1):
                yield item
                if n_items:
                    self._go_on_to(start + (end - start) * n_done // n_items)
            self._go_on_to(end)

        return yield_each

    def _go_on_to(self, n_done: int) -> None:
        while self._n_asked <= n_done:
            next(self._steps, None)
            self._n_asked += 1


def log_progress(items: Iterable[Item], description: str) -> Iterator[Item]:
    """Yield the items; on standard error a line now and then says how many are done."""
    total = len(items) if isinstance(items, Sized) else None
    start = time.monotonic()
    next_line = start + SECONDS_TO_FIRST_LINE
    for n_done, item in enumerate(items):
        now = time.monotonic()
        if now >= next_line:
            text = _line(description, n_done, total, now - start)
            print(text, file=sys.stderr, flush=True)
            next_line = now + SECONDS_BETWEEN_LINES
        yield item


def _line(description: str, n_done: int, total: int | None, seconds: float) -> str:
    """Return how far a loop is: `layers: 12 of 30, 0:00:20, about 0:00:30 left`."""
    elapsed = timedelta(seconds=round(seconds))
    if total is None:
        return f"{description}: {n_done} done, {elapsed}"
    line = f"{description}: {n_done} of {total}, {elapsed}"
    if n_done == 0:
        return line
    # As if each item took as long as those so far.
    left = timedelta(seconds=round(seconds / n_done * (total - n_done)))
    return f"{line}, about {left} left"


def is_watched() -> bool:
    """Say whether somebody sees a bar: in a terminal or a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    # Jupyter's kernel; IPython in a terminal is told by the terminal.
    is_notebook = type(get_ipython()).__name__ == "ZMQInteractiveShell"
    return sys.stderr.isatty() or is_notebook


class _Loop(Generic[Item]):
    """The items of a loop, as a caller's function gets them.

    `taken` are those that it has not given back yet.
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


def _checked_items(
    loop: _Loop[Item], progress: Callable[[Iterable[Any]], Iterable[Any]]
) -> Iterator[Item]:
    """Yield what `progress` yields, if that is each item of the loop."""
    wrapped = progress(loop)
    demand = (
        "`progress` must yield each item of the loop that it wraps once and in order, "
        "as `tqdm.tqdm` does"
    )
    if not isinstance(wrapped, Iterable):
        kind = type(wrapped).__name__
        raise TypeError(f"{demand}, got a function that returns {kind}")
    n_yielded = 0
    for item in wrapped:
        # `progress` may read ahead, and so `taken` may hold several.
        if not loop.taken or loop.taken.popleft() is not item:
            raise ValueError(f"{demand}, got another after {n_yielded}")
        n_yielded += 1
        yield item
    # Items that it took and kept, or never asked for.
    if loop.taken or next(loop.left, _END) is not _END:
        raise ValueError(f"{demand}, got {n_yielded} and no more")
