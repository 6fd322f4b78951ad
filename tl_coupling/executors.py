"""Work handed to executors: whatever has `submit`, on this machine or on a cluster."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

_POLL_SECONDS = 0.1


@runtime_checkable
class Future(Protocol):
    """What comes of a submitted call."""

    def done(self) -> bool:
        """Whether it has ended, well or badly."""

    def result(self) -> Any:
        """What the call returned; raises what it raised."""

    def cancel(self) -> object:
        """End it, or see that it never starts."""


@runtime_checkable
class Executor(Protocol):
    """Runs functions elsewhere: concurrent.futures' pools, a Client of dask.distributed, submitit's executors."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Call `fn(*args)` there."""


class Preemptible:
    """A function as submitit wants it: a job that is about to be preempted is put into the queue again.

    The function must be one that may be called again after it was cut off.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """The function's own result."""
        return self.function(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit puts into the queue instead: the same call."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


Key = TypeVar("Key", bound=Hashable)


class AsTheyFinish(Generic[Key]):
    """The keys of futures in the order in which these end; its length is known at once, for progress bars."""

    def __init__(self, futures: Mapping[Key, Future]) -> None:
        self.futures = dict(futures)

    def __len__(self) -> int:
        return len(self.futures)

    def __iter__(self) -> Iterator[Key]:
        waiting = list(self.futures)
        while waiting:
            done = [key for key in waiting if self.futures[key].done()]
            yield from done
            waiting = [key for key in waiting if key not in done]
            # The futures of different libraries cannot be waited for in another common way.
            if waiting and not done:
                time.sleep(_POLL_SECONDS)


@contextmanager
def submitted(
    executor: Executor, function: Callable[..., Any], work: Mapping[Key, tuple[Any, ...]]
) -> Iterator[AsTheyFinish[Key]]:
    """All calls `function(*arguments)` handed over at once, with submitit as one job array.

    Those that have not ended are cancelled if this process leaves with an error.
    """
    call = Preemptible(function)
    with getattr(executor, "batch", nullcontext)():
        futures = {key: executor.submit(call, *arguments) for key, arguments in work.items()}
    try:
        yield AsTheyFinish(futures)
    except BaseException:
        for future in futures.values():
            if not future.done():
                future.cancel()
        raise
