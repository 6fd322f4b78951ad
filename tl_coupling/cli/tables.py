"""Tables that commands print."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.styled import Styled
from rich.table import Table

from tl_coupling.results import RANDOM_SUBSPACES, ShortTable

if TYPE_CHECKING:
    import pandas

# The width that a column has at least for its longest word, in characters.
_LONGEST_WORD = 14


def choices_table(title: str, rows: "pandas.DataFrame") -> ShortTable:
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
    return ShortTable.of(title, keys[:3], numbers, cells, caption)


def printed(table: ShortTable) -> Group:
    """Return a short table as rich prints it.

    Its title and its caption are lines as wide as the terminal: those of rich's own
    tables are wrapped to the columns, which may be narrow.
    """
    shown = Table()
    for i, heading in enumerate(table.headings):
        words = " ".join([heading, *(row[i] for row in table.rows)]).split()
        shown.add_column(
            heading,
            justify="left" if i < len(table.names) else "right",
            # Folded and not cut off: what is read must be whole, in a narrow terminal
            # too. Between words, as long as these are not as long as paths are.
            overflow="fold",
            min_width=min(_LONGEST_WORD, max(map(len, words), default=0)),
        )
    for row in table.rows:
        shown.add_row(*row)
    parts: list[RenderableType] = [Styled(table.title, "table.title"), shown]
    if table.caption:
        parts.append(Styled(table.caption, "table.caption"))
    return Group(*parts)
