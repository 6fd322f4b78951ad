"""Tables that commands print."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from tl_coupling.comparisons import CouplingMap
from tl_coupling.results import RANDOM_SUBSPACES
from tl_coupling.statistics import Interval

if TYPE_CHECKING:
    import pandas

# Of names of components, steps, tokens.
_LONGEST_WORD = 14


def coupling_table(
    subject: str,
    caption: str,
    runs: Mapping[str, Mapping[str, CouplingMap]],
    ks: list[int],
    diagonal: bool = False,
    spreads: Mapping[str, Mapping[int, float]] | None = None,
    intervals: Mapping[str, Mapping[int, Interval]] | None = None,
) -> Table:
    """Return a table of the mean coupling of every run's maps, beside the null.

    Args:
        subject: what the title says after the name of the model.
        runs: maps by run and name; the names are the same in all runs.
        ks: a row for each.
        diagonal: whether pairs of a layer with itself count.
        spreads: standard deviation over prompts by run and k, if there are several.
        intervals: of the mean over prompts, where there are spreads.
    """
    rows = []
    first_run = next(iter(runs.values()))
    for name, first_map in first_run.items():
        for k in ks:
            cells = []
            for run, maps in runs.items():
                mean = maps[name].mean(k, off_diagonal=not diagonal)
                spread = f" ± {spreads[run][k]:.3f}" if spreads else ""
                if spreads and intervals:
                    low, high = intervals[run][k]
                    spread += f" [{low:.3f}, {high:.3f}]"
                cells.append(f"{mean:.3f}{spread}")
            # The null depends on k alone: one column stands for all runs.
            null = first_map.null(k, off_diagonal=not diagonal)
            name_cell = name if k == ks[0] else ""
            rows.append([name_cell, k, *cells, f"{null:.3f}"])
    title = f"{first_map.provenance['model']}: {subject}"
    numbers = ["k", *runs, "null"]
    caption = f"{caption}\nnull: {RANDOM_SUBSPACES}"
    return table_of(title, ["map"], numbers, rows, caption)


def choices_table(title: str, rows: "pandas.DataFrame") -> Table:
    """Return a table of every choice from rows of `measure_table` for one model.

    Each checkpoint, or run, has a column for its mean and one for its null.
    """
    keys = ["measure", "orientation", "pairs", "k"]
    tables_by_run = {
        run: table.set_index(keys)
        for run, table in rows.groupby("checkpoint", sort=False)
    }
    first_run = next(iter(tables_by_run.values()))
    # Rows are sorted by k within a choice.
    smallest_k = first_run.index[0][-1]
    cells = []
    for choice in first_run.index:
        *names, k = choice
        # Only the first row of each choice says what it is.
        row = names if k == smallest_k else ["", "", ""]
        row.append(k)
        for table in tables_by_run.values():
            row.append(f"{table.loc[choice, 'mean']:.3f}")
            row.append(f"{table.loc[choice, 'null']:.3f}")
        cells.append(row)
    numbers: list[object] = ["k"]
    for run in tables_by_run:
        numbers += [run, "null"]
    caption = (
        "means over pairs of layers, different ones or all, and over prompts\n"
        f"null: {RANDOM_SUBSPACES}"
    )
    return table_of(title, keys[:3], numbers, cells, caption)


def table_of(
    title: str,
    names: Iterable[str],
    numbers: Iterable[object],
    rows: Iterable[Iterable[object]],
    caption: str,
) -> Table:
    """Return a table with columns of names, on the left, and of numbers."""
    names = list(names)
    # Training steps are numbers.
    headings = [*names, *map(str, numbers)]
    cells = [list(map(str, row)) for row in rows]
    table = Table(title=title, caption=caption)
    for i, heading in enumerate(headings):
        words = " ".join([heading, *(row[i] for row in cells)]).split()
        table.add_column(
            heading,
            justify="left" if i < len(names) else "right",
            # Folded and not cut off: what is read must be whole, in a narrow terminal
            # too. Between words, as long as these are not as long as paths are.
            overflow="fold",
            min_width=min(_LONGEST_WORD, max(map(len, words), default=0)),
        )
    for row in cells:
        table.add_row(*row)
    return table


def interval_text(low: float, high: float, digits: str) -> str:
    """Return an interval, and a dash where there is none (NaN), or for that of something
    with itself.

    >>> interval_text(-0.5, 1, ".2f"), interval_text(0, 0, ".2f")
    ('-0.50 to +1.00', '–')
    """
    if math.isnan(low) or low == high == 0:
        return "–"
    return f"{low:+{digits}} to {high:+{digits}}"


def plural(n: int, noun: str) -> str:
    """Return a number with its noun: "1 prompt", "2 prompts"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
