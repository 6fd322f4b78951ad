"""Each architecture in a process of its own, forked after the imports: a crash or a
hang ends that one alone.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

from zoo.measure import DTYPES, Finding, measure
from zoo.registry import NOT_BUILT

# Of one architecture, all precisions together; the slowest takes twenty seconds on a
# free core.
TIME_LIMIT = 300.0
Row = dict[str, dict[str, Any]]


def measure_all(
    names: Iterable[str], jobs: int, own_modules: bool = False
) -> Iterator[tuple[str, Row]]:
    """`(name, {precision: finding})` of each architecture, in the order in which they
    finish; by HuggingFace's `own_modules`, or in a bridge.
    """
    # Forked: importing takes ten seconds, and an architecture two.
    context = multiprocessing.get_context("fork")
    waiting, running = list(names)[::-1], {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child, args=(name, sender, own_modules), daemon=True
                )
                process.start()
                sender.close()
                running[receiver] = (name, process, time.monotonic() + TIME_LIMIT, {})
            for receiver in wait(list(running), timeout=1.0):
                name, process, _, row = running[receiver]
                try:
                    precision, finding = receiver.recv()
                    row[precision] = finding
                except EOFError:
                    process.join()
                    del running[receiver]
                    yield (
                        name,
                        _filled(
                            row, f"the process ended with status {process.exitcode}"
                        ),
                    )
            for receiver, (name, process, deadline, row) in list(running.items()):
                if time.monotonic() > deadline:
                    process.kill()
                    process.join()
                    del running[receiver]
                    yield name, _filled(row, f"not done after {TIME_LIMIT:.0f} s")
    finally:
        for _, process, _, _ in running.values():
            process.kill()


def _child(name: str, sender: Connection, own_modules: bool) -> None:
    for precision in DTYPES:
        if name in NOT_BUILT:
            sender.send(
                (precision, asdict(Finding("not built", sentence=NOT_BUILT[name])))
            )
            continue
        # HookedTransformer prints.
        with redirect_stdout(None):
            finding = _guarded(lambda p=precision: measure(name, p, own_modules))
        sender.send((precision, asdict(finding)))


def _guarded(call: Callable[[], Finding]) -> Finding:
    """Measure, or say what could not be built: that is not tl_coupling's to answer for."""
    try:
        return call()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename.rpartition('/')[2]}:{at.lineno}"
        return Finding(
            "not built",
            sentence=f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:300]}",
        )


def _filled(row: Row, reason: str) -> Row:
    return {
        precision: row.get(precision) or asdict(Finding("unclear", sentence=reason))
        for precision in DTYPES
    }
