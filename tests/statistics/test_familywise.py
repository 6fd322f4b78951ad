"""The p of everything that was looked at, against a loop over permutations and
looks.
"""

import numpy as np
import pandas
import pytest
from scipy import stats

from fake_survey import KS, survey
from tl_coupling.statistics import block_permutations
from tl_coupling.studies.generalization import generalization_study

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*some prompts were not measured"),
]

SUBSETS = {"high": "score > 2 and n_layers > 5", "many": [True] * 8 + [False]}
FAMILIES = {f"org/m{i}": family for i, family in enumerate("aaabbbccc")}


def given() -> tuple:
    data = survey(n_models=9)
    data["mean_miscoupling"] = (
        1 - data["mean_coupling"] + 0.1 * np.random.default_rng(1).random((9, 1, 6, 2))
    )
    data["mean_miscoupling"][4, 0, :3] = np.nan
    rng = np.random.default_rng(2)
    columns = {
        "model": data["model"].values,
        "score": rng.permutation(9) * 1.0,
        "arc": rng.standard_normal(9),
    }
    return data, pandas.DataFrame(columns)


@pytest.mark.parametrize("families", [None, FAMILIES])
def test_it_is_that_of_a_loop(families):
    data, scores = given()
    result = generalization_study(
        data, scores, k=5, subsets=SUBSETS, families=families, n_resamples=40
    ).familywise
    codes = np.arange(9) if families is None else np.repeat(np.arange(3), 3)
    orders = [np.arange(9), *block_permutations(codes, 40, np.random.default_rng(0))]
    layers = data["n_layers"].values[:, 0]
    smallest = []
    own = {}
    for order in orders:
        score = scores["score"].to_numpy()[order]
        ys = {
            "all prompts": score,
            "arc": scores["arc"].to_numpy()[order],
            "mmlu": score,
        }
        masks = {
            "all models": np.ones(9, bool),
            "high": (score > 2) & (layers > 5),
            "many": np.array(SUBSETS["many"]),
        }
        ps = {}
        for measure in ("coupling", "miscoupling"):
            for task, prompts in (
                ("all prompts", slice(None)),
                ("arc", slice(0, 3)),
                ("mmlu", slice(3, 6)),
            ):
                for i, k in enumerate(KS):
                    values = data[f"mean_{measure}"].values[:, 0, prompts, i]
                    x = np.array(
                        [
                            row[np.isfinite(row)].mean()
                            if np.isfinite(row).any()
                            else np.nan
                            for row in values
                        ]
                    )
                    for name, mask in masks.items():
                        is_used = mask & np.isfinite(x)
                        if is_used.sum() > 2:
                            ps[k, measure, task, name] = stats.pearsonr(
                                x[is_used], ys[task][is_used]
                            ).pvalue
        smallest.append(min(ps.values()))
        own = own or ps
    table = result.table.set_index(["k", "measure", "task", "subset"])
    assert set(table.index) == set(own)
    assert len(table) == 2 * 2 * 3 * 3
    for look, p in own.items():
        assert table.loc[look, "p"] == pytest.approx(p)
        assert table.loc[look, "familywise_p"] == pytest.approx(
            np.mean(np.array(smallest) <= p + 1e-12)
        )
    assert (
        result.p
        == table.loc[(5, "coupling", "all prompts", "all models"), "familywise_p"]
    )
    assert result.smallest_p == pytest.approx(
        np.mean(np.array(smallest) <= smallest[0] + 1e-12)
    )
    assert table.loc[(5, "miscoupling", "arc", "all models"), "n"] == 8


def test_a_loss_is_that_of_the_prompts_of_the_task():
    data = survey(n_models=7)
    result = generalization_study(
        data, subsets={"high": "loss > 3.4"}, n_resamples=20
    ).familywise
    table = result.table.set_index(["k", "measure", "task", "subset"])
    x, y = (data[name].values[:, 0, 3:] for name in ("mean_coupling", "loss"))
    assert table.loc[(5, "coupling", "mmlu", "all models"), "p"] == pytest.approx(
        stats.pearsonr(x[..., 0].mean(1), y.mean(1)).pvalue
    )
    loss = data["loss"].values[:, 0].mean(1)
    assert table.loc[(5, "coupling", "all prompts", "high"), "n"] == (loss > 3.4).sum()


def test_what_is_beyond_chance_stays_so_and_the_rest_does_not():
    rng = np.random.default_rng(0)
    x = rng.random((12, 1)) + 0.01 * rng.standard_normal((12, 6))
    data = survey(x)
    scores = pandas.DataFrame(
        {"model": data["model"].values, "score": 30 * x.mean(1), "none": rng.random(12)}
    )
    assert generalization_study(
        data, scores, n_resamples=200
    ).familywise.p == pytest.approx(1 / 201)
    result = generalization_study(
        data, scores, score="none", n_resamples=200
    ).familywise
    assert result.p >= result.smallest_p > 0.05


def test_few_models_have_all_orders():
    """Five models: the p of 120 orders, of which none is drawn twice."""
    data = survey(n_models=5)
    scores = pandas.DataFrame(
        {"model": data["model"].values, "score": np.arange(5) * 1.0}
    )
    result = generalization_study(data, scores, k=5, n_resamples=200)
    looks = result.familywise
    assert (looks.n_permutations, looks.is_exact) == (119, True)
    assert looks.p * 120 == pytest.approx(round(looks.p * 120))
    assert f"p = {looks.p:.3g} by all 120 orders of the scores" in "".join(
        result.remarks
    )
    again = generalization_study(data, scores, k=5, n_resamples=200, seed=1)
    assert again.familywise.p == looks.p
