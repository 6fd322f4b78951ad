"""Whether coupling says what a block costs: the statistics on models whose answer is
known.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import block_costs
import block_costs_report as report
import tiny
import tl_coupling as tlc
from drawn_texts import unreadable

SIZES = (30, 18, 24)
# The models of the page's columns, in their order.
NAMES = ("smollm2-135m", "gemma-3-270m-q4_k_m", "qwen2.5-coder-0.5b-instruct-q4_k_m")
OTHERS = ("influence", "size", "identity", "energy")


def autocorrelated(rng: np.random.Generator, n: int, phi: float = 0.5) -> np.ndarray:
    """Return a series in which neighbours are alike."""
    x = np.zeros(n + 50)
    for i, noise in enumerate(rng.standard_normal(n + 50)[1:], 1):
        x[i] = phi * x[i - 1] + noise
    return x[50:] / x[50:].std()


def made_up_table(rng: np.random.Generator, n: int, effect: float) -> pandas.DataFrame:
    """Return results of a model whose costs depend on everything but coupling, unless
    there is an effect of what coupling has for itself.
    """
    depth = np.linspace(-1, 1, n)
    x = {
        name: depth**2 * rng.standard_normal() + autocorrelated(rng, n)
        for name in OTHERS
    }
    own = autocorrelated(rng, n)
    x["coupling"] = 0.6 * x["energy"] + 0.4 * x["influence"] - depth**2 + own
    # Slopes differ between models.
    slope = 1 + 0.5 * rng.standard_normal()
    cost = slope * x["influence"] + depth**2 + autocorrelated(rng, n) + effect * own
    one = pandas.DataFrame(x | {"cost": np.exp(cost), "layer": range(n)})
    texts = [one.assign(text=text, change=c) for text in (0, 1) for c in report.CHANGES]
    return pandas.concat(texts)


def made_up_models(seed: int, effect: float) -> list[report.Blocks]:
    rng = np.random.default_rng(seed)
    tables = [made_up_table(rng, n, effect) for n in SIZES]
    return [report.blocks_of(table, "dropped") for table in tables]


def effect_of(models: list[report.Blocks], name: str = "coupling") -> report.Effect:
    return report.effect_of([report.shifted(m, name) for m in models], n_shifts=199)


@pytest.mark.long("200 synthetic studies")
def test_nothing_is_found_more_often_than_it_should_where_coupling_says_nothing():
    p = np.array([effect_of(made_up_models(seed, 0.0)).p for seed in range(200)])
    # 5 % of 200, two standard errors.
    assert 0.02 <= (p <= 0.05).mean() <= 0.08
    assert 0.4 < p.mean() < 0.6


def test_a_planted_effect_is_found_with_its_sign():
    for effect, word in ((-1.2, "less"), (1.2, "more")):
        found = [effect_of(made_up_models(seed, effect)) for seed in range(12)]
        said = [report.sentence_of("dropped", one) for one in found]
        assert np.mean([f"cost {word} than" in sentence for sentence in said]) > 0.85
        wrong = "more" if word == "less" else "less"
        assert not any(f"cost {wrong} than" in sentence for sentence in said)


def test_what_is_added_is_that_of_least_squares_with_slopes_of_each_model():
    """By one fit of all models but one, where each has slopes of its own for the others,
    and one slope for coupling.
    """
    models = made_up_models(3, -0.5)
    expected = []
    for left_out, model in enumerate(models):
        of_others = [m for i, m in enumerate(models) if i != left_out]
        n_columns = 7
        blocks = []
        for i, other in enumerate(of_others):
            own = np.zeros((len(other.cost), n_columns * len(of_others)))
            fixed = np.column_stack(
                [np.ones(len(own)), *[other.predictors[p] for p in OTHERS]]
            )
            fixed = np.column_stack([fixed, other.predictors["depth"]])
            own[:, i * n_columns : (i + 1) * n_columns] = fixed
            both = np.column_stack([own, other.predictors["coupling"]])
            # Every model counts the same.
            blocks.append(np.column_stack([both, other.cost]) / len(own) ** 0.5)
        stacked = np.vstack(blocks)
        b = np.linalg.lstsq(stacked[:, :-1], stacked[:, -1])[0][-1]
        fixed = np.column_stack([np.ones(len(model.cost)), model.predictors["depth"]])
        fixed = np.column_stack([fixed, *[model.predictors[p] for p in OTHERS]])

        def left(y: np.ndarray, x: np.ndarray = fixed) -> np.ndarray:
            return y - x @ np.linalg.lstsq(x, y)[0]

        r = left(model.predictors["coupling"][:, 0])
        y = left(model.cost)
        expected.append((y**2).mean() - ((y - b * r) ** 2).mean())
        partial = np.corrcoef(r, y)[0, 1]
        assert effect_of(models).partial[left_out] == pytest.approx(partial)
        assert effect_of(models).slopes[left_out] == pytest.approx(b)
    assert effect_of(models).added == pytest.approx(np.mean(expected))


def test_r_squared_of_the_model_left_out_is_by_the_slopes_of_others():
    rng = np.random.default_rng(0)
    models = []
    for sign in (1, 1, -1):
        x = report.standard(rng.standard_normal(20))[:, None]
        models.append(report.Blocks(sign * x[:, 0], {"influence": x}))
    # Slopes of others: 0, 0 and 1, which is the wrong way.
    found = report.r_squared_left_out(models, ["influence"])
    assert found == pytest.approx([0, 0, 1 - 4])


def test_ranks_are_compared_and_pairs_that_cannot_be_merged_are_left_out():
    table = made_up_table(np.random.default_rng(0), 20, 0.0)
    table.loc[(table["change"] == "merged") & (table["layer"] == 5), "cost"] = np.nan
    merged = report.blocks_of(table, "merged")
    assert len(merged.cost) == 19
    dropped = report.blocks_of(table, "dropped")
    costs = table[(table["change"] == "dropped") & (table["text"] == 0)]["cost"]
    assert np.argsort(dropped.cost).tolist() == np.argsort(costs.to_numpy()).tolist()
    assert len(report.blocks_of(table, "dropped", n_ends=1).cost) == 18
    logs = report.blocks_of(table, "dropped", scale="log").cost
    assert stats.pearsonr(logs, np.log(costs)).statistic == pytest.approx(1)
    few = report.blocks_of(table[table["layer"] < 8], "dropped")
    with pytest.raises(ValueError, match=r"wanted 9 blocks or pairs at least.*got 8"):
        report.shifted(few, "coupling")


def test_sentences_are_those_of_the_page():
    page = Path(block_costs.__file__).with_suffix(".md").read_text()
    effect = report.Effect(0.1, 0.01, [], [], [-1.0, -2.0])
    for changed in (
        effect,
        effect._replace(slopes=[1.0, 2.0]),
        effect._replace(slopes=[-1.0, 1.0]),
        effect._replace(p=0.03),
        effect._replace(added=-0.1),
    ):
        sentence = report.sentence_of("dropped", changed).removeprefix("dropped: ")
        assert sentence[0].upper() + sentence[1:] in page


def test_properties_are_those_of_known_blocks(tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, "w1 w2 w3")
    J = tlc.block_jacobians(trace).double()
    found = block_costs.properties(trace)
    np.testing.assert_allclose(found["size"], torch.linalg.matrix_norm(J), rtol=1e-5)
    traces = [float(torch.trace(j)) / len(j) for j in J]
    np.testing.assert_allclose(found["identity"], traces, atol=1e-6)
    others = np.array([[9, 1, 2], [1, 9, 4], [2, 4, 9]], float)
    assert block_costs.of_block(others).tolist() == [1.5, 2.5, 3]
    assert block_costs.of_neighbours(others).tolist() == [1, 4]
    assert block_costs.of_neighbours(np.array([1.0, 2, 4])).tolist() == [1.5, 3]


def test_rows_hold_the_costs_of_redundancy(tokenizer_folder, monkeypatch):
    monkeypatch.setattr(block_costs, "K", 4)
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    texts = ["w1 w2 w3 w4", "w5 w6 w7"]
    table = pandas.DataFrame(block_costs.rows_of(model, texts))
    data = tlc.redundancy.layer_redundancy(model, texts, k=(4,))
    dropped = table[table["change"] == "dropped"].pivot(
        index="text", columns="layer", values="cost"
    )
    np.testing.assert_allclose(dropped, data.loss_dropped - data.loss, atol=1e-6)
    assert len(table[table["change"] == "merged"]) == 2
    coupling = table[table["change"] == "dropped"].groupby("layer")["coupling"].mean()
    chance = tlc.measures.mean_random_coupling(4)
    np.testing.assert_allclose(
        coupling + chance, data.coupling_with_others.mean("prompt")[0], atol=1e-5
    )


def test_the_picture_and_the_report_of_made_up_models(capsys, monkeypatch):
    monkeypatch.setattr(report, "N_SIMULATED", 2)
    monkeypatch.setattr(report, "N_SHIFTS", 99)
    rng = np.random.default_rng(0)
    tables = {f"model {n}": made_up_table(rng, n, -1.5) for n in SIZES}
    assert unreadable(report.draw(tables)) == []
    report.print_report(tables)
    said = capsys.readouterr().out
    for change in report.CHANGES:
        assert f"{change}: model 30 30, model 18 18, model 24 24" in said
    assert len(re.findall(r"^\+ coupling", said, flags=re.MULTILINE)) == 2


def test_the_page_has_the_committed_numbers():
    """What each predictor adds, from the committed costs; what the report printed."""
    results = Path(block_costs.__file__).parent / "results" / "block_costs"
    tables = report.read_tables(results)
    printed = (results / "report.txt").read_text()
    page = (Path(__file__).parents[2] / "docs/findings/redundancy.md").read_text()
    section = " ".join(page.partition("## Coupling beside everything else")[2].split())
    for change in report.CHANGES:
        models = {
            name: report.blocks_of(table, change) for name, table in tables.items()
        }
        effects = report.effects(models)
        for label, row in effects.iterrows():
            partial = " | ".join(f"{row[name]:+.2f}" for name in NAMES)
            cells = f"{row['added R²']:+.3f} | {row['p']:.3f} | {partial}"
            assert f"| {label} | {cells} |".replace("-", "−") in section
        effect = report.effect_of(
            [report.shifted(m, "coupling") for m in models.values()]
        )
        assert report.sentence_of(change, effect) in printed
        left = [f"{share:.2f}"[1:] for share in effect.left]
        assert f"{min(left)} to {max(left)} of its variance" in section
        of_change = printed[printed.index(f"\n{change}: ") :]
        shares = re.search(r"^share found.*$", of_change, flags=re.MULTILINE)[0]
        found = dict(re.findall(r"([+-]\d\.\d) (\d\.\d\d)", shares))
        row = " | ".join(found.values())
        assert f"| {change} | {row} |" in section
        r_squared = report.stages(models)["mean"]
        cells = " | ".join(f"{value:.2f}" for value in r_squared)
        assert f"| {change} | {cells} |".replace("-", "−") in section


def test_partial_correlations_are_those_of_residuals():
    """The committed partial correlations of coupling, by residuals of numpy's."""
    results = Path(block_costs.__file__).parent / "results" / "block_costs"
    for name, table in report.read_tables(results).items():
        of_drops = table[table["change"] == "dropped"].drop(columns=["change", "text"])
        means = of_drops.groupby("layer").mean()
        ranks = means.rank()
        scores = pandas.DataFrame(
            stats.norm.ppf((ranks - 0.5) / len(ranks)), columns=means.columns
        )
        depth = np.arange(len(means))
        x = np.column_stack(
            [np.ones(len(means)), depth, depth**2, scores[list(OTHERS)]]
        )
        both = scores[["cost", "coupling"]].to_numpy()
        left = both - x @ np.linalg.lstsq(x, both)[0]
        expected = np.corrcoef(left.T)[0, 1]
        shifted = report.shifted(report.blocks_of(table, "dropped"), "coupling")
        found = shifted.product[0] / (shifted.square[0] * shifted.rest) ** 0.5
        assert found == pytest.approx(expected, abs=1e-6), name


@pytest.mark.long("trains a model and changes the blocks of two")
def test_a_small_study_works(tmp_path):
    """`SMALL=1`, of SmolLM2 and of a model that is trained for it."""
    study = Path(block_costs.__file__)
    command = [study, "--models", "smollm2-135m", "--small", "12", "--out", tmp_path]
    options = {
        "env": os.environ | {"SMALL": "1", "TQDM_DISABLE": "1"},
        "capture_output": True,
        "text": True,
    }
    ended = subprocess.run([sys.executable, *map(str, command)], **options)
    assert ended.returncode == 0, ended.stderr
    assert "dropped: small-12 12, smollm2-135m 30" in ended.stdout
    table = pandas.read_csv(tmp_path / "smollm2-135m.csv")
    assert table.groupby("change")["layer"].nunique().tolist() == [30, 29]
    again = [sys.executable, str(study), "--table", "--out", str(tmp_path)]
    printed = subprocess.run(again, **options)
    assert printed.stdout == ended.stdout
