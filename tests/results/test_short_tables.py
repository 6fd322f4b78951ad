"""Short tables: runs one below the other, and side by side; what long ones show."""

import pytest

from tl_coupling.results import ShortTable, interval_text
from tl_coupling.results.short_tables import first_rows


def table(*values: str, title: str = "model") -> ShortTable:
    rows = [(place, value, "7") for place, value in enumerate(values)]
    return ShortTable.of(title, ["layer"], ["mean", "null"], rows, "one\ntwo")


def test_tables_of_runs_stand_one_below_the_other() -> None:
    runs = {"trained": table("1", "2"), "untrained": table("3", "4", title="twin")}
    stacked = ShortTable.stacked(runs)
    assert stacked.title == "model"
    assert stacked.headings == ("run", "layer", "mean", "null")
    assert stacked.rows == (
        ("trained", "0", "1", "7"),
        ("", "1", "2", "7"),
        ("untrained", "0", "3", "7"),
        ("", "1", "4", "7"),
    )


def test_tables_of_runs_stand_side_by_side() -> None:
    runs = {"trained": table("1", "2"), "untrained": table("3", "4")}
    beside = ShortTable.beside(runs, "mean")
    assert beside.headings == ("layer", "trained", "untrained", "null")
    assert beside.rows == (("0", "1", "3", "7"), ("1", "2", "4", "7"))
    with pytest.raises(ValueError, match="zip"):
        ShortTable.beside({"trained": table("1"), "untrained": table("3", "4")}, "mean")


def test_a_table_is_printed_in_columns() -> None:
    assert str(table("1", "200")).splitlines() == [
        "model",
        "layer  mean  null",
        "0         1     7",
        "1       200     7",
        "one",
        "two",
    ]


def test_what_stands_in_a_cell_is_no_html() -> None:
    shown = ShortTable.of("a < b", ["<x>"], [], [["<b>\n&"]], "c > d")._repr_html_()
    assert "<th>&lt;x&gt;</th>" in shown
    assert ">&lt;b&gt;<br>&amp;</td>" in shown
    assert "a &lt; b" in shown
    assert "c &gt; d" in shown


def test_the_first_rows_of_a_long_table() -> None:
    columns = {"k": range(30), "name": ["head"] * 30, "value": [1 / 3] * 30}
    first = first_rows("title", columns)
    assert first.names == ("name",)
    assert first.numbers == ("k", "value")
    assert first.rows[9] == ("head", "9", "0.3333")
    assert len(first.rows) == 10
    assert "10 of 30 rows" in first.caption
    assert not first_rows("title", {"k": [1]}).caption


def test_an_interval_that_is_not_known_is_a_dash() -> None:
    assert interval_text(-0.5, 1.0, ".2f") == "-0.50 to +1.00"
    assert interval_text(float("nan"), 1.0, ".2f") == "–"
