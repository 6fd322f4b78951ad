"""Work handed to executors: whatever has `submit`, on this machine or on a cluster."""

import concurrent.futures
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from tl_coupling.border import AnyPath, Count, checked

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
    """The keys of futures in the order in which these end; its length is known at once, for progress bars.

    When a worker of a `ProcessPool` dies, all that its pool was given is lost. Then calls that may have been running
    are made again, one at a time, so that the one that kills its worker is known, and then the others.
    """

    def __init__(
        self,
        futures: Mapping[Key, Future],
        pool: "ProcessPool | None" = None,
        submit: Callable[[Key], Future] | None = None,
    ) -> None:
        self.futures = dict(futures)
        self._pool, self._submit = pool, submit

    def __len__(self) -> int:
        return len(self.futures)

    def __iter__(self) -> Iterator[Key]:
        waiting, pause = list(self.futures), _FIRST_POLL_SECONDS
        while waiting:
            done = {key for key in waiting if self.futures[key].done()}
            lost = [key for key in waiting if key in done and self._is_lost(key)]
            yield from (key for key in waiting if key in done and key not in lost)
            waiting = [key for key in waiting if key not in done]
            if lost and self._pool is not None and self._submit is not None:
                # Calls are begun in the order in which they were submitted.
                suspects, others = lost[: self._pool.workers], lost[self._pool.workers :]
                for key in suspects:
                    yield self._alone(key, self._submit)
                self.futures |= {key: self._submit(key) for key in others}
                waiting = others + waiting
            # The futures of different libraries cannot be waited for in another common way.
            if waiting and not done:
                time.sleep(pause)
            pause = _FIRST_POLL_SECONDS if done else min(2 * pause, _LAST_POLL_SECONDS)

    def _is_lost(self, key: Key) -> bool:
        future = self.futures[key]
        if self._pool is None or not isinstance(future, concurrent.futures.Future) or future.cancelled():
            return False
        return isinstance(future.exception(), BrokenExecutor)

    def _alone(self, key: Key, submit: Callable[[Key], Future]) -> Key:
        self.futures[key] = submit(key)
        while not self.futures[key].done():
            time.sleep(_FIRST_POLL_SECONDS)
        if self._is_lost(key):
            died: concurrent.futures.Future[Any] = concurrent.futures.Future()
            died.set_exception(WorkerDied("its worker died, and again when it had nothing else to do: out of memory?"))
            self.futures[key] = died
        return key


@contextmanager
def submitted(
    executor: Executor, function: Callable[..., Any], work: Mapping[Key, tuple[Any, ...]]
) -> Iterator[AsTheyFinish[Key]]:
    """All calls `function(*arguments)` handed over at once, with submitit as one job array.

    Those that have not ended are cancelled if this process leaves with an error, and the workers of a `ProcessPool` are
    ended if it is interrupted.
    """
    call, to_do = Preemptible(function), iter(work.items())
    futures: dict[Key, Future] = {}
    pool = executor if isinstance(executor, ProcessPool) else None
    try:
        try:
            while batch := list(islice(to_do, _BATCH)):
                with getattr(executor, "batch", nullcontext)():
                    futures |= {key: executor.submit(call, *arguments) for key, arguments in batch}
        # submitit's FailedJobError is one.
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise OSError(f"the work could not be handed over ({type(error).__name__}: {said})") from error
        finished = AsTheyFinish(futures, pool, lambda key: executor.submit(call, *work[key]))
        futures = finished.futures
        yield finished
    except BaseException as error:
        if pool is not None and not isinstance(error, Exception):
            pool.abort()
        for future in futures.values():
            # Whatever a cluster answers, the others are cancelled too, and the first error is the one to tell.
            with suppress(Exception):
                if not future.done():
                    future.cancel()
        raise


@checked
def slurm_executor(folder: AnyPath, **parameters: int | str) -> Executor:
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
        >>> executor = tlc.surveys.slurm_executor("out/jobs", partition="gpu", gpus_per_node=1)  # doctest: +SKIP
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


class WorkerDied(RuntimeError):
    """A call whose process ended before it did, killed as a rule for want of memory."""


class ProcessPool(concurrent.futures.Executor):
    """Processes of this machine that share its cores evenly, and end when this process does, even killed.

    Ctrl-C is for the process that has the pool: its workers take no notice, and are ended at once when the block of the
    pool is left by an error, or `run` by an interrupt. After that, or after a worker died, the pool begins anew with
    the next call.

    Attributes:
        workers: how many processes there are at most.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # A forked process inherits torch's threads without the threads, and everything else that is open.
        self._context = _RecordingContext()
        self._begun = self._context.Event()
        self._pool: ProcessPoolExecutor | None = None
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """As of every executor.

        Raises:
            OSError: workers died before one of them had begun.
        """
        if self._is_shut_down:
            raise RuntimeError("this pool of processes was shut down: make another one")
        with _without_interrupts_in_workers():
            if self._pool is not None:
                try:
                    return self._pool.submit(fn, *args, **kwargs)
                except BrokenExecutor:
                    self.abort()
                    if not self._begun.is_set():
                        raise OSError(
                            "the workers end before they have begun: a script that uses a pool of processes must do "
                            'its own work under `if __name__ == "__main__":`, because each worker imports it'
                        ) from None
            threads = max(1, (os.cpu_count() or 1) // self.workers)
            self._pool = ProcessPoolExecutor(self.workers, self._context, _begin_worker, (threads, self._begun))
            return self._pool.submit(fn, *args, **kwargs)

    def abort(self) -> None:
        """End the workers at once, whatever they are doing; calls that have not ended end with BrokenProcessPool."""
        # A second Ctrl-C would leave some of them, for which Python waits when it ends.
        with _undisturbed():
            for process in self._context.started:
                # One that has never started has no number, one that has ended is gone.
                if process.pid is not None:
                    with suppress(OSError):
                        process.kill()
            if self._pool is not None:
                # Not `cancel_futures`: that a cancelled call is lost as well stops the pool's own thread with an error.
                self._pool.shutdown(wait=True)
            self._context.started.clear()
            self._pool = None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of every executor."""
        self._is_shut_down = True
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.shutdown()


@checked
def process_pool(workers: Count) -> ProcessPool:
    """A pool of processes that share this machine's cores evenly, and end when this process does, even killed.

    A script that uses one runs its own work under `if __name__ == "__main__":`, because each process imports it.

    Raises:
        ValueError: fewer than one worker.
    """
    return ProcessPool(workers)


class _RecordingContext(SpawnContext):
    """Knows the processes that were made with it: a pool keeps its own to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override]
        process = super().Process(*args, **kwargs)
        self.started.append(process)
        return process


def _begin_worker(threads: int, begun: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    # Of every file that is loaded, across the bars of whoever started this.
    disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begun.set()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _without_interrupts_in_workers() -> Iterator[None]:
    """A process that is started inside holds Ctrl-C back from its very beginning, when nothing of ours runs in it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C inside; only the main thread can have one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
