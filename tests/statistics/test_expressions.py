"""Expressions of columns: what is allowed means what pandas makes of it; nothing else
is even begun.
"""

import time
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_coupling.statistics.expressions import evaluate
from tl_coupling.statistics.fits import subset_fits
from tl_coupling.studies.generalization import linear_fit

TABLE = pandas.DataFrame(
    {
        "coupling": [0.31, 0.45, 0.28, np.nan, 0.62, 0.4],
        "n_layers": [6, 12, 24, 12, 32, 48],
        "score": [31.5, 44.0, 39.2, 50.1, np.nan, 61.0],
        "family": ["llama", "gpt2", "llama", None, "opt", "gpt2"],
        "chat": [True, False, False, True, True, False],
        "d model": [64, 128, 64, 256, 512, 64],
    }
)


# Columns stand in every operation: pandas computes with constants alone as Python does,
# which raises on 1 / 0.
columns = st.sampled_from(["coupling", "n_layers", "score", "`d model`"])
constants = st.sampled_from(["0", "1", "2", "3.5", "0.4", "1e3", "64"])
# Not -0: for pandas it is the integer 0.
signed = (
    st.tuples(st.sampled_from(["", "-", "+"]), constants)
    .map("".join)
    .filter(lambda text: text != "-0")
)


def numeric(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(
            inner, st.sampled_from(["+", "-", "*", "/"]), st.one_of(inner, signed)
        ).map(" ".join),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(
            "({0[0]}{0[1]}{0[2]})".format
        ),
        st.tuples(columns, st.sampled_from(["2", "3", "0.5", "1"])).map(
            "{0[0]} ** {0[1]}".format
        ),
        st.tuples(st.sampled_from(["log", "log10", "sqrt", "exp", "abs"]), columns).map(
            "{0[0]}({0[1]})".format
        ),
        inner.map("-({})".format),
    )


numbers = st.recursive(columns, numeric, max_leaves=6)
comparisons = st.one_of(
    st.tuples(
        numbers,
        st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
        st.one_of(numbers, signed),
    ).map(" ".join),
    st.tuples(signed, numbers, numbers).map("{0[0]} < {0[1]} <= {0[2]}".format),
    st.tuples(
        columns,
        st.sampled_from(["in", "not in"]),
        st.lists(constants, min_size=1, max_size=4),
    ).map(lambda t: f"{t[0]} {t[1]} [{', '.join(t[2])}]"),
    st.sampled_from(
        [
            "family == 'llama'",
            'family != "gpt2"',
            "family in ['llama', 'opt']",
            "family not in ('llama',)",
            "'gpt2' == family",
            "chat",
            "family == 'a & b | `c`'",
        ]
    ),
)


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    # Without parentheses on purpose: & and | bind like and and or.
    return st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or", "&", "|"]), inner).map(" ".join),
        inner.map("not ({})".format),
        inner.map("~({})".format),
    )


# Columns count as floats: -0 is another divisor than 0, which integers do not tell
# apart.
FLOATS = TABLE.astype({name: float for name in TABLE.select_dtypes("int")})


@settings(max_examples=200)
@given(numbers)
def test_numbers_are_what_pandas_makes_of_them(expression: str) -> None:
    expected = FLOATS.eval(expression, engine="python")
    np.testing.assert_allclose(
        evaluate(TABLE, expression), expected.to_numpy(float), rtol=1e-12
    )


@settings(max_examples=200)
@given(st.recursive(comparisons, joined, max_leaves=5))
def test_queries_are_what_pandas_makes_of_them(expression: str) -> None:
    expected = FLOATS.eval(expression, engine="python")
    value = evaluate(TABLE, expression)
    assert value.dtype == bool
    np.testing.assert_array_equal(value, expected.to_numpy(bool))


def test_what_pandas_does_not_know_or_gets_wrong() -> None:
    np.testing.assert_allclose(
        evaluate(TABLE, "log2(n_layers)"), np.log2(TABLE["n_layers"])
    )
    # 64-bit integers overflow in silence.
    assert evaluate(TABLE, "`d model` ** 12")[4] == pytest.approx(512.0**12)
    assert evaluate(TABLE, "n_layers ** -1").tolist() == pytest.approx(
        (1 / TABLE["n_layers"]).tolist()
    )
    assert evaluate(TABLE, "chat * n_layers").tolist() == [6, 0, 0, 12, 32, 0]
    assert evaluate(TABLE, "n_layers ** (1 / 3)").tolist() == pytest.approx(
        np.cbrt(TABLE["n_layers"]).tolist()
    )


def test_columns_of_every_kind() -> None:
    table = pandas.DataFrame(
        {
            "checkpoint": [1000, "main", 1000, None],
            "known": pandas.array([1, None, 3, 4], dtype="Int64"),
            "kind": pandas.Categorical(["a", "b", None, "a"]),
            "maybe": pandas.array([True, None, False, True], dtype="boolean"),
            "objects": np.array([1, 2, 3, 4], dtype=object),
        },
        index=[7, 7, 8, 9],
    )
    assert evaluate(table, "checkpoint == 1000").tolist() == [True, False, True, False]
    assert evaluate(table, "checkpoint in ['main', 1000]").tolist() == [
        True,
        True,
        True,
        False,
    ]
    assert evaluate(table, "known > 2").tolist() == [False, False, True, True]
    assert evaluate(table, "kind == 'a'").tolist() == [True, False, False, True]
    assert evaluate(table, "maybe == True").tolist() == [True, False, False, True]
    assert evaluate(table, "objects + 1").tolist() == [2, 3, 4, 5]


NOT_ALLOWED = "is not allowed; allowed are columns"
ATTACKS = [
    ("score.__class__", NOT_ALLOWED),
    ("score.sum.__globals__['os'].system('touch {mark}')", NOT_ALLOWED),
    (
        "family.__class__.sum.__globals__['__builtins__']['open']('{mark}', 'w')",
        NOT_ALLOWED,
    ),
    ("score.to_csv('{mark}')", NOT_ALLOWED),
    ("__import__('os').system('touch {mark}')", NOT_ALLOWED),
    ("open('{mark}', 'w')", NOT_ALLOWED),
    ("log.__class__", NOT_ALLOWED),
    ("log(score, out=score)", NOT_ALLOWED),
    ("log(score, score)", NOT_ALLOWED),
    ("log(*score)", NOT_ALLOWED),
    ("log(**score)", NOT_ALLOWED),
    ("(log)(log)(1)", NOT_ALLOWED),
    ("sin(score)", NOT_ALLOWED),
    ("__class__", "the columns are coupling"),
    ("__builtins__ + 1", "there is no column '__builtins__'"),
    ("score[0]", NOT_ALLOWED),
    ("score[score > 1]", NOT_ALLOWED),
    ("(lambda: 1)()", NOT_ALLOWED),
    ("lambda: score", NOT_ALLOWED),
    ("f'{score.__class__}' == family", NOT_ALLOWED),
    ("[x for x in score]", NOT_ALLOWED),
    ("{x: 1 for x in score}", NOT_ALLOWED),
    ("(x for x in score)", NOT_ALLOWED),
    ("(score := 1)", NOT_ALLOWED),
    ("score if chat else 1", NOT_ALLOWED),
    ("score is 1", NOT_ALLOWED),
    ("score // 2", NOT_ALLOWED),
    ("score % 2", NOT_ALLOWED),
    ("score @ score", NOT_ALLOWED),
    ("1 << n_layers", NOT_ALLOWED),
    ("n_layers ^ 1", NOT_ALLOWED),
    ("b'1'", NOT_ALLOWED),
    ("1j", NOT_ALLOWED),
    ("...", NOT_ALLOWED),
    ("None", "the columns are coupling"),
    ("[1, 2]", NOT_ALLOWED),
    ("await score", NOT_ALLOWED),
    ("yield", "the columns are coupling"),
    ("@score", "cannot be read"),
    ("score = 1", "cannot be read"),
    ("score; score", "cannot be read"),
    ("import os", "cannot be read"),
    ("", "cannot be read"),
    ("score\0", "cannot be read"),
    ("\0", "cannot be read"),
    ("score == '\ud800", "cannot be read"),
    ("`d model", "cannot be read"),
    ("`score.__class__`", "there is no column 'score.__class__'"),
    ("9**9**9**9", "must be one number, at most 100 in magnitude"),
    ("9**(9**9**9)", "must be one number, at most 100 in magnitude"),
    ("2 ** n_layers", "must be one number, at most 100 in magnitude"),
    ("score ** 1e9", "must be one number, at most 100 in magnitude"),
    ("1" + "0" * 400, "is too large"),
    ("9" * 5000, "at most 2000 characters, got 5000"),
    ("(" * 150 + "score" + ")" * 150, None),
    ("(" * 500 + "score" + ")" * 500, "cannot be read"),
    ("-" * 150 + "score", "nested more than 60 deep"),
    ("~" * 1900 + "chat", "no column or expression"),
    ("score" + " + score" * 200, "nested more than 60 deep"),
    ("log(" * 90 + "score" + ")" * 90, "nested more than 60 deep"),
    ("score" + " < score" * 240, None),
    ("'a' * 999999999", "needs numbers, got text"),
    ("family + 'a'", "needs numbers, got text"),
    ("family < 'b'", "needs numbers, got text"),
    ("log('a')", "needs numbers, got text"),
    ("score == 'a'", "compares text with numbers"),
    ("not score", "needs true or false on each side, got numbers"),
    ("score and chat", "needs true or false on each side, got numbers"),
    ("score > 1 and family", "needs true or false on each side, got text"),
    (
        "score in n_layers",
        "`in` must be followed by a list of numbers or texts, got n_layers",
    ),
    ("score in [n_layers]", "`in` must be followed by a list of numbers or texts"),
    ("score in 'abc'", "`in` must be followed by a list of numbers or texts"),
    ("score in [1] < 2", NOT_ALLOWED),
    ("score == [1]", NOT_ALLOWED),
]


@pytest.mark.parametrize(
    ("expression", "message"), ATTACKS, ids=[text[:30] for text, _ in ATTACKS]
)
def test_everything_else_is_one_line_at_once_and_nothing_happens(
    tmp_path: Path, expression: str, message: str | None
) -> None:
    mark = tmp_path / "mark"
    start = time.perf_counter()
    table_before = TABLE.copy(deep=True)
    text = expression.replace("{mark}", str(mark))
    if message is None:
        evaluate(TABLE, text)
    else:
        with pytest.raises(ValueError, match="no column or expression") as caught:
            evaluate(TABLE, text)
        assert message in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 500
        # What the terminal is told can be told to any terminal.
        str(caught.value).encode()
    assert time.perf_counter() - start < 2
    assert not mark.exists()
    pandas.testing.assert_frame_equal(TABLE, table_before)


def test_the_public_functions_read_text_no_other_way(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    table = TABLE.dropna().assign(**{"n": range(4), "y": [1.0, 3.0, 2.0, 5.0]})
    attack = f"n.to_csv('{mark}')"
    for call in (
        lambda: linear_fit(table, attack, "y"),
        lambda: linear_fit(table, "n", attack),
        lambda: linear_fit(table, "n", "y", controls=[attack]),
        lambda: subset_fits(table, "n", "y", subsets={"odd": attack}),
    ):
        with pytest.raises(ValueError, match="is not allowed; allowed are columns"):
            call()
    assert not mark.exists()
