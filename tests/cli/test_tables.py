"""Tables as a terminal shows them."""

import textwrap
from pathlib import Path

import pytest

BORDERS = "┏┡└┃│"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_title_and_caption_of_depth_are_as_wide_as_the_terminal(
    call, folder_model: Path, tmp_path: Path, monkeypatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = call(
        "depth",
        model=folder_model,
        label="tiny",
        prompt="w3 w14",
        k=[2, 4, 8],
        out=tmp_path,
    ).out
    above, _, below = shown.partition("┏")
    *table, last = [
        line for line in below.splitlines() if line.startswith(tuple(BORDERS))
    ]
    # The columns are narrow: words wrapped to them would take many lines.
    assert len(last) < 40 < columns
    title = "tiny: depth coupling 1 − m̃, mean over pairs of different layers"
    assert printed_lines(above) == textwrap.wrap(title, columns)
    caption = printed_lines(below.partition(f"{last}\n")[2].partition("wrote to")[0])
    size, *interval, null = caption
    assert size == "2 layers, 1 prompt"
    assert null == "null: random subspaces"
    # Filled as Python's own wrapping fills them.
    assert interval == textwrap.wrap(" ".join(interval), columns)
    assert interval[0].startswith("95 % of random subspaces: ")
    assert [f"(k = {k})" in " ".join(interval) for k in (2, 4, 8)] == [True] * 3
    assert len(table) == 5


def printed_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
