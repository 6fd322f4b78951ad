"""A process that does one piece of work of the library, and what became of it."""

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Work that takes no more than seconds; beyond this it hangs.
LIMIT = 120.0
DONE, BUG, REFUSED, INTERRUPTED = 0, 1, 2, 130


class Child:
    """A fork of this process at work: no import again, so that an attack costs as much
    as the work alone.

    Its exit status is 0, 2 with one line (what users are told), 130 with one line (an
    interrupt), or 1: a bug.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._output.close)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._work(work)
        self.status: int | None = None

    def _work(self, work: Callable[[], object]) -> None:
        os.setsid()
        for stream in (1, 2):
            os.dup2(self._output.fileno(), stream)
        # pytest's would keep what is printed.
        sys.stdout, sys.stderr = (
            os.fdopen(n, "w", errors="backslashreplace", closefd=False) for n in (1, 2)
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # What users would read beside the error.
        warnings.simplefilter("ignore")
        status = DONE
        try:
            work()
        except KeyboardInterrupt as error:
            os.write(2, f"{error}\n".encode())
            status = INTERRUPTED
        except (ValueError, TypeError, OSError) as error:
            os.write(2, f"{error}\n".encode(errors="backslashreplace"))
            # Python's own have no argument in backquotes.
            status = (
                BUG
                if isinstance(error, TypeError) and "`" not in str(error)
                else REFUSED
            )
        except SystemExit as error:
            status = (
                DONE
                if error.code is None
                else error.code
                if isinstance(error.code, int)
                else BUG
            )
        except BaseException:
            traceback.print_exc()
            status = BUG
        finally:
            # On a full disk; what follows would be the parent's work, and its cleaning
            # up.
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        deadline = time.monotonic() + seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif (left := deadline - time.monotonic()) <= 0:
                return False
            else:
                time.sleep(min(0.002, left))
        return True

    def signal(self, number: int) -> None:
        """Send a signal, if it is still there."""
        if self.status is None:
            os.kill(self.pid, number)

    def family(self) -> list[int]:
        """Return it and the processes that it started."""
        found = [self.pid]
        for pid in found:
            try:
                found += map(
                    int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                )
            except OSError:
                continue
        return found

    def faults(self, what: str, expected: tuple[int, ...] = (DONE,)) -> list[str]:
        """Return what is wrong with how it ended: a hang, a traceback, another status,
        more than a line of error.
        """
        if not self.wait(LIMIT):
            self.signal(signal.SIGKILL)
            self.wait(LIMIT)
            return [f"hang: {what}"]
        output = self.said()
        if "AssertionError: wrong value" in output:
            return [f"wrong value: {what}"]
        if "Traceback" in output or self.status == BUG:
            return [f"traceback: {what}: {output[-1500:]}"]
        if self.status not in expected:
            return [f"status {self.status}: {what}: {output[-300:]}"]
        if (
            self.status in (REFUSED, INTERRUPTED)
            and len(output.strip().splitlines()) > 1
        ):
            return [f"more than a line: {what}: {output[-300:]}"]
        return []

    def said(self) -> str:
        """Return what it has printed so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def done(
    work: Callable[[], Any], what: str, expected: tuple[int, ...] = (DONE,)
) -> list[str]:
    """Return the faults of a piece of work that nobody disturbs."""
    return Child(work).faults(what, expected)
