"""What `tl_coupling` offers, and what it loads for that."""

import subprocess
import sys

import pytest

import tl_coupling as tlc


def test_every_name_that_is_listed_is_there() -> None:
    names = dir(tlc)
    assert {"depth_coupling", "portrait", "plot_coupling", "show_tokens", "html_report"} <= set(names)
    assert all(hasattr(tlc, name) for name in names)


@pytest.mark.parametrize("name", ["plot_nonsense", "nonsense"])
def test_a_name_that_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(tlc, name)


def test_drawing_is_loaded_only_to_draw() -> None:
    rooms = "plots", "interactive", "report"
    code = f"import sys, tl_coupling; print([room for room in {rooms} if f'tl_coupling.{{room}}' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
