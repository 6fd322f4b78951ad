"""The study of trained models: what it does to weights, and how it reads its tables."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import pytest
import statsmodels.formula.api as formulas
import torch
from scipy import stats

import real_models
import tiny
import tl_coupling as tlc
from findings import findings


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model(request.param), tokenizer_folder)


@pytest.fixture
def written(model):
    """Return what a change makes of what the first block writes, beside what it was."""

    def both(change):
        before = tlc.trace(model, tiny.TOKENS).residual
        with real_models.changed(model, change):
            after = tlc.trace(model, tiny.TOKENS).residual
        return (before[1] - before[0], after[1] - after[0])

    return both


def test_weights_are_as_before_after_a_change_and_after_an_error(model):
    before = {name: p.clone() for name, p in model.state_dict().items()}
    noise = partial(real_models.add_noise, dose=0.3, seed=0)

    def fails():
        with real_models.changed(model, noise):
            changed = model.state_dict()
            assert any((before[name] != p).any() for name, p in changed.items())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert all((before[name] == p).all() for name, p in model.state_dict().items())


def test_noise_has_the_size_that_it_says_in_every_matrix(model):
    before = {
        name: p.detach().clone() for name, p in real_models.parameters_of(model).items()
    }
    with real_models.changed(model, partial(real_models.add_noise, dose=0.2, seed=1)):
        added = {
            name: p.detach() - before[name]
            for name, p in real_models.parameters_of(model).items()
        }
    for name, difference in added.items():
        if before[name].ndim == 2:
            ratio = float(difference.std() / before[name].std())
            assert ratio == pytest.approx(0.2, rel=0.1)
        else:
            assert (difference == 0).all()


def test_a_louder_block_writes_the_factor_times_as_much_of_attention(model, written):
    """To an MLP of zeros, so that attention writes alone."""
    silent = {"mlp.down_proj": 0.0, "post_feedforward_layernorm": -1.0}

    def silence(m):
        for name, parameter in real_models.parameters_of(m).items():
            for part, value in silent.items():
                if part.split(".")[-1] in name:
                    parameter.fill_(value)

    def louder(m):
        real_models.make_louder(m, 1.7)
        silence(m)

    before, after = written(silence)[1], written(louder)[1]
    torch.testing.assert_close(after, 1.7 * before, rtol=1e-4, atol=1e-5)
    assert before.norm() > 0.01


def test_uniform_gains_keep_their_mean_square(model):
    offset = real_models.gain_offset(model)
    kind = model.cfg.architecture
    assert offset == ("Gemma" in kind)

    def gains():
        return {
            name: (p.detach() + offset).clone()
            for name, p in real_models.parameters_of(model).items()
            if "layernorm" in name
        }

    before = gains()
    with real_models.changed(model, real_models.make_gains_uniform):
        after = gains()
    norms_of_a_block = 4 if offset else 2
    assert len(before) == norms_of_a_block * model.cfg.n_layers
    for name, gain in after.items():
        assert len(gain.unique()) == 1
        square = before[name].square().mean()
        torch.testing.assert_close(gain.square().mean(), square)


def test_sizes_of_dimensions_are_those_of_streams_of_one_length():
    stream = torch.zeros(2, 3, 4)
    stream[:, 0] = 1e6
    stream[:, 1:] = torch.tensor([3.0, 4.0, 0.0, 0.0])
    longer = 100 * stream
    sizes = real_models.sizes_of_dimensions([stream, longer])
    torch.testing.assert_close(sizes, torch.tensor([0.6, 0.8, 0.0, 0.0]))


def test_slopes_are_those_of_statsmodels_with_a_constant_for_each_task(capsys):
    rng = np.random.default_rng(0)
    task = np.repeat(["a", "b", "c", "d"], 12)
    length = rng.integers(5, 90, 48)
    loss = 3 + 0.5 * np.log(length) + (task == "a") + rng.standard_normal(48)
    coupling = 0.1 - 0.02 * loss + 0.3 * (task == "a") + 0.01 * rng.standard_normal(48)
    table = pandas.DataFrame(
        {"task": task, "n_tokens": length, "loss": loss, "coupling": coupling}
    )
    real_models.show_prompts({"made-up": table})
    printed = capsys.readouterr().out
    for name, formula in {
        "over all": "coupling ~ loss",
        "within tasks": "coupling ~ loss + C(task)",
        "within tasks, length fixed": "coupling ~ loss + np.log(n_tokens) + C(task)",
    }.items():
        slope = formulas.ols(formula, table).fit().params["loss"]
        assert f"  {name}: {slope:+.4f} [" in printed


RESULTS = Path(real_models.__file__).parent / "results" / "real_models"
MODELS = ("smollm2-135m", "gemma-3-270m-q4_k_m")


def committed(part: str) -> list[pandas.DataFrame]:
    return [pandas.read_csv(RESULTS / f"{model}-{part}.csv") for model in MODELS]


@pytest.fixture(scope="module")
def page() -> str:
    return findings()


def signed(text: str) -> str:
    """Write a minus as one, and no minus before 0."""
    return re.sub(r"-(?=0\.0+(?!\d))", "", text).replace("-", "−")


@pytest.mark.parametrize(
    ("label", "model", "token", "column"),
    [
        ("", "trained", "last", "k=10"),
        (", at the middle token", "trained", "middle", "k=10"),
        ("$k = 2$", "trained", "last", "k=2"),
        ("$k = 50$", "trained", "last", "k=50"),
        (", layers one apart", "trained", "last", "neighbours"),
        (
            ", without each block's first singular pair",
            "trained",
            "last",
            "without σ₁",
        ),
        (
            ", norm scales, attention patterns and gates held constant",
            "trained",
            "last",
            "frozen",
        ),
        (
            ", every dimension of the stream in units of its own size",
            "trained",
            "last",
            "standard units",
        ),
        (", untrained", "untrained", "last", "k=10"),
        (", uniform gains in the norms", "uniform gains", "last", "k=10"),
    ],
)
def test_the_page_says_what_the_committed_norms_give(page, label, model, token, column):
    cells = []
    for table in committed("norms"):
        chosen = table[(table["model"] == model) & (table["token"] == token)]
        values = chosen[column].dropna()
        assert len(values) == 20
        half = stats.t.ppf(0.975, 19) * values.sem()
        ends = values.mean() - half, values.mean() + half
        cells.append(f"{values.mean():.3f} [{ends[0]:.3f}, {ends[1]:.3f}]")
    label = label if label.startswith("$") else f"$k = 10${label}"
    assert signed(f"| {label} | {' | '.join(cells)} |") in page


def test_the_page_says_what_other_orders_of_the_units_give(page):
    """An order is one draw: means over texts, and intervals over orders."""
    cells, ranges = [], []
    for table in committed("units"):
        by_order = table.pivot(index="order", columns="text", values="coupling")
        means = by_order.drop("none").mean(axis=1)
        assert means.shape == (20,)
        assert by_order.shape == (21, 20)
        half = stats.t.ppf(0.975, 19) * means.std() / 20**0.5
        low, high = means.mean() - half, means.mean() + half
        cells.append(f"{means.mean():.3f} [{low:.3f}, {high:.3f}]")
        ranges.append(f"{means.min():.3f} to {means.max():.3f}")
    label = "$k = 10$, in units of the sizes of other dimensions (20 random orders)"
    assert signed(f"| {label} | {' | '.join(cells)} |") in page
    text = " ".join(page.split())
    assert signed(f"{ranges[0]} in SmolLM2 and {ranges[1]} in Gemma") in text


def test_the_first_order_of_the_units_is_that_of_the_norms():
    for norms, units in zip(committed("norms"), committed("units"), strict=True):
        shuffled = norms.set_index("text")["shuffled units"].dropna()
        first = units[units["order"].astype(str) == "0"].set_index("text")["coupling"]
        pandas.testing.assert_series_equal(
            first.sort_index(), shuffled.sort_index(), check_names=False, atol=2e-5
        )


def test_the_page_says_what_the_committed_noise_gives(page, capsys):
    tables = committed("noise")
    for (change, size), _ in tables[0].groupby(["change", "size"]):
        cells = []
        for table in tables:
            chosen = table[(table["change"] == change) & (table["size"] == size)]
            means = chosen[["loss", "coupling"]].mean()
            cells += [f"{means['loss']:.2f}", f"{means['coupling']:.3f}"]
        label = {"none": "none", "noise": f"noise {size:g}"}.get(
            change, f"louder × {size:g}"
        )
        assert f"| {label} | {' | '.join(cells)} |" in page
    real_models.show_noise(dict(zip(MODELS, tables, strict=True)))
    slopes = re.findall(r"at one size of noise: (\S+ \[.+?\])", capsys.readouterr().out)
    assert len(slopes) == 2
    text = " ".join(page.split())
    assert f"in SmolLM2: {signed(slopes[0])} per nat" in text
    assert f"it is {signed(slopes[1])}, r = −.17" in text
    for table, said in zip(tables, ("r = −.48", "r = −.17"), strict=True):
        noisy = table[table["change"] == "noise"]
        groups = noisy.groupby("size")[["loss", "coupling"]]
        r = (noisy[["loss", "coupling"]] - groups.transform("mean")).corr().iloc[0, 1]
        assert said == signed(f"r = {r:.2f}".replace("0.", "."))
        assert said in text


def test_the_page_says_what_the_committed_prompts_give(page, capsys):
    real_models.show_prompts(dict(zip(MODELS, committed("prompts"), strict=True)))
    printed = capsys.readouterr().out
    labels = {
        "over all": "nothing",
        "within tasks": "the task",
        "within tasks, length fixed": "the task, and the logarithm of the length",
    }
    for name, label in labels.items():
        slopes = re.findall(rf"  {name}: (\S+ \[.+?\])", printed)
        assert len(slopes) == 2
        assert signed(f"| {label} | {' | '.join(slopes)} |") in page
    within = re.findall(r"  within tasks: .+ as a correlation (\S+ \[.+?\])", printed)
    text = " ".join(page.split())
    assert len(within) == 2
    for said, model in zip(within, ("SmolLM2", "Gemma"), strict=True):
        assert f"{signed(said.replace('0.', '.'))} in {model}" in text


def test_correlations_are_those_of_residuals_of_statsmodels(capsys):
    rng = np.random.default_rng(1)
    task = np.repeat(["a", "b", "c"], 20)
    loss = rng.standard_normal(60) + (task == "b")
    coupling = 0.4 * loss + rng.standard_normal(60) + (task == "a")
    table = pandas.DataFrame({"task": task, "loss": loss, "coupling": coupling})
    real_models.show_prompts({"made-up": table.assign(n_tokens=rng.integers(5, 9, 60))})
    fits = [formulas.ols(f"{y} ~ C(task)", table).fit() for y in ("loss", "coupling")]
    r = np.corrcoef(fits[0].resid, fits[1].resid)[0, 1]
    printed = capsys.readouterr().out
    assert re.search(rf"  within tasks: .+ as a correlation \{r:+.2f} \[", printed)


@pytest.mark.long("measures models of a study")
def test_parts_that_are_there_are_not_run_again(
    folder_model, tmp_path, monkeypatch, capsys
):
    for name, few in {
        "N_OF_TASK": 6,
        "N_SEEDS": 2,
        "N_TEXTS": 1,
        "N_TEXTS_OF_NOISE": 1,
        "N_TEXTS_OF_LOSS": 1,
        "N_ORDERS": 3,
        "DOSES": (0.1, 0.2, 0.3),
        "LOUDNESS": (2.0,),
        "KS": (2, 10),
    }.items():
        monkeypatch.setattr(real_models, name, few)
    monkeypatch.setattr(real_models, "distinct_texts", lambda n: ["w1 w2 w3 w4 w5"])
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": f"w{i} w2 w3 w{i + 3}" + " w9" * (i % 5), "task": "ab"[i % 2]}
        for i in range(1, 15)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = ["real_models", "--models", str(folder_model), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*command, "--prompts", str(prompts)])
    real_models.main()
    first = capsys.readouterr().out
    files = sorted(tmp_path.glob("*.csv"))
    assert len(files) == 4
    assert "louder" in first
    assert "standard units" in first
    assert "the size of another dimension, 3 orders" in first
    monkeypatch.setattr(tlc, "load_model", None)
    real_models.main()
    assert capsys.readouterr().out == first


def test_a_table_of_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["real_models.py", "--table", "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as stopped:
        real_models.main()
    assert stopped.value.code == 2
    assert "there are no results in" in capsys.readouterr().err
