"""The control of the study of capacity: which models are annealed, and how they are
compared at one loss.
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

import capacity_annealed as annealed
from matched_losses import END

SMALL = (
    "--widths 16 32 --learning-rates 0.01 0.02 --steps 64 --n-layers 2 --seeds 2 "
    "--vocabulary 300 --n-ctx 16 --windows 4 --passages 1 --k 4 --warmup 2 --jobs 1 "
    "--width 16 --n-annealed 2 --shares 0.5 1.0"
)


@pytest.fixture
def constant(small_corpus) -> pandas.DataFrame:
    """What `capacity.py` writes: 40 steps to the bigram's loss, and more by the seed."""
    windows = annealed.windows_of(small_corpus.held_out_tokens, 16, 4)
    loss = annealed.counting_losses(small_corpus.tokens, windows, 300)["bigram"]
    rows = [
        {
            "run": f"run {seed}",
            "width": (16, 32)[seed // 4],
            "learning_rate": (0.01, 0.02)[seed // 2 % 2],
            "seed": seed,
            "size": size,
            "measure": "coupling",
            "mark": mark,
            "step": 40.0 + seed,
            "loss_held_out": loss,
            "value": 0.4 + seed / 100,
            "above_chance": 0.3 + seed / 100,
        }
        for seed in range(8)
        for size in ("K = 4", "K = d/8")
        for mark in ("bigram", END)
    ]
    return pandas.DataFrame(rows)


def arguments_of(small_text, tmp_path, more: str = ""):
    command = f"{SMALL} --text {small_text} --out {tmp_path} {more}".split()
    return command, annealed.arguments_of(command)


def test_models_are_trained_again_with_a_rate_that_ends_at_0(
    constant, small_corpus, small_text, tmp_path
):
    arguments = arguments_of(small_text, tmp_path)[1]
    runs = annealed.runs_of(arguments, constant, small_corpus)
    found = [(r.config.seed, r.config.steps, r.config.learning_rate) for r in runs]
    # Half and all of 40 + seed steps; width 16 has the seeds 0 to 3.
    assert found == [
        (0, 20, 0.01),
        (0, 40, 0.01),
        (1, 20, 0.01),
        (1, 41, 0.01),
        (2, 21, 0.02),
        (2, 42, 0.02),
        (3, 22, 0.02),
        (3, 43, 0.02),
    ]
    assert {(r.config.width, r.config.final_rate) for r in runs} == {(16, 0.0)}
    other = constant.assign(loss_held_out=constant["loss_held_out"] + 0.1)
    with pytest.raises(ValueError, match=r"run `capacity\.py` on this text first"):
        annealed.runs_of(arguments, other, small_corpus)


def test_ends_are_interpolated_at_the_loss_and_never_beyond(constant):
    loss = float(constant["loss_held_out"].iloc[0])
    rows = [
        {
            "learning_rate": rate,
            "seed": seed,
            "size": "K = 4",
            "measure": "coupling",
            "loss_held_out": loss + above,
            "value": value,
            "above_chance": value - 0.1,
        }
        for rate, seed, ends in (
            (0.01, 0, ((0.3, 0.9), (-0.1, 0.5))),
            (0.02, 2, ((0.3, 0.9), (0.1, 0.5))),
        )
        for above, value in ends
    ]
    table = annealed.compared(constant, pandas.DataFrame(rows)).set_index("seed")
    # A quarter of the way from .5 to .9.
    assert table.loc[0, "value_annealed"] == pytest.approx(0.6)
    assert table.loc[0, "above_chance_annealed"] == pytest.approx(0.5)
    assert table.loc[0, "value_full_rate"] == pytest.approx(0.4)
    assert np.isnan(table.loc[2, "value_annealed"])
    with redirect_stdout(StringIO()) as said:
        annealed.print_report(constant, pandas.DataFrame(rows))
    assert "value: full rate 0.4, annealed 0.6, difference 0.2" in said.getvalue()
    assert "1 have no ends on both sides of it" in said.getvalue()


@pytest.mark.long("trains eight models")
def test_it_trains_and_prints_what_it_wrote(constant, small_text, tmp_path):
    constant.to_csv(tmp_path / "measured.csv", index=False)
    command = arguments_of(small_text, tmp_path)[0]
    with redirect_stdout(StringIO()) as said:
        assert annealed.main(command) == 0
    written = pandas.read_csv(tmp_path / "annealed.csv")
    of_coupling = written[(written["measure"] == "coupling")]
    assert len(of_coupling) == 8 * 2
    assert set(of_coupling["mark"]) == {END}
    with redirect_stdout(StringIO()) as again:
        assert annealed.main(["--table", str(tmp_path)]) == 0
    assert again.getvalue() in said.getvalue()


def test_the_page_has_the_committed_numbers():
    """Interpolated and compared by numpy and scipy alone."""
    folder = Path(annealed.__file__).parent / "results" / "capacity"
    page = (Path(__file__).parents[2] / "docs/findings/generalization.md").read_text()
    constant, ends = (
        pandas.read_csv(folder / f"{name}.csv").query(
            "measure == 'coupling' and size == 'K = 8'"
        )
        for name in ("measured", "annealed")
    )
    at_mark = constant[constant["mark"] == "bigram"].set_index("seed")
    loss = at_mark["loss_held_out"].mean()
    for rate, of_rate in ends.groupby("learning_rate"):
        differences, cooled = [], []
        for seed, of_seed in of_rate.groupby("seed"):
            of_seed = of_seed.sort_values("loss_held_out")
            losses = of_seed["loss_held_out"].to_numpy()
            assert losses[0] < loss < losses[-1]
            value = np.interp(loss, losses, of_seed["above_chance"])
            cooled.append(value)
            differences.append(value - at_mark.loc[seed, "above_chance"])
        full = np.mean(cooled) - np.mean(differences)
        low, high = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        row = (
            f"| {rate:g} | {full:.3f} | {np.mean(cooled):.3f} | "
            f"{np.mean(differences):.3f} [{low:.3f}, {high:.3f}] |"
        )
        assert row.replace("-", "−") in page
