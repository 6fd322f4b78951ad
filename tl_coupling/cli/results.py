"""What the commands write beside the results themselves: pictures and a summary."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tl_coupling.files import write_atomically


def write_pictures(folder: Path, pictures: Mapping[str, Callable[[], Any]]) -> list[Path]:
    """Draw every picture into the file of its name; one that cannot be drawn is left out, with a warning.

    By now the results are there, and worth more than a picture of them.
    """
    from tl_coupling.plots.labels import off_screen

    written = []
    for name, draw in pictures.items():
        try:
            with off_screen():
                drawn = draw()
        except ValueError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
            continue
        figure = getattr(drawn, "figure", drawn)
        written.append(write_atomically(folder / name, partial(figure.savefig, dpi=150)))
    return written


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """`summary.json`; a value that is undefined is `null`, which JSON knows and NaN it does not."""
    text = json.dumps(_defined(summary), indent=1, allow_nan=False)
    return write_atomically(folder / "summary.json", lambda path: path.write_text(text))


def show(written: list[Path], table: Table | None = None) -> None:
    """Print a table, if there is one, and where the files are."""
    console = Console()
    if table is not None:
        console.print(table)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def with_suffix(name: str, run: str) -> str:
    """A result's file name: the trained model's goes without a suffix."""
    return name if run == "trained" else f"{name}-{run}"


def _defined(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _defined(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
