"""The study of whether coupling comes back: the sentence of each planted course, and an
interrupted run that goes on as if nothing had been.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import coupling_returns as study
import coupling_returns_report as report
import small_models
import tl_coupling as tlc
from loss_marks import mean_loss

SCRIPT = Path(study.__file__)
OPTIONS = (
    "--pilots 1 --seeds 2 --width 16 --n-layers 2 --vocabulary 300 --n-ctx 16 "
    "--batch 4 --warmup 2 --steps 24 --per-octave 2 --windows 4 --passages 2 --k 4 "
    "--jobs 1"
)
LAST = 2**12
STEPS = np.array(study.measured_steps(LAST, 4))
N_PILOTS, N_SEEDS = 2, 6
TOKENS_IN_STEP = 1000


def course(points: dict[int, float]) -> np.ndarray:
    """Coupling at the steps, linear in log step between some points."""
    steps = np.log2(np.maximum(STEPS, 1))
    return np.interp(steps, np.log2(list(points)), list(points.values()))


RISE_AND_FALL = {1: 0.1, 16: 0.5, 128: 0.2}
# Flat in the octaves before, and up from the octave that begins after step 1024.
BACK = course(RISE_AND_FALL | {1024: 0.2, 1025: 0.4})
DOWN = course(RISE_AND_FALL)


def planted(
    main: np.ndarray,
    pilots: np.ndarray | None = None,
    noise: float = 0.02,
    held_out: Callable[[np.ndarray], np.ndarray] | None = None,
    passes: float = 4.0,
) -> pandas.DataFrame:
    """Curves of all seeds, whose level differs by seed and cancels in pairs."""
    rng = np.random.default_rng(0)
    tables = []
    for seed in range(N_PILOTS + N_SEEDS):
        is_pilot = seed < N_PILOTS
        mean = main if pilots is None or not is_pilot else pilots
        own = 0.05 * rng.standard_normal() + noise * rng.standard_normal(len(STEPS))
        table = pandas.DataFrame({"step": STEPS, "coupling": mean + own})
        table["coupling_without_identity"] = DOWN + own
        loss = 5 - 0.2 * np.log2(np.maximum(STEPS, 1))
        table["loss_training"] = loss
        table["loss_held_out"] = loss + 0.1 if held_out is None else held_out(loss)
        for name in ("identity_share", "captured_energy", "size_of_J"):
            table[name] = 0.1
        table["tokens"] = STEPS * TOKENS_IN_STEP
        table["passes"] = STEPS / LAST * passes
        known = {"width": 64, "n_layers": 6, "text_tokens": 1000, "k": 5}
        role = report.PILOT if is_pilot else report.MAIN
        tables.append(table.assign(**known, chance=0.106, seed=seed, role=role))
    return pandas.concat(tables, ignore_index=True)


def said_of(curves: pandas.DataFrame, outcome: str = "coupling") -> str:
    by_octave = report.course_of(curves, outcome)
    return report.sentence_of(by_octave, report.verdict_of(by_octave), "Coupling")


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (BACK, "Coupling falls, then rises at 1.22 M to 2.05 M tokens"),
        (DOWN, "Coupling falls and stays down up to 4.1 M tokens"),
        # On and on.
        (
            course(RISE_AND_FALL | {128: 0.4, LAST: 0.15}),
            "Coupling falls and stays down up to 4.1 M tokens",
        ),
        # Up for two octaves, and down again.
        (
            course(RISE_AND_FALL | {400: 0.2, 700: 0.4, 1400: 0.4, 2100: 0.2}),
            "not decided whether it comes back by 4.1 M tokens; it was risen, and is "
            "not at the end",
        ),
        # Never up, never down.
        (course({1: 0.3, LAST: 0.3}), "no fall was shown"),
        # Up to the end.
        (course({1: 0.1, LAST: 0.5}), "the pilots' peak is too late"),
        # A rise that is too small to be of interest.
        (
            course(RISE_AND_FALL | {1024: 0.2, LAST: 0.22}),
            "a rise of 0.05 from where it is at",
        ),
    ],
)
def test_each_planted_course_earns_its_sentence(main, expected):
    assert expected in said_of(planted(main))


def test_pilots_choose_and_decide_nothing():
    """A rise that only pilots have is none, and one that they lack is one."""
    assert "stays down" in said_of(planted(DOWN, pilots=BACK))
    assert "then rises at" in said_of(planted(BACK, pilots=DOWN))
    # Nor do the others choose: their deeper trough is not looked at.
    deeper = course(RISE_AND_FALL | {500: 0.2, 700: 0.05, 1000: 0.2})
    by_octave = report.course_of(planted(deeper, pilots=DOWN), "coupling")
    verdict = report.verdict_of(by_octave)
    pilots = by_octave.pilots.mean(axis=1)
    assert verdict.trough == pilots[verdict.peak + 1 : -1].idxmin()


def test_much_noise_decides_nothing():
    noisy = said_of(planted(DOWN, noise=0.25))
    assert "not decided" in noisy
    few = planted(BACK)
    few = few[few["seed"] <= N_PILOTS]
    assert "fewer than two seeds" in said_of(few)


def test_a_rise_of_over_fitted_models_does_not_count(capsys):
    """The text is known by heart from step 1024 on: losses on it fall, others rise."""
    late = np.maximum(np.log2(np.maximum(STEPS, 1)) - 10, 0)
    curves = planted(BACK, held_out=lambda loss: loss + 0.1 + 0.5 * late)
    assert (report.last_counted(curves) == 1024).all()
    assert "stays down up to 1.02 M tokens" in said_of(curves)
    # The first model that is ends it for all.
    one = planted(BACK)
    is_first = one["seed"] == N_PILOTS
    one.loc[is_first, "loss_held_out"] = curves.loc[is_first, "loss_held_out"]
    assert "stays down up to 1.02 M tokens" in said_of(one)
    report.print_report(one)
    assert f"Seed {N_PILOTS} is over-fitted after step 1024" in capsys.readouterr().out
    # A loss that is up for a while is not.
    spike = planted(BACK)
    spike.loc[spike["step"] == 64, "loss_held_out"] += 1
    assert (report.last_counted(spike) == LAST).all()


def test_a_rise_says_whether_the_text_was_read_before():
    assert "when the text was read 2.0 times, which may be why" in said_of(
        planted(BACK)
    )
    assert "before the text was read once" in said_of(planted(BACK, passes=1.0))


def test_octaves_are_means_counted_back_from_the_last_step():
    curves = planted(DOWN)
    by_octave = report.course_of(curves, "coupling")
    wide = curves.pivot_table(index="step", columns="seed", values="coupling")
    last = wide[(wide.index > LAST / 2)].mean()
    before = wide[(wide.index > LAST / 4) & (wide.index <= LAST / 2)].mean()
    seeds = list(by_octave.seeds)
    assert seeds == list(range(N_PILOTS, N_PILOTS + N_SEEDS))
    assert by_octave.seeds.iloc[-1].to_numpy() == pytest.approx(last[seeds].to_numpy())
    assert by_octave.seeds.iloc[-2].to_numpy() == pytest.approx(
        before[seeds].to_numpy()
    )
    assert by_octave.tokens.iloc[-1].tolist() == [2_435_000, 4_096_000]
    verdict = report.verdict_of(by_octave)
    trough = by_octave.seeds.loc[verdict.trough]
    test = stats.ttest_rel(by_octave.seeds.iloc[-1], trough)
    assert verdict.rises.iloc[-1][["low", "high"]].tolist() == pytest.approx(
        list(test.confidence_interval(0.95))
    )


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_no_rise_is_rarely_called_one(noise):
    """Seeds that wander about a plateau, each in its own way."""
    rng = np.random.default_rng(0)
    octaves = range(10)
    plateau = np.array([0.1, 0.3, 0.5, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
    tokens = pandas.DataFrame({"min": 1.0, "max": 2.0}, octaves)
    passes = pandas.Series(1.0, octaves)
    kinds = []
    for _ in range(400):
        wander = rng.standard_normal((10, 8)).cumsum(0) / np.sqrt(10)
        means = pandas.DataFrame(plateau[:, None] + noise * wander, octaves)
        by_octave = report.Course(means[[0, 1]], means.loc[:, 2:], tokens, passes)
        kinds.append(report.verdict_of(by_octave).kind)
    # One side of a 95 % interval, and the sampling error of 400.
    assert kinds.count("rises") / 400 < 0.04
    assert "stays down" in kinds


def test_the_report_holds_both_sentences_and_chance(capsys):
    report.print_report(planted(BACK))
    output = capsys.readouterr().out
    assert "Coupling by chance 0.106" in output
    assert "Coupling falls, then rises at" in output
    assert "best multiple of the identity falls and stays down" in output
    assert "So what rises goes with multiples of the identity." in output
    assert report.what_rises("rises", "rises") == ""
    assert report.what_rises("stays down", "rises") == ""
    assert "not decided" in report.what_rises("rises", "not decided")


def test_the_figure_has_every_seed_and_chance():
    figure = report.draw(planted(BACK))
    above, below = figure.axes
    # Coupling of every seed, its mean without the identity, and chance.
    assert len(above.lines) == N_PILOTS + N_SEEDS + 2
    assert len(below.lines) == 2 * (N_PILOTS + N_SEEDS)
    assert above.lines[-1].get_ydata()[0] == pytest.approx(0.106)
    assert above.get_xscale() == "log"
    assert figure.get_suptitle().startswith("Coupling falls, and rises again\n")
    [legend] = figure.legends
    assert len(legend.get_texts()) == 5


@pytest.mark.parametrize(
    ("verdicts", "title"),
    [
        ({"stays down"}, "Coupling rises, falls and stays down"),
        ({"not decided"}, "Does coupling come back?"),
        ({"rises", "stays down"}, "Does coupling come back?"),
    ],
)
def test_the_title_says_what_all_settings_earned(verdicts: set[str], title: str):
    assert report.title_of(verdicts) == title


def test_measured_steps_are_log_spaced():
    steps = study.measured_steps(64, 4)
    assert steps[:9] == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert steps[-5:] == (32, 38, 45, 54, 64)
    # More steps at most leave those before as they are.
    assert study.measured_steps(100, 4)[: len(steps)] == steps


@pytest.fixture
def config() -> small_models.TrainingConfig:
    return small_models.TrainingConfig(
        width=16, n_layers=2, n_heads=1, vocabulary=300, n_ctx=16, batch=4, steps=24
    )


def test_a_pass_reads_each_window_once_and_begins_anywhere(config):
    tokens = torch.arange(1000)
    per_pass = study.steps_in_pass(config, tokens)
    # 61 windows, wherever the first begins: 15 batches of 4.
    assert per_pass == 15
    whole = list(islice(study.batches_after(0, config, tokens), 2 * per_pass))
    passes = [torch.cat(whole[:per_pass]), torch.cat(whole[per_pass:])]
    for of_pass in passes:
        assert (of_pass.diff(dim=1) == 1).all()
        assert len(of_pass.unique()) == of_pass.numel() == per_pass * 4 * 16
    assert not torch.equal(*passes)
    for n_done in (1, per_pass - 1, per_pass, per_pass + 7):
        left = islice(study.batches_after(n_done, config, tokens), 30 - n_done)
        assert all(map(torch.equal, left, whole[n_done:]))
    other = next(study.batches_after(0, replace(config, seed=1), tokens))
    assert not torch.equal(other, whole[0])
    with pytest.raises(ValueError, match="at least 80 tokens, got 70"):
        study.steps_in_pass(config, tokens[:70])


@pytest.fixture
def design(small_corpus, tmp_path) -> study.Design:
    windows = small_corpus.held_out_tokens[:64].view(4, 16)
    return study.Design(
        tokens=small_corpus.tokens,
        text_digest=small_corpus.digest,
        training=small_corpus.tokens[:64].view(4, 16),
        held_out=windows,
        passages=windows[:2],
        k=4,
        last_step=24,
        per_octave=2,
        device="cpu",
        save_seconds=1e9,
        out=tmp_path / "whole",
    )


def test_a_model_is_trained_as_by_a_loop_and_measured_by_the_way(config, design):
    rows = study.brought_to(config, 24, design).rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 6, 8, 11, 16, 23]
    model = small_models.new_model(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    for ids in islice(study.batches_after(0, config, design.tokens), 23):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    expected = mean_loss(model, design.held_out)
    assert rows[-1]["loss_held_out"] == pytest.approx(expected, abs=1e-5)
    steps = [
        tlc.training.measure(model.gpt_neox.layers, lambda ids=ids: model(ids[None]), 4)
        for ids in design.passages
    ]
    coupling = np.mean([step.coupling for step in steps])
    assert rows[-1]["coupling"] == pytest.approx(coupling, abs=1e-4)
    # The identity by numpy.
    (J, *_) = [tlc.block_jacobians(step.trace).double().numpy() for step in steps]
    for of_block in J:
        of_block -= np.trace(of_block) / 16 * np.eye(16)
    rest = tlc.comparisons.jacobian_coupling(torch.from_numpy(J), 4).mean()
    first = replace(design, passages=design.passages[:1])
    assert study.measured(model, first)["coupling_without_identity"] == pytest.approx(
        rest, abs=1e-5
    )


def test_an_interrupted_model_goes_on_with_the_same_curve(
    config, design, tmp_path, monkeypatch
):
    whole = study.brought_to(config, 24, design)
    again = replace(design, out=tmp_path / "interrupted", save_seconds=0)
    measure = study.measured
    calls: list[int] = []

    def interrupted(*arguments):
        calls.append(len(calls))
        if len(calls) in (3, 7):
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(study, "measured", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            study.brought_to(config, 24, again)
    assert study.brought_to(config, 24, again).rows == whole.rows
    # Two were measured again, and nothing else.
    assert len(calls) == len(whole.rows) + 2
    ended = [
        torch.load(d.state_path(config), weights_only=True) for d in (design, again)
    ]
    for name, value in ended[0]["model"].items():
        assert torch.equal(value, ended[1]["model"][name])


def test_rounds_give_the_curve_of_one_go_and_a_state_is_never_half_written(
    config, design, tmp_path, monkeypatch
):
    whole = study.brought_to(config, 24, design).rows
    rounds = replace(design, out=tmp_path / "rounds", last_step=16)
    for step in rounds.steps:
        progress = study.brought_to(config, step, rounds)
    assert progress.rows == whole[:-1]
    path = rounds.state_path(config)
    before = path.read_bytes()

    def half_written(content, to):
        Path(to).write_bytes(before[:100])
        raise OSError("disk full")

    # More steps at most are the same models.
    more = replace(rounds, last_step=24)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half_written)
        with pytest.raises(OSError, match="cannot write"):
            study.brought_to(config, 24, more)
    assert path.read_bytes() == before
    assert study.brought_to(config, 24, more).rows == whole
    # What is there is not trained again, and another setting is another model.
    monkeypatch.setattr(small_models, "learn", None)
    assert study.brought_to(config, 8, more).rows == whole[:7]
    for other in (replace(more, k=3), replace(more, text_digest="other")):
        with pytest.raises(TypeError):
            study.brought_to(config, 24, other)


def printed(*options: str) -> str:
    with redirect_stdout(StringIO()) as output:
        assert study.main([*options]) == 0
    return output.getvalue()


def test_no_step_is_begun_for_which_there_is_no_time(
    small_text, tmp_path, monkeypatch, capsys
):
    options = [*OPTIONS.split(), "--text", str(small_text), "--out", str(tmp_path)]
    assert study.main([*options, "--minutes", "0"]) == 2
    assert "wanted time for a step" in capsys.readouterr().err
    clock = iter(range(10**6))
    # Each look at the clock takes a second of it.
    monkeypatch.setattr(study.time, "monotonic", lambda: float(next(clock)))
    printed(*options, "--minutes", "1")
    curves = study.read_curves(tmp_path)
    reached = curves.groupby("seed")["step"].max()
    assert reached.nunique() == 1
    assert 0 < reached.iloc[0] < 23
    # Without time, what is there is not lost, and nothing is added.
    printed(*options, "--minutes", "0")
    pandas.testing.assert_frame_equal(study.read_curves(tmp_path), curves)
    printed(*options, "--minutes", "1")
    more = study.read_curves(tmp_path)
    assert more["step"].max() > curves["step"].max()
    more, curves = (table.set_index(["seed", "step"]) for table in (more, curves))
    pandas.testing.assert_frame_equal(more.loc[curves.index], curves)


@pytest.mark.long("trains the models of a study, and kills it")
def test_a_killed_study_ends_as_one_that_was_left_alone(small_text, tmp_path):
    options = [*OPTIONS.split(), "--text", str(small_text)]
    output = printed(*options, "--out", str(tmp_path / "whole"))
    killed = tmp_path / "killed"
    command = [sys.executable, str(SCRIPT), *options, "--save-minutes", "0"]
    process = subprocess.Popen(
        [*command, "--out", str(killed)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    tables = []
    while process.poll() is None and not tables:
        time.sleep(0.05)
        tables = [path for path in killed.glob("curves-*.csv") if path.stat().st_size]
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = printed(*options, "--out", str(killed))
    (whole_table,) = (tmp_path / "whole").glob("curves-*.csv")
    assert (killed / whole_table.name).read_bytes() == whole_table.read_bytes()
    assert again.splitlines()[:-1] == output.splitlines()[:-1]
    assert printed("--table", str(killed)) in again
    assert not list((killed / "models").glob(".*"))
    assert (killed / "coupling_returns.png").stat().st_size > 10_000


def test_bad_options_are_one_line(capsys, tmp_path):
    for options, message in (
        ("--seeds 0", "`--seeds` must be at least 1, got 0"),
        ("--per-octave 0", "`--per-octave` must be at least 1"),
        ("--k 64 --width 64", "`--k` must lie in [2, 63], got 64"),
        ("--n-layers 1", "`--n-layers` must be at least 2"),
        (f"--table {tmp_path}", "there are no results"),
    ):
        assert study.main(options.split()) == 2
        assert message in capsys.readouterr().err


def test_the_committed_page_says_what_the_code_does():
    page = " ".join(SCRIPT.with_suffix(".md").read_text().split())
    defaults = {name: default for name, default, _ in study.OPTIONS}
    for sentence in (
        f"GPT-NeoX of {defaults['n-layers']} blocks",
        f"BPE of {defaults['vocabulary']:,} entries",
        f"windows of {defaults['n-ctx']} tokens, batches of {defaults['batch']}",
        f"weight decay {defaults['weight-decay']:g}",
        f"a warm-up of {defaults['warmup']} steps to the learning rate "
        f"{defaults['learning-rate']:g}",
        f"{defaults['pilots']} pilots, which choose, and {defaults['seeds']} further",
        f"at k = {defaults['k']}, at the last token of {defaults['passages']} held-out",
        f"the loss on {defaults['windows']} windows",
        f"at step {defaults['steps']:,} at most",
        f"at most .0{report.OVERFITTED * 100:.0f} nats above its lowest",
        f"smallest rise of interest is .0{report.MARGIN * 100:.0f}",
        f"random subspaces, {tlc.measures.mean_random_coupling(5):.3f};".replace(
            " 0.", " ."
        ),
    ):
        assert sentence in page
    for minutes in ("--minutes 180", "--width 64"):
        assert minutes in page


def test_the_page_has_the_power_of_the_rule():
    """By simulation, with the paired t interval of scipy's quantiles."""
    page = " ".join(SCRIPT.with_suffix(".md").read_text().split())
    rng = np.random.default_rng(0)

    def shares(n: int, sd: float, rise: float) -> tuple[float, float, float]:
        """Half an interval, and how often a rise is seen, and none excluded."""
        quantile = stats.t.ppf(0.975, n - 1)
        noise = sd * rng.standard_normal((100_000, n))
        half = quantile * noise.std(1, ddof=1) / np.sqrt(n)
        mean = noise.mean(1)
        is_seen = (mean + rise - half > 0) & (mean + rise >= report.MARGIN)
        is_excluded = mean + half < report.MARGIN
        return quantile * sd / np.sqrt(n), is_seen.mean(), is_excluded.mean()

    for n, sd, sentence in (
        (6, 0.03, "±{}: {}% of studies see a rise of .08, and {}% exclude one of .05"),
        (6, 0.04, "At .04 these are ±{}, {}% and {}%"),
    ):
        half, seen, excluded = shares(n, sd, 0.08)
        numbers = [f"{half:.3f}"[1:], f"{100 * seen:.0f} ", f"{100 * excluded:.0f} "]
        assert sentence.format(*numbers) in page
    half, _, excluded = shares(4, 0.03, 0.08)
    assert f"it would be ±{half:.3f}".replace("0.", ".") in page
    assert f"and {100 * excluded:.0f} %, which is why there are six" in page


# A model trained on the CPU, and on a device that tests make up.
_ON_A_DEVICE = """
import sys
from dataclasses import replace
from pathlib import Path

import torch
import second_device
import coupling_returns as study
import small_models

second_device.install()
# Its storage cannot be written to a file.
study.write_atomically = lambda *_: None
config = small_models.TrainingConfig(
    width=16, n_layers=2, n_heads=1, vocabulary=300, n_ctx=16, batch=4
)
tokens = torch.randint(0, 300, (3000,), generator=torch.Generator().manual_seed(0))
windows = tokens[:64].view(4, 16)
design = study.Design(
    tokens, "x", windows, windows, windows[:2], 4, 8, 2, "cpu", 0, Path(sys.argv[1])
)
rows = study.brought_to(config, 8, design).rows
there = study.brought_to(config, 8, replace(design, device="second")).rows
assert len(rows) == len(there) == 7
for row, other in zip(rows, there):
    for name, value in row.items():
        assert abs(value - other[name]) < 1e-4, (name, value, other[name])
print("alike")
"""


@pytest.mark.long("a process of its own, because torch knows a device for good")
def test_models_are_trained_and_measured_on_another_device(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ON_A_DEVICE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "alike", done.stderr[-4000:]
