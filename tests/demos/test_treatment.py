"""The study of the treatment: its terms and placebos, and the sentence of each planted
outcome.
"""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import xarray
from scipy import stats

import small_models
import tl_coupling as tlc
import treatment
import treatment_report as report

OPTIONS = (
    "--seeds 2 --other-seeds 2 --little 512 --width 16 --n-layers 2 --steps 24 "
    "--warmup 2 --vocabulary 300 --n-ctx 16 --windows 4 --held-out 4 --passages 1 "
    "--evaluate 4 --measure 12 --k 4 --jobs 1 --parts little identity"
)
RESULTS = Path(treatment.__file__).parent / "results" / "treatment"
DOCS = Path(__file__).parents[2] / "docs"
N_SEEDS = 16
STEPS = np.arange(0, 101, 10)
ARMS = [
    report.ALONE,
    "up",
    "down",
    *[f"{kind} {arm}" for kind in ("placebo", "twisted") for arm in ("up", "down")],
]


def planted(effects: Mapping[str, float], noise: float = 0.01) -> pandas.DataFrame:
    """Models whose training loss falls from 4 to 2 and whose held-out loss stays 1 above,
    but for the effect of their arm; *up* is coupled more.
    """
    rng = np.random.default_rng(0)
    tables = []
    for seed in range(N_SEEDS):
        of_seed = noise * rng.standard_normal()
        for arm in ARMS:
            shift = effects.get(arm, 0.0) + of_seed + noise * rng.standard_normal()
            training = 4 - STEPS / 50
            table = pandas.DataFrame({"step": STEPS, "loss_training": training})
            table["loss_held_out"] = training + 1 + shift
            for name in report.MADE_OF:
                table[name] = 0.7 if arm == "up" else 0.1 + 0.001 * rng.random()
            facts = dict.fromkeys(treatment.TERM_FACTS[:3], 0.0)
            facts |= {"share_clipped": 0.0, "added_length": 0.0}
            cell = {"part": "little", "text": "little", "weight": 0.5}
            cell |= {"learning_rate": 0.004, "arm": arm, "seed": seed}
            tables.append(table.assign(**facts, **cell))
    return pandas.concat(tables, ignore_index=True)


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        (
            {"up": -0.1, "down": 0.1},
            "coupling promotes generalization (raised: lowers;",
        ),
        ({"up": 0.1, "down": -0.1}, "coupling hinders generalization (raised: raises;"),
        ({"up": -0.1}, "promotes generalization in one direction"),
        ({"down": 0.1}, "promotes generalization in one direction"),
        ({"up": 0.1}, "hinders generalization in one direction"),
        ({"down": -0.1}, "hinders generalization in one direction"),
        ({"up": -0.1, "down": -0.1}, "what does it is not the level of coupling"),
        ({"up": 0.1, "down": 0.1}, "what does it is not the level of coupling"),
        ({}, "beyond ±0.03 nats are excluded"),
        # Harsh placebos: the treatments do what loss alone does.
        ({"placebo up": 0.1, "placebo down": 0.1}, "not decided"),
        # A placebo that does it without common axes.
        ({"up": -0.1, "twisted up": -0.2}, "not decided (raised: placebos differ"),
    ],
)
def test_each_planted_outcome_earns_its_sentence(effects, expected):
    contrasts = report.contrasts_of(report.models_of(planted(effects)))
    assert expected in report.sentence_of(contrasts)


def test_nothing_is_said_where_the_treatment_failed_or_noise_is_large():
    table = planted({"up": -0.1})
    table.loc[table["arm"] == "up", "coupling"] = 0.15
    contrasts = report.contrasts_of(report.models_of(table))
    assert "treatment failed" in report.sentence_of(contrasts)
    noisy = report.contrasts_of(report.models_of(planted({}, noise=0.2)))
    assert "not decided" in report.sentence_of(noisy)


def test_contrasts_are_paired_t_intervals_and_sign_changes():
    models = report.models_of(planted({"up": 0.02}))
    contrasts = report.contrasts_of(models).set_index(["outcome", "contrast"])
    wide = models.pivot_table(index="seed", columns="arm", values=report.OUTCOME)
    for other, level in (("placebo up", 0.975), ("twisted up", 0.95)):
        row = contrasts.loc[(report.OUTCOME, f"up − {other}")]
        test = stats.ttest_rel(wide["up"], wide[other])
        interval = test.confidence_interval(level)
        assert (row["low"], row["high"]) == pytest.approx(interval)
    few = (wide["up"] - wide[report.ALONE]).to_numpy()[:8]
    expected = stats.permutation_test(
        (few,),
        np.mean,
        permutation_type="samples",
        alternative="two-sided",
        n_resamples=np.inf,
    )
    assert report.paired(few)["p"] == pytest.approx(expected.pvalue)


def test_a_slower_arm_is_compared_less_what_speed_does():
    """Planted: .001 nats lower with each step, whatever the arm."""
    rng = np.random.default_rng(0)
    rows = []
    arms = {"little": ARMS, "speed": [f"{report.ALONE}{s}" for s in ("", " × 0.8")]}
    for part, of_part in arms.items():
        for arm in of_part:
            for seed in range(8):
                step = 100 + 50 * (arm in ("up", f"{report.ALONE} × 0.8"))
                step += rng.integers(0, 9)
                loss = 3 - 0.001 * step + 0.02 * (arm == "twisted up")
                row = {report.OUTCOME: loss, report.STEP: float(step)}
                rows.append(row | {"part": part, "arm": arm, "seed": seed})
    models = pandas.DataFrame(rows)
    assert report.slope_of_speed(models, (0.8,)) == pytest.approx(-0.001)
    adjusted = report.adjusted_for_speed(models, (0.8,)).set_index("contrast")
    expected = {
        "up − placebo up": 0,
        "up − twisted up": -0.02,
        "down − placebo down": 0,
    }
    for contrast, difference in expected.items():
        assert adjusted.loc[contrast, "difference"] == pytest.approx(difference)
    assert 40 < adjusted.loc["up − placebo up", "steps behind"] < 60


def test_losses_of_each_seed_are_kept():
    table = planted({})
    kept = report.tables_of_part(table)["seeds"]
    assert len(kept) == N_SEEDS * len(ARMS) * len(STEPS)
    again = kept.merge(table, on=["seed", "arm", "step"])
    assert (again["loss_held_out_x"] == again["loss_held_out_y"]).all()


def test_the_outcome_is_the_mean_over_the_band_above_the_worst_last_loss():
    table = planted({}, noise=0)
    # One arm learns more slowly: the band lies above where it ends.
    slow = table["arm"] == "up"
    table.loc[slow, "loss_training"] = 4 - table.loc[slow, "step"] * 0.015
    table.loc[slow, "loss_held_out"] = table.loc[slow, "loss_training"] * 2
    models = report.models_of(table).set_index(["seed", "arm"])
    band = 2.5 + np.linspace(0.02, 0.2, 10)
    assert models.loc[(0, "up"), report.OUTCOME] == pytest.approx((2 * band).mean())
    assert models.loc[(0, "down"), report.OUTCOME] == pytest.approx((band + 1).mean())
    steps = (4 - band) / 0.015
    assert models.loc[(0, "up"), "step in the band"] == pytest.approx(steps.mean())


def test_loss_alone_is_in_every_part():
    families = treatment.families_of(treatment.arguments_of(["--jobs", "1"]))
    arms: dict[str, set[str]] = {}
    for family in families:
        arms.setdefault(family.part, set()).add(family.arm)
    assert set(arms) == set(treatment.PARTS)
    assert all(treatment.LOSS_ALONE in of_part for of_part in arms.values())
    n_seeds = {
        part: len({f.config.seed for f in families if f.part == part}) for part in arms
    }
    assert n_seeds == dict.fromkeys(treatment.PARTS, 8) | {"little": 16}


@pytest.fixture(scope="module")
def config() -> small_models.TrainingConfig:
    return small_models.TrainingConfig(
        width=16, n_layers=3, n_heads=2, vocabulary=50, n_ctx=16, batch=2, steps=12
    )


def test_terms_are_coupling_and_the_same_functional_elsewhere(config):
    model = small_models.new_model(config)
    ids = torch.arange(1, 11)[None]
    blocks = model.gpt_neox.layers
    trace = tlc.trace_modules(list(blocks), lambda: model(ids))
    J = tlc.block_jacobians(trace).double()
    coupled = tlc.comparisons.jacobian_coupling(J, 4).mean()
    up = treatment.term_of("up", config, 4)(model, ids)
    assert float(up) == pytest.approx(-coupled, abs=1e-5)
    down = treatment.term_of("down", config, 4)(model, ids)
    assert float(down) == pytest.approx(coupled, abs=1e-5)
    left, right = treatment.random_rotations(config).double()
    turned = tlc.comparisons.jacobian_coupling(left.mT @ J @ right, 4).mean()
    twisted = treatment.term_of("twisted up", config, 4)(model, ids)
    assert float(twisted) == pytest.approx(-turned, abs=1e-5)
    # The placebo by numpy, one block after the other.
    values = []
    for J_l, U, V in zip(J.numpy(), left.numpy(), right.numpy(), strict=True):
        A = U[:, :4].T @ J_l @ V[:, :4]
        values.append(1 - np.linalg.norm(A - np.diag(np.diag(A))) / np.linalg.norm(A))
    placebo = treatment.term_of("placebo down", config, 4)(model, ids)
    assert float(placebo) == pytest.approx(np.mean(values), abs=1e-5)
    with pytest.raises(ValueError, match="unknown"):
        treatment.term_of("sideways", config, 4)


@pytest.fixture(scope="module")
def design(small_corpus, tmp_path_factory) -> treatment.Design:
    windows = small_corpus.tokens[:64].view(4, 16) % 50
    return treatment.Design(
        replace(small_corpus, tokens=small_corpus.tokens % 50),
        512,
        4,
        windows,
        windows[:1],
        k=4,
        every=4,
        evaluate=4,
        measure=12,
        out=tmp_path_factory.mktemp("treatment"),
    )


@pytest.fixture(scope="module")
def of_family(config, design) -> dict[str, xarray.Dataset]:
    placebos = treatment.PLACEBOS
    family = treatment.Family("little", "little", "up", 0.5, config, placebos=placebos)
    alone = replace(family, arm=treatment.LOSS_ALONE, placebos=())
    runs = treatment.family_measured(family, design)
    runs += treatment.family_measured(alone, design)
    return {str(run["arm"].item()): run for run in runs}


def test_arms_of_a_seed_begin_alike_and_placebos_have_their_twins_lengths(of_family):
    assert set(of_family) == {"up", "placebo up", "twisted up", "loss alone"}
    up = of_family["up"]
    for run in of_family.values():
        assert float(run["loss_training"][0]) == float(up["loss_training"][0])
        assert float(run["coupling"][0]) == float(up["coupling"][0])
    for name in ("placebo up", "twisted up"):
        np.testing.assert_allclose(
            of_family[name]["gradient_length"], up["gradient_length"], rtol=1e-4
        )
    # Every fourth of twelve steps, and no term of loss alone.
    assert up.sizes["term"] == 3
    assert of_family["loss alone"].sizes["term"] == 0
    last = [float(run["loss_training"][-1]) for run in of_family.values()]
    assert len(set(last)) == len(last)


def test_what_is_finished_is_kept_and_another_option_is_another_model(
    of_family, config, design, monkeypatch
):
    family = treatment.Family("dose", "little", "up", 0.5, config)
    monkeypatch.setattr(small_models, "learn", None)
    (again,) = treatment.family_measured(family, design)
    assert float(again["coupling"][-1]) == float(of_family["up"]["coupling"][-1])
    for other in (replace(family, weight=0.1), replace(family, speed=0.8)):
        with pytest.raises(TypeError):
            treatment.family_measured(other, design)


@pytest.mark.long("trains the models of a study")
def test_the_study_runs_resumes_and_prints_what_it_found(small_text, tmp_path):
    options = [*OPTIONS.split(), "--text", str(small_text), "--out", str(tmp_path)]

    def printed(*arguments: str) -> str:
        with redirect_stdout(StringIO()) as said:
            assert treatment.main([*arguments]) == 0
        return said.getvalue()

    output = printed(*options)
    models = treatment.read_tables(tmp_path, "models")
    assert set(models["arm"]) == {*ARMS, "less identity"}
    means = models.groupby("arm")["coupling"].mean()
    assert means["up"] > means["loss alone"] > means["down"]
    assert "less identity − loss alone" in output
    assert report.sentence_of(report.contrasts_of(models)) in output
    assert printed("--table", str(tmp_path)) in output
    assert (tmp_path / "treatment.png").stat().st_size > 10_000
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "measured").glob("*.nc")}
    assert printed(*options) == output
    assert before == {
        p: p.stat().st_mtime_ns for p in (tmp_path / "measured").glob("*.nc")
    }


def test_bad_options_are_one_line(capsys):
    for options, message in (
        ("--every 0", "`--every` must be at least 1"),
        ("--parts some", "`--parts` must be of little"),
        ("--k 48", "`--k` must lie in"),
    ):
        assert treatment.main(options.split()) == 2
        assert message in capsys.readouterr().err


def test_the_committed_page_says_what_the_code_does():
    page = (Path(treatment.__file__).parent / "treatment.md").read_text()
    assert f"smallest effect of interest is .0{report.MARGIN * 100:.0f} nats" in page
    defaults = {name: default for name, default, _ in treatment.OPTIONS}
    assert f"λ = {defaults['weight']}" in page
    assert f"λ = {defaults['other-weight']}" in page
    assert f"{defaults['seeds']} seeds" in page


def in_print(number: float) -> str:
    """Return a number as pages write it."""
    text = f"{number:.3f}".replace("-0.000", "0.000")
    return text.replace("0.", ".", 1).replace("-", "−")


def said(difference: pandas.Series, level: float = 0.95) -> str:
    """Return a mean with its t interval, by scipy, as pages write them."""
    test = stats.ttest_1samp(difference, 0)
    low, high = test.confidence_interval(level)
    return f"{in_print(difference.mean())} [{in_print(low)}, {in_print(high)}]"


def test_the_page_has_the_numbers_of_the_other_parts():
    page = (DOCS / "findings" / "treatment.md").read_text()

    def by_arm(part: str, outcome: str) -> pandas.DataFrame:
        models = pandas.read_csv(RESULTS / f"models-{part}.csv")
        assert models.groupby("arm")["seed"].nunique().eq(8).all()
        return models.pivot(index="seed", columns="arm", values=outcome)

    loss = "held-out loss in the band"
    for part in ("enough", "rate", "dose"):
        coupling = by_arm(part, "coupling in the band").mean()
        of_part = by_arm(part, loss)
        cells = [in_print(coupling[arm]) for arm in ("up", report.ALONE)]
        cells += [
            said(of_part[arm] - of_part[f"placebo {arm}"]) for arm in ("up", "down")
        ]
        assert f"| {' | '.join(cells)} |" in page
    at_end = by_arm("enough", "held-out loss at the end")
    for arm in ("up", "placebo up"):
        assert said(at_end[arm] - at_end[report.ALONE]) in page
    slow = f"{report.ALONE} × 0.8"
    gap, held_out = by_arm("speed", "gap at the end"), by_arm("speed", loss)
    assert said(gap[report.ALONE] - gap[slow]) in page
    assert said(held_out[report.ALONE] - held_out[slow]) in page
    coupling = by_arm("speed", "coupling in the band")
    assert said(coupling[slow] - coupling[report.ALONE]) in page
    for outcome in ("coupling in the band", loss):
        of_part = by_arm("identity", outcome)
        difference = of_part[treatment.LESS_IDENTITY] - of_part[report.ALONE]
        assert f"({said(difference)})" in page
    shares = by_arm("identity", "identity_share").mean()
    assert f"from {in_print(shares[report.ALONE])} to" in page
    assert f"to {in_print(shares[treatment.LESS_IDENTITY])}," in page


def test_the_page_of_findings_has_the_committed_numbers():
    """Recomputed from the table of models by pandas and scipy alone."""
    models = pandas.read_csv(RESULTS / "models-little.csv")
    assert models.groupby("arm")["seed"].nunique().eq(16).all()
    page = (DOCS / "findings" / "treatment.md").read_text()
    card = (DOCS / "findings.md").read_text()
    values = {
        name: models.pivot(index="seed", columns="arm", values=name)
        for name in models.columns
        if name not in ("arm", "seed", "part", "text")
    }
    loss = values["held-out loss in the band"]
    coupling = values["coupling in the band"]

    for arm in ARMS:
        row = f"| {arm} | {coupling[arm].mean():.3f} | {loss[arm].mean():.3f} |"
        row = row.replace("| 0.", "| .")
        if arm != report.ALONE:
            row += f" {said(loss[arm] - loss[report.ALONE])} |"
        assert row in page
    for arm in ("up", "down"):
        primary = said(loss[arm] - loss[f"placebo {arm}"], 0.975)
        assert primary in page
        assert primary in card
    gap = values["gap at the end"]
    training = values["training loss at the end"]
    end = values["held-out loss at the end"]
    assert said(gap["up"] - gap[report.ALONE]).strip("−") in page.replace(
        ".054 nats [.031, .076]", ".054 [−.076, −.031]"
    )
    assert said(training["up"] - training[report.ALONE]) in page
    assert said(end["up"] - end[report.ALONE]) in page
    behind = values["step in the band"]
    assert f"{(behind['up'] - behind[report.ALONE]).mean():.0f} steps behind" in page
    sentence = report.sentence_of(report.contrasts_of(models))
    assert sentence.startswith("Effects of coupling on the held-out loss beyond ±0.03")
    assert (RESULTS / "report.txt").read_text().rstrip().endswith(sentence)
