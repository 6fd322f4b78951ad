"""What a command shows while it works: a bar for each loop, or one for all of them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tl_coupling.cli.plain_console import PlainConsole
from tl_coupling.files import plain
from tl_coupling.progress import (
    SECONDS_BETWEEN_LINES,
    SECONDS_TO_FIRST_LINE,
    log_progress,
)

Item = TypeVar("Item")
# Stages are as many steps of the bar as loops do in their time, on one core and with
# SmolLM2-135M. The time left is that of the model which is measured.
_SECONDS_PER_STEP = 0.02
# Of the steps of all loops, before which the time left is not said: the first ones may
# be of work without a loop, all of which is done when the first of them ends.
_SHARE_TO_ESTIMATE = 0.02


class Bars:
    """A bar for each loop, which goes away with it, and a status for each stage.

    A log gets a line now and then: a bar would fill it with control characters.
    """

    def __init__(self, console: PlainConsole) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def measuring(self) -> AbstractContextManager[object]:
        """Enter a block whose loops have bars."""
        # In a log it would leave an empty line.
        return self.progress if self.console.is_terminal else nullcontext()

    def stage(self, text: str) -> AbstractContextManager[None]:
        """Enter a block of work that has no loop, outside `measuring`."""
        return self.console.stage(text)

    def loop(self, text: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a loop."""
        text = plain(text)
        if not self.console.is_terminal:
            yield from log_progress(list(items), text)
            return
        task = self.progress.add_task(text, total=None)
        # As a list, whose length the bar needs.
        yield from self.progress.track(list(items), task_id=task)
        self.progress.remove_task(task)


class WholeBar(Bars):
    """One bar for all that a command does, with the time left of all of it.

    The command loads and measures one model after the other, each in one loop of as many
    steps, and ends with a stage such as drawing. How much there is to do is known when
    the first loop begins. The steps that are left take as long as those so far; loading
    takes as long as it took first.

    Args:
        console: of the command.
        name: what a log calls the bar.
        n_models: how many are measured.
        last_seconds: about how long the stage after the last loop takes.
    """

    def __init__(
        self, console: PlainConsole, name: str, n_models: int, last_seconds: float
    ) -> None:
        super().__init__(console)
        self.name = name
        self.n_models = n_models
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            _TimeLeft(self),
            console=console,
            transient=True,
        )
        # Without a total, which shows that something happens.
        self._task = self.progress.add_task(name, total=None)
        self._start = time.monotonic()
        self._next_line = self._start + SECONDS_TO_FIRST_LINE
        self._has_lines = False
        # Of all loops; of each, 0 until the first begins.
        self._n_steps = 0
        self._n_done = 0
        self._seconds_in_loops = 0.0
        # Expected of each stage, in order: those before the first loop are not counted.
        self._stages: list[float] = []
        self._last_seconds = last_seconds
        # Since when the stage or the loop runs that runs now.
        self._stage_start: float | None = None
        self._loop_start: float | None = None
        self._first_seconds = 0.0

    def __enter__(self) -> "WholeBar":
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            task = self._shown_task
            self.progress.update(self._task, completed=task.total or 0)
            if self._has_lines:
                self._say(time.monotonic())
        if self.console.is_terminal:
            self.progress.stop()

    @property
    def _shown_task(self) -> Task:
        return self.progress.tasks[0]

    def measuring(self) -> AbstractContextManager[object]:
        """Enter a block whose loops go on in the bar."""
        return nullcontext()

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Enter a block of work that has no loop: the bar goes on at its end."""
        self.progress.update(self._task, description=plain(text))
        self._stage_start = time.monotonic()
        # A log gets a line of a stage that takes long.
        is_log = not self.console.is_terminal
        with self.console.stage(text) if is_log else nullcontext():
            yield
        seconds = time.monotonic() - self._stage_start
        self._stage_start = None
        if not self._n_steps:
            self._first_seconds = seconds
        elif self._stages:
            self._go_on(_steps(self._stages.pop(0)))

    def loop(self, text: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of a model's loop, each a step of the bar."""
        steps = list(items)
        self.progress.update(self._task, description=plain(text))
        self._loop_start = time.monotonic()
        if not self._n_steps:
            self._n_steps = self.n_models * len(steps)
            n_loadings = self.n_models - 1
            self._stages = [self._first_seconds] * n_loadings + [self._last_seconds]
            total = self._n_steps + sum(map(_steps, self._stages))
            self.progress.update(self._task, total=total)
        for step in steps:
            yield step
            self._n_done += 1
            self._go_on(1)
        self._seconds_in_loops += time.monotonic() - self._loop_start
        self._loop_start = None

    def seconds_left(self) -> float | None:
        """Return about how long all that is left takes; `None` where too little is done
        to say it.
        """
        if not self._n_steps or self._n_done < _SHARE_TO_ESTIMATE * self._n_steps:
            return None
        now = time.monotonic()
        in_loops = self._seconds_in_loops
        if self._loop_start is not None:
            in_loops += now - self._loop_start
        left = in_loops / self._n_done * (self._n_steps - self._n_done)
        left += sum(self._stages)
        if self._stages and self._stage_start is not None:
            # Of the stage that runs.
            left -= min(now - self._stage_start, self._stages[0])
        return left

    def _go_on(self, n_steps: int) -> None:
        self.progress.update(self._task, advance=n_steps)
        now = time.monotonic()
        # The end is said where the block is left.
        is_at_end = self._shown_task.finished
        if not self.console.is_terminal and now >= self._next_line and not is_at_end:
            self._say(now)

    def _say(self, now: float) -> None:
        """Write a line into a log: how far the command is."""
        elapsed = timedelta(seconds=round(now - self._start))
        line = f"{self.name}: {self._shown_task.percentage:.0f} %, {elapsed}"
        left = self.seconds_left()
        if left is not None and not self._shown_task.finished:
            line += f", about {timedelta(seconds=round(left))} left"
        self.console.print(line, soft_wrap=True)
        self._next_line = now + SECONDS_BETWEEN_LINES
        self._has_lines = True


def _steps(seconds: float) -> int:
    """Return how many steps of a bar a stage is."""
    return round(seconds / _SECONDS_PER_STEP)


class _TimeLeft(ProgressColumn):
    """The time left of a whole bar."""

    def __init__(self, bar: WholeBar) -> None:
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Text:
        """Return the text, which is drawn again several times a second."""
        left = self.bar.seconds_left()
        if left is None:
            return Text("-:--:--", style="progress.remaining")
        return Text(str(timedelta(seconds=round(left))), style="progress.remaining")
