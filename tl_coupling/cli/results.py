"""What the commands write and print beside the results themselves: pictures, a summary, a table."""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tl_coupling.comparisons import CouplingMap, MeanCouplingMap
from tl_coupling.files import write_atomically


def write_pictures(folder: Path, pictures: Mapping[str, Callable[[], Any]]) -> list[Path]:
    """Draw every picture into the file of its name; one that cannot be drawn is left out, with a warning.

    The results are there by now, and a picture must not cost them.
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
    """`summary.json`; undefined values are `null`, because JSON has no NaN."""
    text = json.dumps(_defined(summary), indent=1, allow_nan=False)
    return write_atomically(folder / "summary.json", lambda path: path.write_text(text))


def coupling_table(what: str, caption: str, runs: Mapping[str, Mapping[str, CouplingMap]], ks: list[int]) -> Table:
    """Mean coupling (and its spread over prompts) of every run's maps, which have the same names, beside the null."""
    trained = runs["trained"]
    model = next(iter(trained.values())).provenance["model"]
    table = Table("map", title=f"{model}: {what}", caption=f"{caption}\nnull: random subspaces")
    for heading in ("k", *runs, "null"):
        table.add_column(heading, justify="right")
    for name, result in trained.items():
        for k in ks:
            cells = []
            for one in (maps[name] for maps in runs.values()):
                spread = f" ± {one.spread_of_mean(k):.3f}" if isinstance(one, MeanCouplingMap) else ""
                cells.append(f"{one.mean(k):.3f}{spread}")
            words = name if k == ks[0] else ""
            table.add_row(words, str(k), *cells, f"{result.null(k):.3f}", end_section=k == ks[-1])
    return table


def show(written: list[Path], table: Table | None = None) -> None:
    """Print a table, if there is one, and where the files are."""
    console = Console()
    if table is not None:
        console.print(table)
    console.print(f"wrote {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def with_suffix(name: str, run: str) -> str:
    """A result's file name, with a suffix for any run but the trained model's."""
    return name if run == "trained" else f"{name}-{run}"


def _defined(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _defined(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
