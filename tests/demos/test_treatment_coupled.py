"""The study of the treatment where models are coupled: the sentence of each planted
outcome, its intervals and power by scipy, and that it resumes.
"""

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas
import pytest
from scipy import stats

import treatment
import treatment_coupled as study
import treatment_coupled_report as report
from treatment_report import ALONE, CELL, STEP, models_of

OPTIONS = (
    "--seeds 2 --pilot-seeds 2 --little 512 --width 16 --n-layers 2 --steps 24 "
    "--warmup 2 --vocabulary 300 --n-ctx 16 --windows 4 --held-out 4 --passages 1 "
    "--evaluate 4 --measure 12 --k 4 --jobs 1 --learning-rate 0.01"
)
COUPLING = {"up": 0.8, "down": 0.02, "twisted up": 0.2, "twisted down": 0.35}
ARMS = [*COUPLING, ALONE, report.AS_SLOW]
SLOWER = {report.AS_SLOW, "up", "twisted up"}


def planted(effects: Mapping[str, float], noise: float = 0.005) -> pandas.DataFrame:
    """Models of the part `coupled` whose outcome is 3 nats, but for the effect of their
    arm and noise.
    """
    rng = np.random.default_rng(1)
    rows = []
    for seed in report.SEEDS:
        of_seed = 0.1 * rng.standard_normal()
        for arm in ARMS:
            loss = 3 + of_seed + effects.get(arm, 0.0) + noise * rng.standard_normal()
            row = dict(zip(CELL, ["coupled", "little", 0.001, 0.5], strict=True))
            row |= {"arm": arm, "seed": seed, report.OUTCOME: loss}
            row |= {STEP: 500.0 + 20 * (arm in SLOWER)}
            row |= {report.COUPLING: COUPLING.get(arm, 0.39) + 0.01 * rng.random()}
            row |= {"held-out loss at the end": loss, "lowest held-out loss": loss}
            rows.append(row)
    return pandas.DataFrame(rows)


SAID = {
    "promotes": "promotes generalization here",
    "hinders": "hinders generalization here",
    "within": "changes the held-out loss by less",
    "not decided": "generalization is not decided",
}
TERMS = ("up", "down", "twisted up", "twisted down")


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        ({"up": -0.03, "down": 0.03}, "coupling promotes generalization here"),
        ({"up": 0.03, "down": -0.03}, "coupling hinders generalization here"),
        ({"up": -0.03, "down": -0.03}, "is not the level of coupling"),
        ({"up": 0.03, "down": 0.03}, "is not the level of coupling"),
        ({}, "changes the held-out loss by less than 0.0075 nats"),
        (dict.fromkeys(TERMS, -0.01), "by less than 0.015 nats"),
        # One direction alone is not decided.
        ({"up": -0.03}, "is not decided."),
        # What any term does: treated models and twins alike.
        (dict.fromkeys(TERMS, 0.03), "is not decided."),
        (dict.fromkeys(TERMS, -0.03), "is not decided."),
        # A twin alone, and the speed alone.
        ({"twisted up": 0.03, "twisted down": -0.03}, "is not decided."),
        ({report.AS_SLOW: 0.03}, "is not decided."),
    ],
)
def test_each_planted_outcome_earns_its_sentence(effects, expected):
    sentence = report.sentence_of(planted(effects))
    assert expected in sentence
    assert all(name in sentence for name in report.PRIMARY)


def test_what_speed_explains_is_not_claimed():
    """Arms that are 1,000 steps apart, and as much lower as the slope says."""
    effects = {"up": -0.043, "down": 0.043}
    models = planted(effects)
    models.loc[models["arm"] == "up", STEP] += 1000
    models.loc[models["arm"] == "down", STEP] -= 1000
    sentence = report.sentence_of(models)
    assert "as measured promotes, less what speed explains within" in sentence


def test_nothing_is_said_without_a_dose_under_noise_or_of_fewer_models():
    effects = {"up": -0.03, "down": 0.03}
    for arm, coupling, expected in (
        ("up", 0.45, "not raised by .2"),
        ("down", 0.3, "not lowered by .1"),
    ):
        models = planted(effects)
        models.loc[models["arm"] == arm, report.COUPLING] = coupling
        assert expected in report.sentence_of(models)
    assert "not decided" in report.sentence_of(planted({}, noise=0.1))
    models = planted(effects)
    assert "No sentence: 215 of the 216" in report.sentence_of(models.iloc[1:])
    one_seed_less = models[models["seed"] > min(report.SEEDS)]
    assert "No sentence: 210 of the 216" in report.sentence_of(one_seed_less)


def test_a_model_that_is_missing_or_not_finite_is_an_error():
    models = planted({})
    for lost in (models["arm"] == "up", models["seed"] == 207):
        broken = models.copy()
        broken.loc[lost, report.OUTCOME] = np.nan
        with pytest.raises(ValueError, match="finite"):
            report.sentence_of(broken)
    table = pandas.DataFrame({"loss_training": [2.0, np.nan], "loss_held_out": 3.0})
    with pytest.raises(ValueError, match="diverged"):
        models_of(table)


def test_intervals_are_paired_and_by_scipy():
    models = planted({"up": 0.01})
    wide = models.pivot_table(index="seed", columns="arm", values=report.OUTCOME)
    rows = report.differences_of(models, report.OUTCOME)
    for arm, other in report.CONTRASTS[:4]:
        test = stats.ttest_rel(wide[arm], wide[other])
        row = rows.loc[f"{arm} − {other}"]
        both = test.confidence_interval(0.975)
        assert (row["low"], row["high"]) == pytest.approx(both)
        one_sided = test.confidence_interval(0.9)
        assert (row["low 90"], row["high 90"]) == pytest.approx(one_sided)
        # Signs are drawn; the t test is near them where differences are normal.
        assert row["p"] == pytest.approx(test.pvalue, abs=0.03)


@pytest.mark.parametrize("effect", [0.0, 0.0075, -0.015])
def test_power_is_what_planted_studies_show(effect):
    """150 studies, whole: an arm's deviation is that of a difference by the root of 2."""
    sd = 0.02
    effects = dict.fromkeys(TERMS, -0.008)
    effects["up"] -= effect
    effects["down"] += effect
    rng = np.random.default_rng(3)
    models = planted({}, noise=0)
    models[STEP] = 500.0
    verdicts = []
    for _ in range(150):
        noise = rng.standard_normal(len(models)) * sd / 2**0.5
        models[report.OUTCOME] = 3 + models["arm"].map(effects).fillna(0) + noise
        sentence = report.sentence_of(models)
        verdicts.append(next((w for w in SAID if SAID[w] in sentence), "other"))
    shares = report.power_of(effect, sd, 36)
    for verdict in SAID:
        share = verdicts.count(verdict) / 150
        assert shares.get(verdict, 0.0) == pytest.approx(share, abs=0.1)


def test_a_part_of_the_band_is_the_outcome_there():
    """Planted: training loss falls by .01 a step; above it the held-out loss is 1, and
    for *up* .1 more below m + .08.
    """
    steps = np.arange(0, 101, 5)
    rows = []
    for seed in range(3):
        for arm in ARMS:
            training = 4 + 0.1 * seed - 0.01 * steps
            is_low = training - training[-1] < 0.081
            held_out = training + 1 + 0.1 * (is_low & (arm == "up"))
            columns = {"step": steps, "loss_training": training}
            columns |= {"loss_held_out": held_out, "seed": seed, "arm": arm}
            rows.append(pandas.DataFrame(columns))
    seeds = pandas.concat(rows)
    low, _, high = (
        report.differences_in(seeds, band)["mean"] for band in report.THIRDS
    )
    assert high.to_numpy() == pytest.approx(0, abs=1e-9)
    assert low["up − twisted up"] > 0.05
    assert low["down − twisted down"] == pytest.approx(0, abs=1e-9)


def test_each_part_has_seeds_of_its_own_and_the_arms_of_the_design():
    arguments = study.arguments_of(["--jobs", "1"])
    families = study.families_of(arguments)
    seeds: dict[str, set[int]] = {}
    for family in families:
        seeds.setdefault(family.part, set()).add(family.config.seed)
    assert {part: len(of_part) for part, of_part in seeds.items()} == {
        "pilot": 4,
        "coupled": 36,
    }
    first_study = treatment.families_of(treatment.arguments_of(["--jobs", "1"]))
    seeds["before"] = {family.config.seed for family in first_study}
    assert sum(map(len, seeds.values())) == len(set.union(*seeds.values()))
    of_seed = [f for f in families if f.config.seed == 200]
    assert [(f.arm, f.speed, f.placebos) for f in of_seed] == [
        (ALONE, 1.0, ()),
        ("up", 1.0, ("twisted",)),
        ("down", 1.0, ("twisted",)),
        (ALONE, report.SPEED_OF_UP, ()),
    ]
    assert {f.config.learning_rate for f in families} == {0.001}
    # Every seed has another text.
    n_tokens = arguments.little * (max(seeds["coupled"]) + 1)
    assert n_tokens < 5_000_000


def test_the_design_says_what_the_code_does():
    page = (Path(study.__file__).parent / "treatment_coupled.md").read_text()
    defaults = {name: default for name, default, _ in study.OPTIONS}
    assert f"The learning rate is **{defaults['learning-rate']:g}**" in page
    assert f"λ = {defaults['weight']}, k = {defaults['k']}" in page
    assert f"{defaults['seeds']} seeds (200 to 235), 216 models" in page
    assert f"loss alone × {report.SPEED_OF_UP}" in page
    small, large = report.MARGINS
    assert f"of two margins that it meets: {small:.4f} and {large:.3f}".replace(
        "0.0", ".0"
    ) in " ".join(page.split())
    assert f"by {100 * report.LEVEL_OF_SIGN:.1f} % t intervals" in page
    assert f"−.0{-1e6 * report.SLOPE:.0f} nats per 1,000 steps" in page


def test_what_was_taken_from_the_pilot_is_in_its_committed_results():
    """The slope over steps, and what the term does by itself, by pandas alone."""
    folder = Path(study.__file__).parent / "results" / "treatment_coupled"

    def less_loss_alone(part: str) -> pandas.DataFrame:
        models = pandas.read_csv(folder / f"models-{part}.csv").set_index("seed")
        means = models.groupby("arm")[[report.OUTCOME, report.STEP]].mean()
        return means - means.loc["loss alone"]

    loss, steps = less_loss_alone("pilot").loc["loss alone × 0.8"]
    assert pytest.approx(loss / steps, abs=5e-7) == report.SLOPE
    twins = less_loss_alone("pilot-as-fast").loc[["twisted up", "twisted down"]]
    assert twins[report.OUTCOME].max() == pytest.approx(report.OF_TERM, abs=5e-4)


@pytest.mark.long("trains the models of a study")
def test_the_study_runs_resumes_and_prints_what_it_found(tmp_path):
    # Seeds begin at 100, and each has another text: the small one is too short.
    options = [*OPTIONS.split(), "--out", str(tmp_path)]

    def printed(*arguments: str) -> str:
        with redirect_stdout(StringIO()) as said:
            assert study.main([*arguments]) == 0
        return said.getvalue()

    output = printed(*options)
    models, _ = study.read(tmp_path)
    assert set(models.query("part == 'coupled'")["arm"]) == set(ARMS)
    assert "No sentence: 0 of the 216 models" not in output
    assert "No sentence: 12 of the 216 models" in output
    assert printed("--table", str(tmp_path)) in output
    assert (tmp_path / "treatment_coupled.png").stat().st_size > 10_000
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "measured").glob("*.nc")}
    assert printed(*options) == output
    assert before == {
        p: p.stat().st_mtime_ns for p in (tmp_path / "measured").glob("*.nc")
    }


def test_bad_options_are_one_line(capsys):
    for options, message in (
        ("--every 0", "`--every` must be at least 1"),
        ("--parts some", "`--parts` must be of pilot"),
        ("--k 48", "`--k` must lie in"),
    ):
        assert study.main(options.split()) == 2
        assert message in capsys.readouterr().err
