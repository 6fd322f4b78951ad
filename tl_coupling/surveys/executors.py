"""Work for executors, which are anything with `submit`, on this machine or on a cluster."""

import concurrent.futures
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from tl_coupling.border import AnyPath, Count, checked

# SLURM takes arrays of 1001 jobs at most unless it is told otherwise.
_BATCH = 1000
# Often at first, then rarely: on a network drive every look costs.
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 1.0


@runtime_checkable
class Executor(Protocol):
    """Runs functions elsewhere: pools of concurrent.futures, a Client of dask.distributed, submitit's executors."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call `fn(*args)` there; a future with `done`, `result` and `cancel`."""


class Preemptible:
    """A function that submitit queues again when its job is preempted; it must bear being called again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.function(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit queues after preemption: the same call."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class AsTheyFinish:
    """The keys of futures in the order in which these end, with a length for progress bars."""

    def __init__(self, futures: Mapping[Hashable, Any]) -> None:
        self.futures = futures

    def __len__(self) -> int:
        return len(self.futures)

    def __iter__(self) -> Iterator[Any]:
        waiting, pause = list(self.futures), _FIRST_POLL_SECONDS
        while waiting:
            done = [key for key in waiting if self.futures[key].done()]
            yield from done
            waiting = [key for key in waiting if key not in done]
            # There is no other way of waiting that the futures of all libraries share.
            if waiting and not done:
                time.sleep(pause)
            pause = _FIRST_POLL_SECONDS if done else min(2 * pause, _LAST_POLL_SECONDS)


@contextmanager
def submitted(
    executor: Executor, function: Callable[..., Any], work: Mapping[Any, tuple[Any, ...]]
) -> Iterator[AsTheyFinish]:
    """Submit all calls `function(*arguments)` at once; with submitit as one job array.

    An error in the block cancels those that have not ended; an interrupt ends the workers of a `ProcessPool` at once.
    """
    call, to_do = Preemptible(function), iter(work.items())
    futures: dict[Hashable, Any] = {}
    try:
        try:
            while batch := list(islice(to_do, _BATCH)):
                with getattr(executor, "batch", nullcontext)():
                    futures |= {key: executor.submit(call, *arguments) for key, arguments in batch}
        # submitit's FailedJobError is one.
        except RuntimeError as error:
            said = " ".join(str(error).split())[:300]
            raise OSError(f"the work could not be submitted ({type(error).__name__}: {said})") from error
        yield AsTheyFinish(futures)
    except BaseException as error:
        if isinstance(executor, ProcessPool) and not isinstance(error, Exception):
            executor.abort()
        for future in futures.values():
            # If the cluster refuses, the others are cancelled all the same, and the first error is raised.
            with suppress(Exception):
                if not future.done():
                    future.cancel()
        raise


@checked
def slurm_executor(folder: AnyPath, **parameters: int | str) -> Executor:
    """submitit's executor for a SLURM cluster.

    Args:
        folder: for its scripts and logs; every node must see it.
        parameters: of sbatch: `partition="gpu"`, `gpus_per_node=1`, `cpus_per_task=4`, `mem_gb=32`, `timeout_min=240`
            (for one unit; four hours by default), `array_parallelism=16` (jobs at a time), `account=…`.

    Raises:
        ValueError: submitit is not installed, there is no SLURM, or a parameter that submitit does not know.

    On clusters without accounting (`sacct` fails) a killed job looks like a waiting one, and the run does not end:
    interrupt it and start it again.

    Example:
        >>> executor = tlc.surveys.slurm_executor("out/jobs", partition="gpu", gpus_per_node=1)  # doctest: +SKIP
    """
    try:
        import submitit
    except ImportError:
        raise ValueError('SLURM needs submitit: pip install "tl-coupling[slurm]"') from None
    if shutil.which("sbatch") is None:
        raise ValueError(
            "there is no SLURM here: wanted its command `sbatch`; on a single machine use a pool of processes"
        )
    shared = {"timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name"}
    named = {name if name in shared else f"slurm_{name}": value for name, value in parameters.items()}
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster="slurm")
    try:
        executor.update_parameters(**{"timeout_min": 240, "name": "tl-coupling"} | named)
    # submitit's own message lists every parameter there is.
    except (NameError, AssertionError, ValueError, TypeError) as error:
        unknown = " ".join(str(error).split())[:200]
        raise ValueError(f"SLURM does not accept {parameters}: {unknown}") from None
    return executor


class WorkerDied(RuntimeError):
    """The process of a call was killed, usually for using too much memory."""


class ProcessPool(concurrent.futures.Executor):
    """Processes on this machine that share its cores evenly; they end when this process does, even if it is killed.

    A call whose process is killed is made once more, in a new one; other calls do not notice. Workers ignore Ctrl-C.
    They are killed when `with` is left by an error or `run` by an interrupt; the next call starts new ones.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Forked processes inherit locks of torch's threads, but not the threads.
        self._context = multiprocessing.get_context("spawn")
        # Held while a process is started, so that `abort` misses none.
        self._lock = threading.Lock()
        self._has_begun = self._is_aborting = self._is_shut_down = False
        # A thread waits for each worker.
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._processes: list[Any] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """As in `concurrent.futures`. Its future raises WorkerDied, or OSError if no worker gets as far as the call."""
        if self._is_shut_down:
            raise RuntimeError("this pool of processes was shut down: make a new one")
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, initializer=_block_interrupts)
        return self._threads.submit(self._call, fn, args, kwargs)

    def _call(self, *call: Any) -> Any:
        for _ in range(2):
            try:
                pipe = self._worker()
                pipe.send(call)
                has_succeeded, answer = pipe.recv()
            except (EOFError, ConnectionError):
                if self._is_aborting:
                    break
                if not self._has_begun:
                    raise OSError(
                        "the workers die before they have begun: a script that uses a pool of processes must do its "
                        'own work under `if __name__ == "__main__":`, because each worker imports it'
                    ) from None
                continue
            except Exception:
                # The call, or its answer, cannot be pickled: the worker is as it was.
                self._idle.put(pipe)
                raise
            self._idle.put(pipe)
            if has_succeeded:
                return answer
            raise answer
        raise WorkerDied("its worker died, twice: out of memory?")

    def _worker(self) -> Connection:
        """The connection to an idle worker, or to a new one."""
        with suppress(Empty):
            return self._idle.get_nowait()
        with self._lock:
            if self._is_aborting:
                raise EOFError
            ours, theirs = self._context.Pipe()
            threads = max(1, (os.cpu_count() or 1) // self.workers)
            process = self._context.Process(target=_serve, args=(theirs, threads), daemon=True)
            process.start()
            self._processes.append(process)
        theirs.close()
        ours.recv()
        self._has_begun = True
        return ours

    def abort(self) -> None:
        """Kill the workers; calls that have not ended are cancelled or raise WorkerDied."""
        # A second Ctrl-C would leave some of them alive.
        with _undisturbed():
            with self._lock:
                self._is_aborting = True
                for process in self._processes:
                    process.kill()
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
            for process in self._processes:
                process.join()
            self._threads, self._processes, self._idle = None, [], SimpleQueue()
            self._is_aborting = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in `concurrent.futures`."""
        self._is_shut_down = True
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait:
            self.abort()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.shutdown()


@checked
def process_pool(workers: Count) -> ProcessPool:
    """A pool of processes on this machine that share its cores evenly; an executor for `run`.

    A script that uses one must put its top-level code under `if __name__ == "__main__":`, because each process imports
    it.
    """
    return ProcessPool(workers)


def _serve(pipe: Connection, threads: int) -> None:
    """What a worker does: answer calls until nobody is there to make them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send("begun")
    with suppress(EOFError):
        while True:
            function, args, kwargs = pipe.recv()
            try:
                answer = True, function(*args, **kwargs)
            except Exception as error:
                answer = False, error
            try:
                pipe.send(answer)
            # What cannot be pickled.
            except (TypeError, AttributeError, ValueError) as error:
                pipe.send((False, RuntimeError(f"{answer[1]!r} cannot be sent from its process: {error}")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _block_interrupts() -> None:
    """In a thread: the processes that it starts are not interrupted before they can ignore it themselves."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C in the block; only the main thread ever gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
