"""SIGKILL at any moment: of a run in one process, of a run in several, of their
workers.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from attack.child import DONE, LIMIT, Child
from attack.subject import Finished, Subject, finished

# In which two workers have started and done a part of the work.
_SECONDS_OF_WORKERS = 12.0


def kills(subject: Subject, rng: random.Random, n: int) -> Iterator[list[str]]:
    """Yield a run in one process, killed again and again until it is through."""
    folder, finished_before, n_done = subject.new_folder(), Finished(), 0
    while n_done < n:
        child = subject.start(folder)
        if child.wait(rng.uniform(0, subject.seconds)):
            # It was faster.
            folder, finished_before = subject.new_folder(), Finished()
            continue
        child.signal(signal.SIGKILL)
        child.wait(LIMIT)
        n_done += 1
        event = f"a kill in {folder.name}"
        faults = subject.faults(folder, finished_before, event)
        finished_before = finished(folder)
        if rng.random() < 0.3:
            faults += subject.completed(folder, event) + subject.faults(
                folder, finished_before, event
            )
            folder, finished_before = subject.new_folder(), Finished()
        yield faults


def kills_of_workers(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Yield a run in two processes: either it or one of these is killed, and none may
    be left.
    """
    for _ in range(n):
        folder = subject.new_folder()
        child = Child(lambda folder=folder: _run_in_processes(subject, folder))
        child.wait(rng.uniform(0, _SECONDS_OF_WORKERS))
        family = child.family()
        victim = rng.choice(family)
        event = (
            f"a kill of {'a run with workers' if victim == child.pid else 'a worker'} "
            f"in {folder.name}"
        )
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        faults = child.faults(
            event, (DONE, -signal.SIGKILL) if victim == child.pid else (DONE,)
        )
        faults += left_over(family, event)
        finished_before = finished(folder)
        faults += subject.faults(folder, finished_before, event)
        yield (
            faults
            + subject.completed(folder, event)
            + subject.faults(folder, finished_before, event)
        )


def left_over(pids: list[int], what: str) -> list[str]:
    """Return the processes that do not end within seconds."""
    deadline = time.monotonic() + 30
    while (
        running := [pid for pid in pids if _is_running(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"hang: process {pid} is left after {what}" for pid in running]


def _run_in_processes(subject: Subject, folder: Path) -> None:
    from tl_coupling.studies.surveys import process_pool

    with process_pool(2) as pool:
        subject.run(folder, executor=pool)


def _is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
