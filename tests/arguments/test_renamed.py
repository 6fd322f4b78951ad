"""Earlier names of public functions."""

import pytest

import tl_coupling as tlc
from tl_coupling.arguments import renamed


def test_an_earlier_name_warns_at_the_callers_line_and_does_the_same() -> None:
    def double(x: int) -> int:
        return 2 * x

    twice = renamed(double, "numbers.twice")
    message = "`numbers.twice` is called `double` now: use that name"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        assert twice(3) == 6
    assert warned[0].filename == __file__


def test_an_earlier_name_of_a_checked_function(tiny_trace: tlc.Trace) -> None:
    with pytest.warns(DeprecationWarning, match="`layer_pair` now"):
        pair = tlc.comparisons.neighbours(tiny_trace, layer=0)
    assert pair == tlc.comparisons.layer_pair(tiny_trace, layer=0)
