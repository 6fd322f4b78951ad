"""The bar of a whole command: one, which never goes back, with the time left of all."""

import re
from pathlib import Path

import pytest

from tl_coupling.cli.bars import WholeBar
from tl_coupling.cli.plain_console import PlainConsole


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("tl_coupling.cli.bars.time.monotonic", lambda: self.now)


LOADING = 20
STEP = 3
DRAWING = 60.0
N_STEPS = 10


def work_through(bar: WholeBar, clock: Clock) -> list[tuple[float, float, float]]:
    """Work as a report does, with two models.

    Returns at every step the time, the share of the bar, and the time left that it says.
    """
    states: list[tuple[float, float, float]] = []

    def note() -> None:
        left = bar.seconds_left()
        if left is not None:
            states.append((clock.now, bar.progress.tasks[0].percentage, left))

    with bar:
        for model in ("a", "b"):
            with bar.stage(f"loading {model} …"):
                clock.now += LOADING
            note()
            for _ in bar.loop(f"{model}: measuring", range(N_STEPS)):
                note()
                clock.now += STEP
        with bar.stage("drawing …"):
            for _ in range(4):
                note()
                clock.now += DRAWING / 4
    note()
    assert len(bar.progress.tasks) == 1
    return states


@pytest.mark.parametrize("as_expected", [1.0, 0.5])
def test_the_time_left_is_that_of_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch, as_expected: float
) -> None:
    clock = Clock(monkeypatch)
    bar = WholeBar(PlainConsole(stderr=True), "report", 2, DRAWING * as_expected)
    states = work_through(bar, clock)
    shares = [share for _, share, _ in states]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    end = clock.now
    assert end == 100 + 2 * (LOADING + N_STEPS * STEP) + DRAWING
    for now, _, left in states:
        # What drawing takes less than it is expected to take is said until it ends.
        missing = DRAWING * (1 - as_expected)
        if now <= end - DRAWING:
            assert left == pytest.approx(end - now - missing)
    assert states[-1][2] == 0


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    # Steps are made as long as those of the model for which stages are counted.
    monkeypatch.setattr("tl_coupling.cli.bars._SECONDS_PER_STEP", STEP)
    work_through(WholeBar(PlainConsole(stderr=True), "report", 2, DRAWING), clock)
    # 20 steps of measuring, 7 of loading again, 20 of drawing.
    assert capsys.readouterr().err.splitlines() == [
        "report: 2 %, 0:00:23, about 0:02:17 left",
        "report: 36 %, 0:01:10, about 0:01:30 left",
        "report: 57 %, 0:01:40, about 0:01:00 left",
        "report: 100 %, 0:02:40",
    ]


def test_too_little_says_nothing_of_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of 100 steps ends after a minute, in which 20 steps' work was done."""
    clock = Clock(monkeypatch)
    bar = WholeBar(PlainConsole(stderr=True), "report", 1, 0.0)
    with bar:
        for step in bar.loop("a", range(100)):
            if step == 0:
                clock.now += 60
            elif step >= 20:
                clock.now += 3
    assert capsys.readouterr().err.splitlines()[:3] == [
        "report: 1 %, 0:01:00",
        "report: 30 %, 0:01:30, about 0:03:30 left",
        "report: 40 %, 0:02:00, about 0:03:00 left",
    ]


def test_what_is_done_soon_leaves_a_log_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with WholeBar(PlainConsole(stderr=True), "report", 1, 5.0) as bar:
        for _ in bar.loop("a", range(3)):
            clock.now += 1
    assert not capsys.readouterr().err


def test_an_error_does_not_end_at_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    bar = WholeBar(PlainConsole(stderr=True), "report", 1, 0.0)

    def fail_after_two_of_four() -> None:
        with bar:
            for step in bar.loop("a", range(4)):
                clock.now += 1
                if step == 2:
                    raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match=r"^failed$"):
        fail_after_two_of_four()
    assert bar.progress.tasks[0].percentage == 50


def test_a_report_shows_one_bar_which_ends_at_all_of_it(
    call, folder_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A terminal, whose frames are read: a text, a bar, a share, and the time left.
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = {"prompt": "w3 w14", "k": 4, "label": "tiny", "no_untrained": True}
    shown = call("report", model=folder_model, **options, out=tmp_path / "a.html").err
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    frames = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    pattern = (
        r"(loading \S+ …|\S+: measuring|drawing …|report) [━╸╺]+ +(?:(\d+)% +)?(\S+)"
    )
    states = [re.fullmatch(pattern, frame.strip()) for frame in frames]
    assert all(states), frames
    # There is no share before it is known how much there is to do.
    shares = [int(state[2] or 0) for state in states]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert states[-1][3] == "0:00:00"
