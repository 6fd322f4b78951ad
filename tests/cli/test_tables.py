"""Tables as a terminal shows them."""

import textwrap
from pathlib import Path

import pytest

from tl_coupling.cli import console
from tl_coupling.cli.tables import printed
from tl_coupling.results import ShortTable

BORDERS = ("┏", "┃", "┡", "│", "└")


def wrapped(text: str, columns: int) -> list[str]:
    """Return the lines of a text as Python's own wrapping fills them."""
    return [
        line for given in text.splitlines() for line in textwrap.wrap(given, columns)
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_title_and_caption_of_depth_are_as_wide_as_the_terminal(
    call,
    folder_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    tables: list[ShortTable] = []

    def noted(table: ShortTable) -> object:
        tables.append(table)
        return printed(table)

    monkeypatch.setattr(console, "printed", noted)
    monkeypatch.setenv("COLUMNS", str(columns))
    options = {"label": "tiny", "prompt": "w3 w14", "k": [2, 4, 8]}
    shown = call("depth", model=folder_model, **options, out=tmp_path).out
    (table,) = tables
    lines = [line.rstrip() for line in shown.partition("wrote to")[0].splitlines()]
    rows = [line for line in lines if line.startswith(BORDERS)]
    # Words wrapped to the columns, which are narrow, would take many lines.
    assert len(rows[0]) < 40 < columns
    n_above = lines.index(rows[0])
    assert lines[:n_above] == wrapped(table.title, columns)
    # Of several lines, of which one is longer than the narrowest terminal.
    assert max(map(len, table.caption.splitlines())) > 60
    assert lines[n_above + len(rows) :] == wrapped(table.caption, columns)
