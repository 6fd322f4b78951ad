"""The pictures of README and findings: all are drawn by one script, those of committed
results show them.
"""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import scipy.stats
import torch
import xarray
from matplotlib.colors import to_hex

import capacity_report
import finding_cards
import gap_report
import ladder
import pictures
import tl_coupling as tlc
from drawn_texts import mixed_up, smallest_letters, unreadable
from findings import findings
from tl_coupling.results import CONTROLS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_show_what_the_script_draws() -> None:
    shown = re.findall(r"(?:\]\(|:img-top: )(?:\.\./)?(.+?\.png)", findings())
    assert {*shown, "coupling.png"} == set(pictures.PICTURES)
    assert all((DOCS / name).exists() for name in pictures.PICTURES)


@pytest.mark.parametrize("side", [0, 1])
def test_bars_are_the_committed_changes_in_loss(side: int) -> None:
    ax = pictures.ablation().axes[side]
    name = f"smollm2-135m-{('read', 'write')[side]}-1.csv"
    path = pictures.RESULTS / "shared_directions" / name
    table = pandas.read_csv(path).set_index("kind")["loss_change"]
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == table[list(pictures.CONTROLS)].tolist()


def test_the_page_says_what_removals_from_gemma_cost() -> None:
    page = findings()
    folder = pictures.RESULTS / "shared_directions"
    tables = [
        pandas.read_csv(folder / f"gemma-3-270m-q4_k_m-{side}-1.csv").set_index("kind")
        for side in ("read", "write")
    ]
    for kind in tables[0].index:
        rows = [table.loc[kind] for table in tables]
        cells = [
            f"{row['loss_change']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
            for row in rows
        ]
        assert f"| {' | '.join(cells)} |".replace("-", "−") in page
    read, write = tables
    for row in (read.loc["unshared"], write.loc["unshared"], write.loc["span"]):
        of_control = row.filter(like="shared_less_this")
        middle, low, high = (f"{value:.2f}" for value in of_control)
        assert f"{middle} [{low}, {high}]".replace("-", "−") in page


def test_the_page_says_what_the_committed_surge_gives() -> None:
    page = " ".join(findings().split())
    page = page.partition("`make surge` asks why")[2].partition("Measurements and")[0]
    table = pandas.read_csv(pictures.RESULTS / "surge" / "measured.csv")

    def mean(variant: str, column: str, step: int) -> float:
        rows = table[(table["variant"] == variant) & (table["checkpoint"] == step)]
        return float(rows[column].mean())

    of_base = table[table["variant"] == "base"].pivot(
        index="checkpoint", columns="run", values="coupling"
    )
    peaks, ends = of_base.max(), of_base.loc[512]
    for values in (peaks, ends):
        said = f"{values.mean():.3f} [{values.min():.3f}, {values.max():.3f}]"
        assert said.replace("0.", ".") in page
    said_of = {
        ("base", "coupling_without_shared_5", 16): "coupling at step 16 is {}",
        ("base", "coupling", 16): "with them {}",
        ("base", "coupling_without_shared_5", 4): "{} of",
        ("base", "coupling", 4): "of {} at step 4",
        ("base", "coupling_without_shared_map", 16): "{} stays at step 16",
        ("own feedback", "coupling", 32): "at chance ({} at step 32",
        ("one wrong feedback", "coupling", 32): "surges as before ({})",
        ("own coordinates", "coupling", 32): "surges too ({})",
        ("learning rate 0.0005", "coupling", 256): "learning rate ({}",
        ("learning rate 0.0005", "coupling", 512): "then {})",
    }
    for place, words in said_of.items():
        assert words.format(f"{mean(*place):.3f}".replace("0.", ".")) in page
    losses = {
        "one wrong feedback": "({} nats",
        "own feedback": "own gradients {}",
        "base": "true gradient {}",
    }
    for variant, words in losses.items():
        assert words.format(f"{mean(variant, 'loss', 32):.2f}") in page


def test_the_page_says_what_the_committed_ladder_gives() -> None:
    page = " ".join(findings().split()).replace("−", "-")
    report = (pictures.RESULTS / "ladder" / "report.txt").read_text()
    slope, low, high, r_squared = re.search(
        r"slope (\S+) \((\S+) to (\S+)\), R² = ([\d.]+)", report
    ).groups()
    said = f"+{float(slope):.2f} [{float(low):.2f}, {float(high):.2f}] nats"
    assert said in page
    assert f"$R^2$ = {r_squared.lstrip('0')}. With" in page
    given_all = re.search(r"given log10\(n_parameters\) \+ n_layers.+", report)[0]
    slope, low, high = (float(cell) for cell in given_all.split()[9:12])
    assert f"({slope:.2f} [{low:.2f}, {high:.2f}])" in page

    path = pictures.RESULTS / "ladder" / "redundancy-smollm2-135m.nc"
    correlations = tlc.redundancy.redundancy_correlations(xarray.load_dataset(path))
    names = ["a block dropped", "neighbours swapped", "neighbours merged"]
    at_30 = []
    for change, name in zip(correlations.change.values, names, strict=True):
        cells = [name]
        for predictor in ("coupling", "block_influence"):
            for blocks in ("all", "inner"):
                of_blocks = correlations.sel(change=change, blocks=blocks, k=10)
                rho = float(of_blocks[predictor])
                low, high = of_blocks[f"{predictor}_interval"].values
                cells.append(f"{rho:+.2f} [{low:+.2f}, {high:+.2f}]")
        assert f"| {' | '.join(cells)} |" in page
        of_all = correlations.sel(change=change, blocks="all", k=30)
        at_30.append(f"{float(of_all.coupling):.2f}")
    assert f"({', '.join(at_30[:2])} and {at_30[2]})" in page


def test_the_page_says_what_the_committed_gains_give() -> None:
    page = " ".join(findings().split()).replace("−", "-")
    table = pandas.read_csv(pictures.RESULTS / "gains" / "measured.csv")
    trained, untrained = (
        table[table["model"] == f"smollm2-135m@{name}"]
        for name in ("main", "untrained")
    )
    assert len(trained) == len(untrained) == 24
    by_task = trained.groupby("task")["gain"].mean()
    for values, said in (
        (trained["gain"], "+.33 nats (95 % t interval over prompts +.18 to +.47"),
        (by_task, "over the six tasks +.05 to +.60"),
        (untrained["gain"], "-.001 [-.014, +.013]"),
    ):
        assert said in page
        mean = values.mean()
        half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.sem()
        numbers = re.findall(r"[+-]\.\d+", said)
        expected = [mean, mean - half, mean + half][-len(numbers) :]
        assert [float(number) for number in numbers] == pytest.approx(
            expected, abs=0.006
        )
    assert int((trained["low"] > 0).sum()) == 13
    assert int((trained["high"] < 0).sum()) == 1
    assert f"gsm8k has {by_task['gsm8k']:.2f}".replace("0.", ".") in page


def test_the_page_says_what_the_committed_capacities_give() -> None:
    """The table of slopes at all levels of the other factor."""
    table = pandas.read_csv(pictures.RESULTS / "capacity" / "measured.csv")
    slopes = capacity_report.slopes(table)
    of_all = slopes[slopes["at"] == "all"].set_index(["mark", "of", "size"])
    page = findings()
    assert f"all {len(slopes)} are simultaneous" in page
    for mark in slopes["mark"].unique():
        cells = []
        for factor in ("width", "learning_rate"):
            for size in ("K = 8", "K = d/8"):
                row = of_all.loc[mark, factor, size]
                interval = f"[{row['low_all']:.3f}, {row['high_all']:.3f}]"
                cells.append(f"{row['slope']:.3f} {interval}")
        expected = f"| {mark} | {' | '.join(cells)} |".replace("-", "−")
        assert expected in page


def test_the_page_says_what_the_committed_gaps_give() -> None:
    """The table of slopes, and each number of the levels that it speaks of."""
    table = pandas.read_csv(pictures.RESULTS / "gap" / "measured.csv")
    effects = gap_report.effects(table).set_index(["question", "mark"])
    page = findings()
    adjusted = gap_report.effects(table, gap_report.ADJUSTMENTS)
    adjusted = adjusted.set_index(["question", "mark"])
    asked = list(gap_report.QUESTIONS.values())
    for name, question in {**gap_report.QUESTIONS, **gap_report.ADJUSTMENTS}.items():
        is_adjustment = name in gap_report.ADJUSTMENTS
        if not is_adjustment and question.y == "gap" and question.x == "coupling":
            continue
        rows = adjusted if is_adjustment else effects
        cells = []
        for mark in gap_report.marks_in(table):
            row = rows.loc[name, mark]
            interval = f"[{row['slope_low']:.2f}, {row['slope_high']:.2f}]"
            cells.append(f"{row['slope']:.2f} {interval} | {row['vif']:.1f}")
        # Those that the study asked for are in italics.
        label = f"*{name}*" if is_adjustment and question in asked else name
        expected = f"| {label} | {' | '.join(cells)} |".replace("-", "−")
        assert expected in page


def test_the_page_says_what_is_left_of_coupling_given_depth() -> None:
    page = (DOCS / "findings" / "redundancy.md").read_text()
    data = xarray.load_dataset(
        pictures.RESULTS / "ladder" / "redundancy-smollm2-135m.nc"
    )
    left = ladder.given_depth(data, 10)
    report = (pictures.RESULTS / "ladder" / "report.txt").read_text()
    assert left.to_string(float_format="{:+.3f}".format) in report
    names = ["a block dropped", "neighbours swapped", "neighbours merged"]
    for name, (_, row) in zip(names, left.iterrows(), strict=True):
        cells = [
            name,
            f"{row['rho']:+.2f}",
            f"{row['p_shift']:.2f}",
            f"{row['given_middle']:+.2f} (p {row['p_middle']:.2f})",
            f"{row['given_influence']:+.2f} (p {row['p_influence']:.2f})",
        ]
        assert f"| {' | '.join(cells)} |".replace("-", "−") in page
    # Block 11 and the last, by coupling from below and by cost from above.
    means = data.sel(k=10).mean("prompt")
    coupling_ranks = scipy.stats.rankdata(means["coupling_with_others"])
    cost_ranks = scipy.stats.rankdata(-means["loss_dropped"])
    assert (coupling_ranks[11], cost_ranks[11]) == (29, 2)
    assert (coupling_ranks[29], cost_ranks[29]) == (9, 4)
    t = scipy.stats.t.ppf(0.975, 27)
    assert f"{t / (27 + t**2) ** 0.5:.2f}"[1:] + " is not significant" in page


def test_the_page_says_how_many_fold_coupling_differs_at_one_loss() -> None:
    """From the lowest to the highest learning rate, for each width."""
    text = " ".join(findings().split())
    table = pandas.read_csv(pictures.RESULTS / "capacity" / "measured.csv")
    of_size = table[table["size"] == "K = 8"]
    for mark, words in {
        "bigram": "coupling itself differs {value}.",
        "50% of the way": "Half way there both differ {value},",
        "75% of the way": "coupling differs {value} and {above_chance} above chance",
        "bigram − 0.2": "loss {value} and {above_chance} above chance",
    }.items():
        means = of_size[of_size["mark"] == mark].pivot_table(
            index="width", columns="learning_rate", values=["value", "above_chance"]
        )
        folds = {}
        for column in ("value", "above_chance"):
            ratios = means[column][0.001] / means[column][0.008]
            digits = 0 if ratios.max() > 10 else 1
            low, high = (f"{end:.{digits}f}" for end in (ratios.min(), ratios.max()))
            folds[column] = f"{low}- to {high}-fold"
        assert words.format(**folds) in text


def test_the_page_says_what_removals_on_the_write_side_leave() -> None:
    page = (DOCS / "findings" / "directions.md").read_text()
    text = " ".join(page.split())
    folder = pictures.RESULTS / "shared_directions"
    written = pandas.read_csv(folder / "smollm2-135m-write-1.csv").set_index("kind")
    uniform = np.log(pictures.VOCABULARY) - written["loss"].iloc[0]
    assert f"{uniform:.2f} nats (the loss is {written['loss'].iloc[0]:.2f})" in text
    assert (written.loc[["shared", "principal"], "loss_change"] > uniform).all()
    fewer = pandas.read_csv(folder / "smollm2-135m-write-1-every-3.csv")
    fewer = fewer.set_index("kind")
    assert (fewer["loss_change"] < uniform).all()
    numbers = fewer.loc["principal"].filter(like="shared_less_this")
    middle, low, high = (f"{value:.2f}" for value in numbers)
    said = (
        f"{fewer.loc['shared', 'loss_change']:.2f} nats, principal directions "
        f"{fewer.loc['principal', 'loss_change']:.2f}, a difference of "
        f"{middle} [{low}, {high}]"
    )
    assert said.replace("-", "−") in text
    for kind, name in (
        ("span", "random ones in the span of activations"),
        ("unshared", "unshared ones of the same gain"),
    ):
        assert f"{name} {fewer.loc[kind, 'loss_change']:.2f}" in text
    of_gemma = pandas.read_csv(folder / "gemma-3-270m-q4_k_m-write-1.csv")
    span = of_gemma.set_index("kind").loc["span"]
    said = f"lie between {span['draws_low']:.2f} and {span['draws_high']:.2f}"
    assert said in text


def test_pages_figures_and_tables_have_one_name_for_each_control() -> None:
    page = (DOCS / "findings" / "directions.md").read_text()
    rows = re.findall(r"^\| ([a-z][a-z, ]+) \| [−\d]", page, flags=re.MULTILINE)
    names = {*CONTROLS.values(), *(f"minus {name}" for name in CONTROLS.values())}
    assert len(rows) > 10
    assert {row for row in rows if not row.startswith("the ten")} <= names


# What these draw is measured when they are drawn, on SmolLM2.
MEASURED = (
    *("coupling.png", "pictures/carriers.png", "pictures/heads.png"),
    *("pictures/products.png", "pictures/card-depth.png"),
    "pictures/card-heads-and-mlps.png",
)


@pytest.mark.parametrize("name", sorted({*pictures.PICTURES} - {*MEASURED}))
def test_pictures_of_committed_results_can_be_read_on_a_telephone(name: str) -> None:
    figure = pictures.PICTURES[name]()
    assert unreadable(figure) == []
    assert smallest_letters(figure, 358) >= 9
    assert mixed_up(figure) == []


@pytest.mark.parametrize("name", MEASURED)
def test_pictures_of_a_model_can_be_read_on_a_telephone(
    name: str, tiny_trace: tlc.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in (pictures, finding_cards):
        monkeypatch.setattr(script, "K", 4)
    for function, made in (("load_model", None), ("trace", tiny_trace)):
        monkeypatch.setattr(tlc, function, lambda *_, made=made, **__: made)
    figure = pictures.PICTURES[name]()
    assert unreadable(figure) == []
    assert smallest_letters(figure, 358) >= 9
    assert mixed_up(figure) == []


def test_the_title_of_rotations_holds_in_every_row() -> None:
    """Together less apart, by Holm's correction over all twelve differences: what the
    title says of each side.
    """
    means, ps = {}, {}
    for side in ("write", "read", "both"):
        rows = pandas.read_csv(pictures.RESULTS / "rotation" / f"{side}.csv")
        losses = rows.pivot_table("loss_change", ["angle", "text"], "kind")
        for angle, of_texts in (losses["together"] - losses["apart"]).groupby("angle"):
            means[side, angle] = of_texts.mean()
            ps[side, angle] = scipy.stats.ttest_1samp(of_texts, 0).pvalue
    # Holm 1979: the smallest p times all, the next times one less, and so on.
    shown, n_left = set(), len(ps)
    assert n_left == 12
    for difference in sorted(ps, key=ps.__getitem__):
        if ps[difference] * n_left > 0.05:
            break
        shown.add(difference)
        n_left -= 1
    outcomes = {
        side: {
            angle: int(np.sign(means[side, angle])) if (side, angle) in shown else 0
            for angle in (10, 20, 45, 90)
        }
        for side in ("write", "read", "both")
    }
    less = {10: -1, 20: -1, 45: -1}
    assert outcomes["read"] == less | {90: 1}
    assert outcomes["both"] == less | {90: 0}
    assert outcomes["write"] == {10: 0, 20: 0, 45: -1, 90: 1}
    said = " ".join(pictures.rotation().get_suptitle().replace("·", "").split())
    assert "Where reads turn, one rotation" in said
    assert "less than one each, to 45°" in said
    assert "nothing shown at 10° and 20°, less at 45°, more at 90° (by Holm)" in said


def test_widths_have_one_look_on_the_card_and_on_its_page() -> None:
    card = finding_cards.generalization().axes[0]
    page = pictures.capacity().axes[0]
    looks = [
        {
            line.get_label(): (line.get_color(), line.get_marker())
            for line in ax.lines
            if line.get_label().startswith("width")
        }
        for ax in (card, page)
    ]
    assert len(looks[0]) == 3
    assert looks[0] == looks[1]


def test_shared_directions_have_one_colour_on_the_card_and_on_their_page() -> None:
    (card,) = finding_cards.directions().axes
    of_card = {line.get_label(): line.get_color() for line in card.lines}
    for ax in pictures.ablation().axes:
        assert (
            to_hex(ax.patches[0].get_facecolor()).upper() == of_card[CONTROLS["shared"]]
        )


def test_every_text_is_counted_for_each_model() -> None:
    for ax in pictures.paths().axes[:2]:
        counts = [sum(bar.get_height() for bar in bars) for bars in ax.containers]
        assert counts == [40, 40]


def test_the_card_of_composition_shows_the_committed_means() -> None:
    """With and without multiples of the identity, and untrained, from the top down."""
    folder = pictures.RESULTS / "composition"
    paths = sorted(path for path in folder.glob("*.csv") if "alike" not in path.stem)
    (ax,) = finding_cards.composition().axes
    points = [float(container.lines[0].get_xdata()[0]) for container in ax.containers]
    expected = []
    for model, change in (
        ("trained", "raw"),
        ("trained", "without identity"),
        ("untrained", "raw"),
    ):
        for path in reversed(paths):
            table = pandas.read_csv(path)
            is_shown = (table["model"] == model) & (table["change"] == change)
            expected.append(table.loc[is_shown, "coupling"].mean())
    assert points == pytest.approx(expected)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Gemma-3-270M", "MiniLM-L6"]


def test_the_card_of_depth_clips_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a twin's noise is dark beside the strongest pair."""
    n_layers = 30
    layers = tuple(range(n_layers))
    results = []
    generator = torch.Generator().manual_seed(0)
    sizes = n_layers, n_layers, finding_cards.K, finding_cards.K
    for diagonal in (20.0, 0.0):
        A = torch.randn(sizes, generator=generator)
        results.append(
            tlc.CouplingMap(
                matrices=A + diagonal * torch.eye(finding_cards.K),
                singular_values=torch.full((n_layers, finding_cards.K), 50.0),
                frobenius_norms=torch.full((n_layers,), 500.0),
                d_model=64,
                row_layers=layers,
                col_layers=layers,
                row_positions=(9,) * n_layers,
                col_positions=(9,) * n_layers,
                kind="depth",
                orientation="ujv",
                provenance={},
            )
        )
    given = iter(results)
    for name in ("load_model", "trace"):
        monkeypatch.setattr(tlc, name, lambda *_, **__: None)
    monkeypatch.setattr(tlc, "depth_coupling", lambda *_, **__: next(given))
    images = [image for ax in finding_cards.depth().axes for image in ax.images]
    drawn = [image.get_array().filled(np.nan) for image in images]
    assert np.nanmax(drawn[0]) > 0.6
    for image in images:
        assert image.get_clim() == pytest.approx((0, np.nanmax(drawn)))
