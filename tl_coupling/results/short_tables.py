"""Short tables of results: what a command prints of them and a notebook shows."""

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

_MOST_ROWS = 10
# Numbers that a result says nothing else about are shown with so many digits.
_DIGITS = 4


@dataclass(frozen=True, repr=False)
class ShortTable:
    """A table to read, with its title and what a reader must know beside it.

    A notebook shows it, and `print` in a terminal; numbers are rounded: `to_dataframe`
    of the result has them whole.

    Attributes:
        title: the line above it.
        names: headings of the columns on the left, which hold words.
        numbers: headings of the other columns.
        rows: the cells of each row, as they are shown.
        caption: the lines below it.
    """

    title: str
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        names: Iterable[str],
        numbers: Iterable[object],
        rows: Iterable[Iterable[object]],
        caption: str = "",
    ) -> "ShortTable":
        """Return a table whose headings and cells are given as anything that has a text."""
        cells = tuple(tuple(map(str, row)) for row in rows)
        # Training steps are headings as well.
        return cls(title, tuple(names), tuple(map(str, numbers)), cells, caption)

    @classmethod
    def stacked(
        cls, tables: Mapping[str, "ShortTable"], heading: str = "run"
    ) -> "ShortTable":
        """Return tables of the same columns, one below the other.

        A column of their names comes first, with this heading; title and caption are
        those of the first table.
        """
        rows = []
        for name, table in tables.items():
            for place, row in enumerate(table.rows):
                # Only the first row of each table says which it is.
                rows.append((name if place == 0 else "", *row))
        first = next(iter(tables.values()))
        return replace(first, names=(heading, *first.names), rows=tuple(rows))

    @classmethod
    def beside(cls, tables: Mapping[str, "ShortTable"], heading: str) -> "ShortTable":
        """Return tables of the same rows as one, with a column for each in place of the
        one of this heading.

        The column is called as the table is; all else is that of the first table.
        """
        first = next(iter(tables.values()))
        place = first.headings.index(heading)
        rows = []
        for row_of_each in zip(*(table.rows for table in tables.values()), strict=True):
            cells = tuple(row[place] for row in row_of_each)
            row = row_of_each[0]
            rows.append((*row[:place], *cells, *row[place + 1 :]))
        number_place = place - len(first.names)
        before = first.numbers[:number_place]
        after = first.numbers[number_place + 1 :]
        return replace(first, numbers=(*before, *tables, *after), rows=tuple(rows))

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of all columns, from left to right."""
        return self.names + self.numbers

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        n_names = len(self.names)
        texts = []
        for line in lines:
            cells = [
                cell.ljust(width) if place < n_names else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            texts.append("  ".join(cells).rstrip())
        return "\n".join([self.title, *texts, *self.caption.splitlines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in self.headings)
        rows = "".join(f"<tr>{self._html_of(row)}</tr>" for row in self.rows)
        caption = html.escape(self.caption).replace("\n", "<br>")
        return (
            f"<p><b>{html.escape(self.title)}</b></p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<p><small>{caption}</small></p>"
        )

    def _html_of(self, row: tuple[str, ...]) -> str:
        n_names = len(self.names)
        # Notebooks put every cell on the right, which is for numbers.
        styles = [' style="text-align:left"'] * n_names + [""] * len(self.numbers)
        cells = [html.escape(cell).replace("\n", "<br>") for cell in row]
        return "".join(
            f"<td{style}>{cell}</td>" for style, cell in zip(styles, cells, strict=True)
        )


def first_rows(
    title: str,
    columns: Mapping[str, Iterable[object]],
    long_one: str = "to_dataframe()",
) -> ShortTable:
    """Return a short table of the first rows of a long one, which is given by column;
    the caption says where the long one is.
    """
    all_rows = list(zip(*columns.values(), strict=True))
    shown_rows = all_rows[:_MOST_ROWS]
    is_number = {
        name: all(isinstance(row[place], int | float) for row in shown_rows)
        for place, name in enumerate(columns)
    }
    names = [name for name in columns if not is_number[name]]
    numbers = [name for name in columns if is_number[name]]
    places = [list(columns).index(name) for name in (*names, *numbers)]
    cells = [[_cell(row[place]) for place in places] for row in shown_rows]
    caption = ""
    if len(all_rows) > _MOST_ROWS:
        caption = f"{_MOST_ROWS} of {len(all_rows)} rows: `{long_one}` has all"
    return ShortTable.of(title, names, numbers, cells, caption)


def interval_text(low: float, high: float, digits: str) -> str:
    """Return an interval, and a dash where there is none (NaN), or for that of something
    with itself.

    >>> interval_text(-0.5, 1.0, ".2f"), interval_text(0.0, 0.0, ".2f")
    ('-0.50 to +1.00', '–')
    """
    if math.isnan(low) or low == high == 0:
        return "–"
    return f"{low:+{digits}} to {high:+{digits}}"


def plural(n: int, noun: str) -> str:
    """Return a number with its noun: "1 prompt", "2 prompts"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _cell(value: object) -> str:
    is_fraction = isinstance(value, float)
    return f"{value:.{_DIGITS}g}" if is_fraction else str(value)
