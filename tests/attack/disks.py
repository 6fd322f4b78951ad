"""Disks that fill: a run may write so many bytes and no more, and goes on when there is
room again.
"""

import random
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attack.child import DONE, REFUSED, Child
from attack.interrupts import command
from attack.subject import Finished, Subject, finished


def full_disks(subject: Subject, rng: random.Random, n: int) -> Iterator[list[str]]:
    """Of a survey and of commands; a small disk of its own where one can be made, else
    a limit on every file.
    """
    sizes = sorted(path.stat().st_size for path in subject.calm.iterdir())
    options = ["--model", str(subject.root / "a"), "--prompt", "w3 w14 w15", "--k", "2"]
    for i in range(n):
        folder = subject.new_folder()
        folder.mkdir()
        if i % 4 == 3:
            name = rng.choice(["depth", "trajectory", "report"])
            out = str(folder / ("page.html" if name == "report" else "out"))
            limit, arguments = (
                int(10 ** rng.uniform(1, 6)),
                [name, *options, "--out", out],
            )
            child = Child(
                lambda limit=limit, arguments=arguments: _limited(
                    limit, lambda: command(arguments)
                )
            )
            yield child.faults(
                f"a full disk under `{name}`", (DONE, REFUSED)
            ) + _halves(folder)
            continue
        event = f"a full disk under {folder.name}"
        with _small_disk(folder, rng.randrange(4_000, sum(sizes))) as is_small:
            # The limit is on one file: nothing fits, or records do, or all but the
            # largest result.
            limit = None if is_small else rng.randrange(10, sizes[-1])
            child = Child(
                lambda limit=limit, folder=folder: _limited(
                    limit, lambda: subject.run(folder)
                )
            )
            faults = child.faults(event, (DONE, REFUSED))
            if child.status == REFUSED and "is the disk full" not in child.said():
                faults.append(f"said {child.said()!r}: {event}")
            finished_before = finished(folder)
            faults += subject.faults(folder, Finished(), event) + _halves(folder)
            if is_small:
                subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
            faults += subject.completed(folder, event) + subject.faults(
                folder, finished_before, event
            )
        yield faults


def _limited(limit: int | None, work: Callable[[], object]) -> None:
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    work()


@contextmanager
def _small_disk(folder: Path, n_bytes: int) -> Iterator[bool]:
    """Provide a file system of that size in the folder, if this user may make one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", folder],
        capture_output=True,
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)


def _halves(folder: Path) -> list[str]:
    """Unfinished files that were left."""
    return [f"left behind: {path}" for path in folder.rglob(".*") if path.is_file()]
