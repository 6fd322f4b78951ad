"""Work handed to executors: whatever has `submit`, on this machine or on a cluster."""

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

# SLURM takes arrays of 1001 jobs at most unless it is told otherwise.
_BATCH = 1000
# From quick answers to few questions: on a network drive each one costs.
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 1.0


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
        waiting, pause = list(self.futures), _FIRST_POLL_SECONDS
        while waiting:
            done = {key for key in waiting if self.futures[key].done()}
            yield from (key for key in waiting if key in done)
            waiting = [key for key in waiting if key not in done]
            # The futures of different libraries cannot be waited for in another common way.
            if waiting and not done:
                time.sleep(pause)
            pause = _FIRST_POLL_SECONDS if done else min(2 * pause, _LAST_POLL_SECONDS)


@contextmanager
def submitted(
    executor: Executor, function: Callable[..., Any], work: Mapping[Key, tuple[Any, ...]]
) -> Iterator[AsTheyFinish[Key]]:
    """All calls `function(*arguments)` handed over at once, with submitit as one job array.

    Those that have not ended are cancelled if this process leaves with an error.
    """
    call, to_do = Preemptible(function), iter(work.items())
    futures: dict[Key, Future] = {}
    try:
        try:
            while batch := list(islice(to_do, _BATCH)):
                with getattr(executor, "batch", nullcontext)():
                    futures |= {key: executor.submit(call, *arguments) for key, arguments in batch}
        # submitit's FailedJobError is one.
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise OSError(f"the work could not be handed over ({type(error).__name__}: {said})") from error
        yield AsTheyFinish(futures)
    except BaseException:
        for future in futures.values():
            # Whatever a cluster answers, the others are cancelled too, and the first error is the one to tell.
            with suppress(Exception):
                if not future.done():
                    future.cancel()
        raise


def slurm_executor(folder: str | os.PathLike[str], **parameters: int | str) -> Executor:
    """submitit's executor for a SLURM cluster, with its scripts and logs in `folder`, which every node must see.

    Args:
        folder: where to.
        parameters: as sbatch knows them: `partition="gpu"`, `gpus_per_node=1`, `cpus_per_task=4`, `mem_gb=32`,
            `timeout_min=240` (of one unit; four hours by default, submitit's own five minutes are few),
            `array_parallelism=16` (jobs at a time), `account=…`.

    Raises:
        ValueError: submitit is not installed, there is no SLURM, or a parameter that submitit does not know.

    Where the cluster keeps no accounts (`sacct` fails), a job that was killed cannot be told from one that waits, and
    whoever waits for it waits on: interrupt the run and start it again.

    Example:
        >>> executor = tlc.slurm_executor("out/jobs", partition="gpu", gpus_per_node=1)  # doctest: +SKIP
    """
    try:
        import submitit
    except ImportError:
        raise ValueError('SLURM needs submitit: pip install "tl-coupling[slurm]"') from None
    if shutil.which("sbatch") is None:
        raise ValueError("there is no SLURM here: wanted its command `sbatch`; on one machine use processes instead")
    shared = {"timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name"}
    named = {name if name in shared else f"slurm_{name}": value for name, value in parameters.items()}
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster="slurm")
    try:
        executor.update_parameters(**{"timeout_min": 240, "name": "tl-coupling"} | named)
    # submitit's own errors name every parameter there is.
    except (NameError, AssertionError, ValueError, TypeError) as error:
        unknown = " ".join(str(error).split())[:200]
        raise ValueError(f"SLURM does not take {parameters} as they are: {unknown}") from None
    return executor


def process_pool(workers: int) -> ProcessPoolExecutor:
    """A pool of processes that share this machine's cores evenly, and end when this process does, even killed.

    A script that uses one runs its own work under `if __name__ == "__main__":`, because each process imports it.

    Raises:
        ValueError: fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"`workers` must be at least 1, got {workers}")
    threads = max(1, (os.cpu_count() or 1) // workers)
    # A forked process inherits torch's threads without the threads, and everything else that is open.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, (threads,))


def _begin_worker(threads: int) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    # Of every file that is loaded, across the bars of whoever started this.
    disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
