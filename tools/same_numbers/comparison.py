"""Two folders of results, compared file by file."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from same_numbers.outcome import Outcome, Outcomes
from same_numbers.reading import kind_of, read
from same_numbers.values import Difference, count_of_numbers, differences, digest

STEPS = "steps"


@dataclass(frozen=True)
class ComparedFile:
    """A file, or a step, in both trees.

    Attributes:
        file: relative to the folder of results.
        kind: its format.
        before: a hash of what is compared; None where one of the trees has no such file.
        after: the same in the other tree.
        n_numbers: how many numbers were compared.
        differences: of its values; none where all are equal.
    """

    file: str
    kind: str
    before: str | None = None
    after: str | None = None
    n_numbers: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare_folders(before: Path, after: Path) -> list[ComparedFile]:
    """Compare all files of both folders, also those that only one of them has."""
    names = sorted(_names_of_files(before) | _names_of_files(after))
    return [_compare_file(name, before / name, after / name) for name in names]


def _names_of_files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files}


def _compare_file(name: str, before: Path, after: Path) -> ComparedFile:
    kind = kind_of(before)
    if not after.exists():
        return _only_in_one(name, kind, "is missing after")
    if not before.exists():
        return _only_in_one(name, kind, "is missing before")
    values_before = read(before)
    values_after = read(after)
    return ComparedFile(
        name,
        kind,
        digest(values_before),
        digest(values_after),
        count_of_numbers(values_before),
        differences(name, values_before, values_after),
    )


def _only_in_one(name: str, kind: str, message: str) -> ComparedFile:
    return ComparedFile(name, kind, differences=[Difference(name, "file", message)])


def compare_outcomes(before: Outcomes, after: Outcomes) -> list[ComparedFile]:
    """Compare how the steps ended; one that failed in both trees proves nothing."""
    compared = []
    for name in [*before, *(name for name in after if name not in before)]:
        failures = []
        for role, outcomes in (("before", before), ("after", after)):
            outcome = outcomes.get(name, Outcome(None, "it did not run"))
            if outcome.status != 0:
                failures.append(Difference(name, f"status {role}", outcome.error))
        compared.append(ComparedFile(name, STEPS, differences=failures))
    return compared


def table(compared: list[ComparedFile]) -> str:
    """Return a line for every kind, and one for every difference."""
    kinds = sorted({file.kind for file in compared}, key=lambda kind: kind.lower())
    n_equal = Counter(file.kind for file in compared if not file.differences)
    n_differ = Counter(file.kind for file in compared if file.differences)
    n_numbers: Counter[str] = Counter()
    for file in compared:
        n_numbers[file.kind] += file.n_numbers
    rows = [["kind", "equal", "differ", "numbers compared"]]
    for kind in kinds:
        counts = (n_equal[kind], n_differ[kind], n_numbers[kind])
        rows.append([kind, *(f"{count:,}" for count in counts)])
    totals = (n_equal.total(), n_differ.total(), n_numbers.total())
    rows.append(["all", *(f"{count:,}" for count in totals)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
        for name, *cells in rows
    ]
    reported = [str(difference) for file in compared for difference in file.differences]
    if reported:
        lines += ["", *reported]
    return "\n".join(lines)
