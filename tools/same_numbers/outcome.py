"""How a step of the scenario ended."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        status: its exit status; None if it did not run.
        error: the last line of its errors, where the status is not 0.
    """

    status: int | None = 0
    error: str = ""


# By name of the step.
Outcomes = Mapping[str, Outcome]


def write_outcomes(folder: Path, outcomes: Outcomes) -> None:
    """Write them into a folder of results."""
    fields = {name: asdict(outcome) for name, outcome in outcomes.items()}
    (folder / FILE).write_text(json.dumps(fields, indent=1), encoding="utf-8")


def take_outcomes(folder: Path) -> dict[str, Outcome]:
    """Read what was written into a folder of results, and remove it from them."""
    file = folder / FILE
    if not file.exists():
        return {}
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return {name: Outcome(**outcome) for name, outcome in fields.items()}
