"""Prompts of a unit outlive an interrupt: a rerun measures the others alone, and gives
what an undisturbed run gives.
"""

from pathlib import Path

import pytest
import xarray

import tl_coupling as tlc
from tl_coupling.studies.surveys import Settings, Survey

TEXTS = ["w3 w14 w15 w92", "w5 w6 w7", "w9 w2 w6 w5 w35", "w8 w1"]
SETTINGS = Settings(k=(2, 4), n_singular_values=6)


class Counted:
    """Counts the prompts that are measured; at one of them it is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        self.interrupted_at = 0
        original = tlc.comparisons.depth_coupling_by_orientation

        def depth_coupling_by_orientation(
            trace: tlc.Trace, *args: object, **options: object
        ) -> object:
            self.measured.append(trace.n_pos)
            if len(self.measured) == self.interrupted_at:
                raise KeyboardInterrupt
            return original(trace, *args, **options)

        monkeypatch.setattr(
            "tl_coupling.studies.surveys.measurements.depth_coupling_by_orientation",
            depth_coupling_by_orientation,
        )
        monkeypatch.setattr("tl_coupling.studies.surveys.kept._SECONDS_BETWEEN", 0)


@pytest.fixture
def counted(monkeypatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def survey(folder_model: Path) -> Survey:
    return Survey({"model": folder_model}, TEXTS, settings=SETTINGS)


@pytest.fixture
def interrupted(survey: Survey, counted: Counted, tmp_path: Path) -> Path:
    """A folder of results whose run was interrupted at the third of four prompts."""
    counted.interrupted_at = 3
    with pytest.raises(KeyboardInterrupt, match=r"0 of 1 finished, and 2 prompts of"):
        tlc.run_survey(survey, tmp_path / "units")
    assert len(counted.measured) == 3
    counted.interrupted_at = 0
    counted.measured.clear()
    return tmp_path / "units"


def test_a_rerun_measures_the_rest_and_gives_the_same(
    survey, counted, interrupted, tmp_path
):
    data = tlc.run_survey(survey, interrupted)
    assert counted.measured == [5, 2]
    assert not list(interrupted.glob("*.prompts"))
    counted.measured.clear()
    undisturbed = tlc.run_survey(survey, tmp_path / "undisturbed")
    assert counted.measured == [4, 3, 5, 2]
    cost = ["seconds", "peak_memory"]
    xarray.testing.assert_identical(
        data.load().drop_vars(cost), undisturbed.load().drop_vars(cost)
    )
    names = {path.name for path in interrupted.iterdir()}
    assert names == {path.name for path in (tmp_path / "undisturbed").iterdir()}


def test_a_damaged_prompt_is_measured_again(survey, counted, interrupted):
    (kept,) = interrupted.glob("*.prompts")
    first = min(kept.glob("*.nc"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(bytes(content))
    tlc.run_survey(survey, interrupted)
    assert counted.measured == [4, 5, 2]


def test_prompts_of_other_settings_are_not_mixed_in(folder_model, counted, interrupted):
    other = Survey(
        {"model": folder_model}, TEXTS, settings=Settings(k=(3,), n_singular_values=6)
    )
    data = tlc.run_survey(other, interrupted)
    assert counted.measured == [4, 3, 5, 2]
    assert data["k"].values.tolist() == [3]
    assert not list(interrupted.glob("*.prompts"))


def test_quick_prompts_are_not_written(survey, counted, monkeypatch, tmp_path):
    """Writing takes longer than they do."""
    monkeypatch.setattr("tl_coupling.studies.surveys.kept._SECONDS_BETWEEN", 1e9)
    counted.interrupted_at = 3
    with pytest.raises(
        KeyboardInterrupt, match="keeps 0 of 1 finished; run the same again"
    ):
        tlc.run_survey(survey, tmp_path / "units")
    assert not list((tmp_path / "units").glob("*.prompts"))
