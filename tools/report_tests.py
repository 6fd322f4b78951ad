"""What runs of the tests say in the end, from the XML that pytest writes of each: counts
by version of TransformerLens and tier, the slowest tests, and what was skipped and why.

    python tools/report_tests.py out/tests/test-tl4.xml out/tests/test-tl3.xml
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

# Longer ones belong to the long tier.
SECONDS_OF_FAST_TEST = 5.0
N_SLOWEST = 10


class TestCase(NamedTuple):
    """One test of one run: how it ended, and why where it was skipped."""

    run: str
    name: str
    seconds: float
    outcome: str
    reason: str


def test_cases(path: Path) -> Iterator[TestCase]:
    """Yield the tests of one run, which is named as its file."""
    for element in ElementTree.parse(path).iter("testcase"):
        outcome, reason = "passed", ""
        for kind in ("skipped", "failure", "error"):
            if (child := element.find(kind)) is not None:
                outcome = {"failure": "failed", "error": "failed"}.get(kind, kind)
                reason = child.get("message", "")
        file = element.get("classname", "").replace(".", "/") + ".py"
        yield TestCase(
            run=path.stem,
            name=f"{file}::{element.get('name')}",
            seconds=float(element.get("time", 0)),
            outcome=outcome,
            reason=reason,
        )


def count_lines(cases: Iterable[TestCase]) -> Iterator[str]:
    """Yield a line for each run: how many tests passed, failed and were skipped."""
    counts: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for case in cases:
        counts.setdefault(case.run, Counter())[case.outcome] += 1
        seconds[case.run] += case.seconds
    yield f"{'':13} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"
    for run, of_run in counts.items():
        numbers = [of_run[outcome] for outcome in ("passed", "failed", "skipped")]
        columns = zip(numbers, (7, 7, 8), strict=True)
        row = " ".join(f"{number:>{width}}" for number, width in columns)
        yield f"{run:13} {row} {seconds[run]:8.0f}"


def slowest_lines(cases: Iterable[TestCase]) -> Iterator[str]:
    """Yield the slowest tests; then those of the fast tier that take too long for it."""
    by_time = sorted(cases, key=lambda case: -case.seconds)
    yield f"\nthe {N_SLOWEST} slowest:"
    for case in by_time[:N_SLOWEST]:
        yield f"{case.seconds:7.1f} s  {case.run}  {case.name}"
    too_long = [
        case
        for case in by_time
        if not case.run.startswith("test-long") and case.seconds > SECONDS_OF_FAST_TEST
    ]
    yield (
        f"\nin the fast tier, {len(too_long)} took more than "
        f"{SECONDS_OF_FAST_TEST:g} s and have no mark `long`:"
    )
    for case in too_long:
        yield f"{case.seconds:7.1f} s  {case.run}  {case.name}"


def skipped_lines(cases: Iterable[TestCase]) -> Iterator[str]:
    """Yield why tests were skipped, and how many for each reason."""
    reasons = Counter(
        (case.run, case.reason) for case in cases if case.outcome == "skipped"
    )
    yield f"\nskipped: {reasons.total()}"
    for (run, reason), number in reasons.most_common():
        yield f"{number:5}  {run}  {reason}"


def report(paths: Iterable[Path]) -> str:
    """Return the whole report on the runs that wrote these files."""
    cases = [case for path in paths for case in test_cases(path)]
    lines = [*count_lines(cases), *slowest_lines(cases), *skipped_lines(cases)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    print(report(parser.parse_args().files))


if __name__ == "__main__":
    main()
