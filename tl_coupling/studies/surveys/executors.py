"""Work for executors, which are anything with `submit`, on this machine or on a
cluster.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from tl_coupling.arguments import AnyPath, Count, checked
from tl_coupling.interrupts import interrupts_held

Key = TypeVar("Key", bound=Hashable)
_Value = TypeVar("_Value")
# Often at first, then rarely: on a network drive every look costs.
_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 1.0
# SLURM takes arrays of 1001 jobs at most unless it is told otherwise.
_MOST_IN_AN_ARRAY = 1000
# Parameters that submitit knows for every kind of cluster; the others are SLURM's.
_SUBMITIT_PARAMETERS = {
    "timeout_min",
    "mem_gb",
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "name",
}
# How often a call is made whose process is killed.
_MOST_TRIES = 2
# On small machines, where workers may wait for a disk or a network more than they
# compute.
_ALWAYS_TAKEN = 32


@runtime_checkable
class Executor(Protocol):
    """Runs functions elsewhere: pools of concurrent.futures, a Client of
    dask.distributed, submitit's executors.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call `fn(*args)` there; return a future: `done`, `result`, `cancel`."""


@runtime_checkable
class _Future(Protocol):
    """What the futures of all libraries have in common."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> object: ...


class Preemptible(functools.partial[object]):
    """A function that submitit queues again when its job is preempted; it must bear
    being called again.
    """

    def checkpoint(self, *arguments: object) -> object:
        """Return what submitit queues after preemption: the same call."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class AsTheyFinish(Generic[Key]):
    """The keys of futures in the order in which these end, with a length for progress
    bars.
    """

    def __init__(self, futures: Mapping[Key, _Future]) -> None:
        self.futures = futures

    def __len__(self) -> int:
        return len(self.futures)

    def __iter__(self) -> Iterator[Key]:
        waiting = list(self.futures)
        pause = _FIRST_POLL_SECONDS
        while waiting:
            done = [key for key in waiting if self.futures[key].done()]
            yield from done
            waiting = [key for key in waiting if key not in done]
            if done:
                pause = _FIRST_POLL_SECONDS
            else:
                pause = min(2 * pause, _LAST_POLL_SECONDS)
            # There is no other way of waiting that the futures of all libraries share.
            if waiting:
                time.sleep(pause)


@contextmanager
def submitted(
    executor: Executor,
    function: Callable[..., object],
    work: Mapping[Key, tuple[object, ...]],
) -> Iterator[AsTheyFinish[Key]]:
    """Submit all calls `function(*arguments)` at once; with submitit as one job array.

    An error in the block cancels those that have not ended; an interrupt kills the
    workers of a `ProcessPool`.
    """
    futures: dict[Key, _Future] = {}
    unsubmitted = iter(work.items())
    try:
        try:
            while batch := list(islice(unsubmitted, _MOST_IN_AN_ARRAY)):
                with getattr(executor, "batch", nullcontext)():
                    # Preemptible: with other executors the same as the bare function.
                    futures |= {
                        key: executor.submit(Preemptible(function), *arguments)
                        for key, arguments in batch
                    }
        # submitit's FailedJobError is one.
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise OSError(
                f"the work could not be submitted ({type(error).__name__}: {reason})"
            ) from error
        yield AsTheyFinish(futures)
    except BaseException as error:
        is_interrupt = not isinstance(error, Exception)
        if is_interrupt and isinstance(executor, ProcessPool):
            executor.abort()
        for future in futures.values():
            # If the cluster refuses, the others are cancelled all the same, and the
            # first error is raised.
            with suppress(Exception):
                if not future.done():
                    future.cancel()
        raise


@checked
def slurm_executor(folder: AnyPath, **parameters: int | str) -> Executor:
    """Return submitit's executor for a SLURM cluster.

    Scripts and logs go to `folder`, which every node must see. Parameters are those of
    sbatch: `partition="gpu"`, `gpus_per_node=1`, `cpus_per_task=4`, `mem_gb=32`,
    `timeout_min=240` (for one unit; four hours by default), `array_parallelism=16`
    (jobs at a time), `account=…`. ValueError where submitit or SLURM is missing, or
    does not know a parameter. On clusters without accounting (`sacct` fails) a killed
    job looks like a waiting one, and the run does not end: interrupt it and start it
    again.

    Example:
        >>> try:
        ...     executor = tlc.surveys.slurm_executor("logs", partition="gpu")
        ... except ValueError:
        ...     # No SLURM here: `tlc.run_survey(survey, folder, None)` measures in this process.
        ...     executor = None
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            'SLURM needs submitit: pip install "tl-coupling[slurm]"'
        ) from None
    if shutil.which("sbatch") is None:
        raise ValueError(
            "there is no SLURM here: wanted its command `sbatch`; on one machine use a "
            "pool of processes"
        )
    options: dict[str, int | str] = {"timeout_min": 240, "name": "tl-coupling"}
    for name, value in parameters.items():
        is_shared = name in _SUBMITIT_PARAMETERS
        options[name if is_shared else f"slurm_{name}"] = value
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster="slurm")
    try:
        executor.update_parameters(**options)
    except (NameError, AssertionError, ValueError, TypeError) as error:
        # submitit's own message lists every parameter there is.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"SLURM does not accept {parameters}: {reason}") from None
    return executor


class WorkerDied(RuntimeError):
    """The process of a call was killed, usually for using too much memory."""


@checked
class ProcessPool(concurrent.futures.Executor):
    """A pool of processes on this machine that share its cores evenly; an executor for
    `run_survey`.

    A script that uses one must put its top-level code under `if __name__ ==
    "__main__":`, because each process imports it. A call whose process is killed is
    made once more, in a new one; other calls do not notice. The processes ignore Ctrl-C
    and end with this one, even if it is killed. When `with` is left by an error or
    `run_survey` by an interrupt, they are killed, and the next call starts new ones.
    ValueError for more than 4 workers a core, where that is over 32.

    Example:
        >>> settings = tlc.Settings(k=(2, 4), window=1)
        >>> with tlc.surveys.process_pool(2) as pool:
        ...     options = {"settings": settings, "executor": pool, "progress": False}
        ...     sweep = tlc.checkpoint_sweep("models/width16", None, prompts, **options)
    """

    def __init__(self, workers: Count) -> None:
        n_cores = os.cpu_count() or 1
        max_workers = max(_ALWAYS_TAKEN, 4 * n_cores)
        if workers > max_workers:
            raise ValueError(
                f"`workers` must be at most {max_workers} on this machine of {n_cores} cores: "
                f"each is a process with a model of its own; got {workers}"
            )
        self.workers = workers
        # Forked processes inherit locks of torch's threads, but not the threads.
        self._context = multiprocessing.get_context("spawn")
        # A pool of many processes breaks when one of them dies. So each thread has a
        # pool of one process.
        self._threads = ThreadPoolExecutor(workers)
        self._own = threading.local()
        self._pools: list[ProcessPoolExecutor] = []
        # Held while a process is started, so that `abort` misses none.
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_shut_down = False

    def submit(
        self, fn: Callable[..., _Value], /, *args: object, **kwargs: object
    ) -> "concurrent.futures.Future[_Value]":
        """Submit a call as in `concurrent.futures`.

        The future raises WorkerDied, or OSError if no worker gets as far as the call.
        """
        if self._is_shut_down:
            raise RuntimeError("this pool of processes was shut down: make a new one")
        call = functools.partial(fn, *args, **kwargs)
        return self._threads.submit(self._call, call, self._threads)

    def _call(self, call: Callable[[], _Value], threads: ThreadPoolExecutor) -> _Value:
        """Make a call in this thread's process; once more in a new one if that dies."""
        for _ in range(_MOST_TRIES):
            try:
                return self._own_pool(threads).submit(call).result()
            except BrokenProcessPool:
                self._own.pool = None
                is_aborted = threads is not self._threads
                # No worker ever got as far as to wait for calls: trying again would
                # fail the same way.
                if not (self._has_begun or is_aborted):
                    raise OSError(
                        "the workers died before they began: a script that uses a "
                        "pool of processes must do its own work under "
                        '`if __name__ == "__main__":`, because each worker imports it'
                    ) from None
        raise WorkerDied("its worker died, twice: out of memory?")

    def _own_pool(self, threads: ThreadPoolExecutor) -> ProcessPoolExecutor:
        """Return this thread's pool of one process, made if there is none."""
        pool: ProcessPoolExecutor | None = getattr(self._own, "pool", None)
        if pool is not None:
            return pool
        # Threads of all workers together are as many as cores: more would wait for
        # each other.
        n_threads = max(1, (os.cpu_count() or 1) // self.workers)
        with self._lock:
            if threads is not self._threads:
                raise BrokenProcessPool("aborted")
            pool = ProcessPoolExecutor(1, self._context)
            self._pools.append(pool)
            # The process inherits what is blocked here: it is not interrupted before it
            # can ignore that itself.
            if hasattr(signal, "pthread_sigmask"):
                # Or its start would unblock it.
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            begun = pool.submit(_begin, n_threads)
        begun.result()
        self._has_begun = True
        self._own.pool = pool
        return pool

    def abort(self) -> None:
        """Kill the processes.

        Calls that have not ended are cancelled or raise WorkerDied.
        """
        # A second Ctrl-C would leave some of them alive.
        with interrupts_held():
            with self._lock:
                aborted, self._threads = self._threads, ThreadPoolExecutor(self.workers)
                aborted.shutdown(wait=False, cancel_futures=True)
                for pool in self._pools:
                    # `pool.kill_workers()` from Python 3.14 on.
                    for process in list((pool._processes or {}).values()):
                        process.kill()
            aborted.shutdown()
            self._end_pools()

    def _end_pools(self) -> None:
        while self._pools:
            self._pools.pop().shutdown()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut the pool down as in `concurrent.futures`."""
        self._is_shut_down = True
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait:
            self._end_pools()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error_type is not None:
            self.abort()
        self.shutdown()


process_pool = ProcessPool


def _begin(n_threads: int) -> None:
    """Make a process a worker: its first call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(n_threads)
    disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end as well."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    # Without cleaning up: the main thread may be deep in a computation.
    os._exit(1)
