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
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from tl_coupling.arguments import AnyPath, Count, checked

# Often at first, then rarely: on a network drive every look costs.
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 1.0
# On small machines, where workers may wait for a disk or a network more than they
# compute.
_ALWAYS_TAKEN = 32


@runtime_checkable
class Executor(Protocol):
    """Runs functions elsewhere: pools of concurrent.futures, a Client of
    dask.distributed, submitit's executors.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call `fn(*args)` there; a future with `done`, `result` and `cancel`."""


class Preemptible(functools.partial[Any]):
    """A function that submitit queues again when its job is preempted; it must bear
    being called again.
    """

    def checkpoint(self, *arguments: Any) -> Any:
        """What submitit queues after preemption: the same call."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class AsTheyFinish:
    """The keys of futures in the order in which these end, with a length for progress
    bars.
    """

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
            pause = _FIRST_POLL_SECONDS if done else min(2 * pause, _LAST_POLL_SECONDS)
            # There is no other way of waiting that the futures of all libraries share.
            if waiting:
                time.sleep(pause)


@contextmanager
def submitted(
    executor: Executor, function: Callable[..., Any], work: Mapping[Any, Any]
) -> Iterator[AsTheyFinish]:
    """Submit all calls `function(*arguments)` at once; with submitit as one job array.

    An error in the block cancels those that have not ended; an interrupt kills the
    workers of a `ProcessPool`.
    """
    futures: dict[Hashable, Any] = {}
    to_do = iter(work.items())
    try:
        try:
            # SLURM takes arrays of 1001 jobs at most unless it is told otherwise.
            while batch := list(islice(to_do, 1000)):
                with getattr(executor, "batch", nullcontext)():
                    futures |= {
                        key: executor.submit(Preemptible(function), *arguments)
                        for key, arguments in batch
                    }
        # submitit's FailedJobError is one.
        except RuntimeError as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise OSError(f"the work could not be submitted ({said})") from error
        yield AsTheyFinish(futures)
    except BaseException as error:
        if isinstance(executor, ProcessPool) and not isinstance(error, Exception):
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
    """submitit's executor for a SLURM cluster.

    Scripts and logs go to `folder`, which every node must see. Parameters are those of
    sbatch: `partition="gpu"`, `gpus_per_node=1`, `cpus_per_task=4`, `mem_gb=32`,
    `timeout_min=240` (for one unit; four hours by default), `array_parallelism=16`
    (jobs at a time), `account=…`. ValueError where submitit or SLURM is missing, or
    does not know a parameter. On clusters without accounting (`sacct` fails) a killed
    job looks like a waiting one, and the run does not end: interrupt it and start it
    again.

    Example:
        >>> try:
        ...     executor = tlc.surveys.slurm_executor("logs", partition="gpu", gpus_per_node=1, timeout_min=120)
        ... except ValueError:
        ...     executor = None  # no SLURM here: `tlc.run(survey, folder, executor)` measures in this process
    """
    try:
        import submitit
    except ImportError:
        raise ValueError(
            'SLURM needs submitit: pip install "tl-coupling[slurm]"'
        ) from None
    if shutil.which("sbatch") is None:
        raise ValueError(
            "there is no SLURM here: wanted its command `sbatch`; on one machine use a pool of processes"
        )
    shared = {
        "timeout_min",
        "mem_gb",
        "nodes",
        "cpus_per_task",
        "gpus_per_node",
        "tasks_per_node",
        "name",
    }
    named = {
        name if name in shared else f"slurm_{name}": value
        for name, value in parameters.items()
    }
    executor = submitit.AutoExecutor(folder=os.fspath(folder), cluster="slurm")
    try:
        executor.update_parameters(
            **{"timeout_min": 240, "name": "tl-coupling"} | named
        )
    except (NameError, AssertionError, ValueError, TypeError) as error:
        # submitit's own message lists every parameter there is.
        raise ValueError(
            f"SLURM does not accept {parameters}: {' '.join(str(error).split())[:200]}"
        ) from None
    return executor


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C meanwhile; only the main thread ever gets it."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


class WorkerDied(RuntimeError):
    """The process of a call was killed, usually for using too much memory."""


@checked
class ProcessPool(concurrent.futures.Executor):
    """A pool of processes on this machine that share its cores evenly; an executor for
    `run`.

    A script that uses one must put its top-level code under `if __name__ ==
    "__main__":`, because each process imports it. A call whose process is killed is
    made once more, in a new one; other calls do not notice. The processes ignore Ctrl-C
    and end with this one, even if it is killed. When `with` is left by an error or
    `run` by an interrupt, they are killed, and the next call starts new ones.
    ValueError for more than 4 workers a core, where that is over 32.

    Example:
        >>> settings = tlc.Settings(k=(2, 4), window=1)
        >>> with tlc.surveys.process_pool(2) as pool:
        ...     how = {"settings": settings, "executor": pool, "progress": False}
        ...     sweep = tlc.checkpoint_sweep("models/width16", prompts=prompts, folder="sweep", **how)
    """

    def __init__(self, workers: Count) -> None:
        n_cores = os.cpu_count() or 1
        most = max(_ALWAYS_TAKEN, 4 * n_cores)
        if workers > most:
            raise ValueError(
                f"`workers` must be at most {most} on this machine of {n_cores} cores: each is a process with a model "
                f"of its own; got {workers}"
            )
        self.workers = workers
        # Forked processes inherit locks of torch's threads, but not the threads.
        self._context = multiprocessing.get_context("spawn")
        # Held while a process is started, so that `abort` misses none.
        self._lock = threading.Lock()
        self._has_begun = self._is_aborting = self._is_shut_down = False
        # Each thread waits for a process of its own.
        self._own = threading.local()
        self._threads, self._processes = (
            concurrent.futures.ThreadPoolExecutor(workers),
            list[Any](),
        )

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> "concurrent.futures.Future[Any]":
        """As in `concurrent.futures`. The future raises WorkerDied, or OSError if no
        worker gets as far as the call.
        """
        if self._is_shut_down:
            raise RuntimeError("this pool of processes was shut down: make a new one")
        return self._threads.submit(self._call, fn, args, kwargs)

    def _call(self, *call: Any) -> Any:
        for _ in range(2):
            try:
                process, pipe = self._own.worker = (
                    getattr(self._own, "worker", None) or self._start()
                )
                pipe.send(call)
                has_succeeded, answer = _heard(process, pipe)
            except (EOFError, ConnectionError):
                self._own.worker = None
                if not (self._has_begun or self._is_aborting):
                    raise OSError(
                        "the workers die before they have begun: a script that uses a pool of processes must do its "
                        'own work under `if __name__ == "__main__":`, because each worker imports it'
                    ) from None
            else:
                if has_succeeded:
                    return answer
                raise answer
        raise WorkerDied("its worker died, twice: out of memory?")

    def _start(self) -> tuple[Any, Connection]:
        """A new process that waits for calls, and the connection to it."""
        with self._lock:
            if self._is_aborting:
                raise EOFError
            ours, theirs = self._context.Pipe()
            threads = max(1, (os.cpu_count() or 1) // self.workers)
            process = self._context.Process(
                target=_serve, args=(theirs, threads), daemon=True
            )
            # A process inherits what is blocked: it is not interrupted before it can
            # ignore that itself.
            if hasattr(signal, "pthread_sigmask"):
                # Or its start would unblock it.
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
            self._processes.append(process)
        theirs.close()
        _heard(process, ours)
        self._has_begun = True
        return process, ours

    # A second Ctrl-C would leave some of them alive.
    @_undisturbed()
    def abort(self) -> None:
        """Kill the processes; calls that have not ended are cancelled or raise
        WorkerDied.
        """
        with self._lock:
            self._is_aborting = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()
        self._threads, self._processes = (
            concurrent.futures.ThreadPoolExecutor(self.workers),
            [],
        )
        self._is_aborting = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in `concurrent.futures`."""
        self._is_shut_down = True
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait:
            self.abort()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.shutdown()


process_pool = ProcessPool


def _heard(process: Any, pipe: Connection) -> Any:
    """What a process says; EOFError if it died, though children that it leaves behind
    may hold its pipe open.
    """
    while not pipe.poll(_LAST_POLL_SECONDS):
        if not process.is_alive() and not pipe.poll():
            raise EOFError
    try:
        return pipe.recv()
    # It died amid its answer.
    except OSError as error:
        raise EOFError from error


def _serve(pipe: Connection, threads: int) -> None:
    """What a process of the pool does: answer calls until nobody is there to make
    them.
    """
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
            except Exception as error:
                pipe.send(
                    (
                        False,
                        RuntimeError(
                            f"{answer[1]!r} cannot be sent from its process: {error}"
                        ),
                    )
                )


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
