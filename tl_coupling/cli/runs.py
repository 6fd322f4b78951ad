"""The models that a command measures, one after the other."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rich.progress import Progress
from torch import nn

from tl_coupling.blocks import Trace
from tl_coupling.cli.options import Loading, Tracing

Item = TypeVar("Item")
Measured = TypeVar("Measured")


@dataclass(frozen=True, eq=False)
class Run:
    """A loaded model, its role ("trained" or "untrained"), and how its prompts are traced and its progress shown."""

    role: str
    name: str
    model: nn.Module
    tracing: Tracing
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    def trace(self, prompt: str) -> Trace:
        """The traced prompt; the time it took is noted."""
        with self.timed("trace"):
            return self.tracing.trace(self.model, prompt)

    def bar(self, what: str) -> Callable[[Iterable[Item]], Iterable[Item]]:
        """Wraps a loop in a bar that goes away with the loop."""

        def over(items: Iterable[Item]) -> Iterator[Item]:
            task = self.progress.add_task(f"{self.name}: {what}", total=None)
            yield from self.progress.track(list(items), task_id=task)
            self.progress.remove_task(task)

        return over

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block took, in seconds of wall time."""
        start = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - start, 3)


def measured_runs(
    loading: Loading, tracing: Tracing, measure: Callable[[Run], Measured], progress: Progress, untrained: bool
) -> dict[str, Measured]:
    """What `measure` finds in the trained model and, if wanted, in its untrained twin."""

    # A function of its own, so that one model is freed before the next is loaded.
    def measured(role: str) -> Measured:
        name = loading.model if role == "trained" else f"untrained {loading.model}"
        task = progress.add_task(f"loading {name}", total=None)
        start = time.perf_counter()
        model = loading.load(role == "untrained")
        progress.remove_task(task)
        return measure(Run(role, name, model, tracing, progress, {"loading": round(time.perf_counter() - start, 3)}))

    return {role: measured(role) for role in ("trained", *(["untrained"] if untrained else []))}
