"""A caller's progress bar sees the loop and cannot change it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tqdm import tqdm
from tqdm.notebook import tqdm as tqdm_of_notebooks

import tl_coupling as tlc
from tl_coupling.progress import JoinedLoops, with_progress

Wraps = Callable[[Any], Any]


def counted(items: Any) -> Iterator[Any]:
    """As bars do that first ask how many there are, and do not run to the loop's own
    end.
    """
    iterator = iter(items)
    for _ in range(len(items)):
        yield next(iterator)


RIGHT: dict[str, Wraps] = {
    "tqdm": lambda items: tqdm(items, disable=True),
    "a list": list,
    "a generator": lambda items: (item for item in items),
    "the loop": lambda items: items,
}
WRONG: dict[str, tuple[Wraps, str]] = {
    "less": (lambda items: list(items)[:1], "got 1 and no more"),
    "less, lazily": (
        lambda items: (item for item, _ in zip(items, range(1), strict=False)),
        "got 1 and no more",
    ),
    "none": (lambda items: [], "got 0 and no more"),
    "more": (lambda items: [*items, 7], "got another after 3"),
    "twice": (
        lambda items: [item for item in items for _ in range(2)],
        "got another after 1",
    ),
    "backwards": (lambda items: list(items)[::-1], "got another after 0"),
    "numbers": (lambda items: (object() for _ in items), "got another after 0"),
}


def loops() -> list[Iterable[list[int]]]:
    items = [[0], [1], [2]]
    return [items, iter(items)]


@pytest.mark.parametrize("progress", RIGHT.values(), ids=RIGHT)
def test_a_bar_yields_the_items(progress: Wraps) -> None:
    for items in loops():
        assert list(with_progress(items, progress, "items")) == [[0], [1], [2]]


def test_a_bar_may_count_first_and_look_twice() -> None:
    assert list(with_progress(range(3), counted, "items")) == [0, 1, 2]
    assert list(
        with_progress([5, 6], lambda items: [list(items), list(items)][1], "items")
    ) == [5, 6]


@pytest.mark.parametrize(("progress", "message"), WRONG.values(), ids=WRONG)
def test_another_loop_is_refused(progress: Wraps, message: str) -> None:
    demand = (
        "`progress` must yield each item of the loop that it wraps once and in order, "
        "as `tqdm.tqdm` does"
    )
    for items in loops():
        with pytest.raises(ValueError, match=f"^{demand}, {message}$"):
            list(with_progress(items, progress, "items"))


@pytest.mark.parametrize(("returned", "kind"), [(None, "NoneType"), (3, "int")])
def test_a_function_that_wraps_nothing_is_refused(returned: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"got a function that returns {kind}$"):
        list(with_progress([1], lambda _: returned, "items"))


def another(trace: tlc.Trace) -> tlc.Trace:
    return tlc.trace(trace.model, [5, 6, 7])


MEASURES: dict[str, Callable[..., Any]] = {
    "block_jacobians": lambda trace, **bar: tlc.block_jacobians(trace, **bar),
    "depth_coupling": lambda trace, **bar: tlc.depth_coupling(trace, k=2, **bar),
    "several prompts": lambda trace, **bar: tlc.mean_depth_coupling(
        [trace, another(trace)], k=2, **bar
    ),
    "self_coupling": lambda trace, **bar: tlc.self_coupling(trace, 0, 1, k=2, **bar),
    "linearisation": tlc.trajectories.linearisation,
    "perturbation": lambda trace, **bar: tlc.trajectories.perturbation(
        trace, (1.0,), n_samples=2, **bar
    ),
    "gradient_prediction": lambda trace, **bar: tlc.trajectories.gradient_prediction(
        trace, torch.ones(trace.d_model), **bar
    ),
    "influence": lambda trace, **bar: tlc.cross_token_influence(trace, **bar),
    "portrait of tokens": lambda trace, **bar: tlc.portraits.token_portrait(
        trace, k=2, **bar
    ),
    "portrait": lambda trace, **bar: tlc.portrait(trace, k=(2,), **bar),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
@pytest.mark.parametrize("wrong", ["less", "more", "backwards"])
def test_no_measure_is_of_a_part_of_its_loop(
    tiny_trace: tlc.Trace, measure: Callable[..., Any], wrong: str
) -> None:
    progress, _ = WRONG[wrong]
    with pytest.raises(ValueError, match="`progress` must yield each item of the loop"):
        measure(tiny_trace, progress=progress)


class Clock:
    """A clock that goes on by so many seconds for each item of a loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("tl_coupling.progress.time.monotonic", lambda: self.now)

    def slow(self, items: Iterable[int], seconds: float) -> None:
        for _ in items:
            self.now += seconds


def test_a_log_gets_a_line_after_ten_seconds_and_then_every_thirty(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    clock.slow(with_progress(range(20), True, "layers"), 4)
    assert capsys.readouterr().err.splitlines() == [
        "layers: 3 of 20, 0:00:12, about 0:01:08 left",
        "layers: 11 of 20, 0:00:44, about 0:00:36 left",
        "layers: 19 of 20, 0:01:16, about 0:00:04 left",
    ]


def test_how_many_there_are_need_not_be_known(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    clock.slow(with_progress(iter(range(4)), True, "prompts"), 11)
    lines = ["prompts: 1 done, 0:00:11"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("progress", [None, False])
def test_a_log_of_a_library_call_stays_empty(progress, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    clock.slow(with_progress(range(20), progress, "layers"), 40)
    assert not capsys.readouterr().err


def test_short_loops_say_nothing(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    clock.slow(with_progress(range(20), True, "layers"), 0.4)
    assert not capsys.readouterr().err


class Recorded:
    """A caller's bar that notes each loop it is given, and how far it has gone."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.n_done = 0
        self.ended = False

    def __call__(self, items: Any) -> Iterator[Any]:
        self.lengths.append(len(items))
        for item in items:
            yield item
            self.n_done += 1
        self.ended = True


def run_through(items: Iterable[int], progress: Any, bar: Recorded) -> list[int]:
    """Return how far the bar was before each item of a nested loop, and after all."""
    positions = [bar.n_done for _ in with_progress(items, progress, "nested")]
    return [*positions, bar.n_done]


def test_nested_loops_go_on_in_one_bar_in_proportion_to_their_steps() -> None:
    bar = Recorded()
    with JoinedLoops({"a": [6, 4], "b": [10]}, bar, "all") as loops:
        part = loops.part("a")
        assert run_through(range(3), part, bar) == [0, 2, 4, 6]
        assert run_through(range(2), part, bar) == [6, 8, 10]
        # More items than steps, and none.
        assert run_through(range(20), loops.part("b"), bar)[::4] == [
            10,
            12,
            14,
            16,
            18,
            20,
        ]
    assert bar.lengths == [20]
    assert bar.ended


def test_a_nested_loop_whose_length_is_not_known_goes_on_at_its_end() -> None:
    bar = Recorded()
    with JoinedLoops({"a": [6], "b": [2]}, bar, "all") as loops:
        assert run_through(iter(range(3)), loops.part("a"), bar) == [0, 0, 0, 6]


def test_loops_that_are_left_out_or_not_foreseen_leave_no_gap() -> None:
    bar = Recorded()
    with JoinedLoops({"a": [5], "b": [5], "c": [5], "d": [5]}, bar, "all") as loops:
        # `a` did not run, nor did `d`.
        assert run_through(range(5), loops.part("b"), bar)[0] == 5
        part = loops.part("c")
        assert run_through(range(1), part, bar) == [10, 15]
        assert run_through(range(3), part, bar) == [15] * 4
    assert bar.n_done == 20
    assert bar.ended


def test_the_bar_of_nested_loops_goes_away_when_one_fails(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tl_coupling.progress.tqdm", lambda items, **how: tqdm(items))

    def fail_after_two_of_four() -> None:
        with JoinedLoops({"a": [4]}, None, "all") as loops:
            for item in with_progress(range(4), loops.part("a"), "nested"):
                if item == 2:
                    raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match=r"^failed$"):
        fail_after_two_of_four()
    assert not tqdm._instances
    assert "2/4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "is_off"), [("1", True), ("0", False), (None, False)]
)
def test_bars_in_notebooks_are_off_where_those_of_tqdm_are(
    value: str | None, is_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tqdm's bars in notebooks do not look at the variable, unlike those in terminals."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("TQDM_DISABLE", value)
    monkeypatch.setattr("tl_coupling.progress.is_watched", lambda: True)
    monkeypatch.setattr("tl_coupling.progress.tqdm", tqdm_of_notebooks)
    bar: Any = with_progress([1, 2, 3], None, "items")
    assert bar.disable == is_off
    assert list(bar) == [1, 2, 3]
