"""The study of what coupling is made of: its changes on Jacobians that are known."""

import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import composition
import tiny
import tl_coupling as tlc

K = 4


@pytest.fixture(scope="module")
def traces(tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    return [tlc.trace(model, f"w{i} w{i + 3} w{2 * i} w7") for i in range(12)]


@pytest.fixture(scope="module")
def changed(traces):
    J = tlc.block_jacobians(traces[0])
    metric = tlc.measures.stream_metric(traces[1:], 0.01)
    generator = torch.Generator().manual_seed(0)
    return J, metric, composition.changes(J, metric, traces[1:], generator)


def test_what_is_left_without_large_directions_is_orthogonal_to_them(traces, changed):
    J, _, changes = changed
    rest = changes["without large directions"]
    rows = np.concatenate([t.residual[:, 1:].flatten(0, 1).numpy() for t in traces[1:]])
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    largest = np.argsort((unit**2).mean(0))[-composition.N_LARGEST :]
    assert rest[:, largest].abs().max() < 1e-5
    assert rest[:, :, largest].abs().max() < 1e-5
    mean = torch.from_numpy(unit.mean(0))
    assert (rest @ mean).abs().max() < 1e-5
    assert (mean @ rest).abs().max() < 1e-5
    assert torch.linalg.matrix_rank(rest).tolist() == [
        J.shape[-1] - composition.N_LARGEST - 1
    ] * len(J)


def test_turned_blocks_keep_their_singular_values_and_identity_alone_its_multiple(
    changed,
):
    J, _, changes = changed
    torch.testing.assert_close(
        torch.linalg.svdvals(changes["turned"]), torch.linalg.svdvals(J)
    )
    multiples = J.diagonal(dim1=1, dim2=2).mean(1)
    rest = changes["identity alone"] - multiples[:, None, None] * torch.eye(J.shape[-1])
    torch.testing.assert_close(
        torch.linalg.svdvals(rest), torch.linalg.svdvals(changes["without identity"])
    )


def test_planted_blocks_are_alike_in_the_metric_alone(changed):
    _, _, changes = changed
    whitened = tlc.comparisons.jacobian_coupling(changes["planted, whitened"], K)
    assert whitened.mean() > 0.99
    raw = tlc.comparisons.jacobian_coupling(changes["planted"], K)
    assert raw.mean() < whitened.mean()


def test_tokens_count_the_same_without_the_first(traces):
    alike = list(composition.tokens_alike(traces))
    for trace, changed in zip(traces, alike, strict=True):
        assert changed.residual.shape[1] == trace.n_pos - 1
        np.testing.assert_allclose(
            np.linalg.norm(changed.residual, axis=-1), 1, rtol=1e-5
        )
        cosines = (changed.residual * trace.residual[:, 1:]).sum(-1)
        np.testing.assert_allclose(
            cosines, np.linalg.norm(trace.residual[:, 1:], axis=-1), rtol=1e-5
        )
    squares = [trace.residual.double().square().sum((0, 2)).numpy() for trace in traces]
    share = sum(s[0] for s in squares) / sum(s.sum() for s in squares)
    assert composition.share_of_first_tokens(traces) == pytest.approx(share)


def test_parts_of_a_model_are_one_table(tmp_path):
    for name, change in (("a-tokens-alike", "later"), ("a", "first"), ("b", "first")):
        row = pandas.DataFrame({"change": [change]})
        row.to_csv(tmp_path / f"{name}.csv", index=False)
    tables = composition.read_tables(tmp_path)
    assert list(tables) == ["a", "b"]
    assert tables["a"]["change"].tolist() == ["first", "later"]


@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
def test_blocks_that_normalise_are_those_of_bert(tokenizer_folder, traces):
    assert not composition.normalises(traces[0])
    model = tiny.bridge(tiny.huggingface_model("bert"), tokenizer_folder)
    assert composition.normalises(tlc.trace(model, "w1 w2 w3"))


def test_overlap_of_pairs_is_minus_1_for_blocks_that_erase():
    J = -torch.diag(torch.linspace(1, 2, 16)).expand(3, 16, 16)
    assert composition.mean_overlap_of_pairs(J) == pytest.approx(-1)


def test_tables_say_where_whitening_lies_among_turned_metrics():
    rows = []
    for text in ("a", "b"):
        for change, value in (("raw", 0.2), ("without identity", 0.1)):
            rows.append((text, change, 0, value))
        rows.append((text, composition.WHITENED, 0, 0.01))
        rows += [
            (text, composition.AT_RANDOM, draw, 0.05 + 0.001 * draw)
            for draw in range(20)
        ]
    names = ["text", "change", "draw", "coupling"]
    table = pandas.DataFrame(rows, columns=names).assign(model="trained")
    said = composition.beside_random_metrics(table)
    assert "p that whitening is no lower: 0.048" in said
    assert "(0.0500 to 0.0690)" in said
    # One draw below it.
    low = (table["change"] == composition.AT_RANDOM) & (table["draw"] == 3)
    table.loc[low, "coupling"] = 0.0
    assert "lower: 0.095" in composition.beside_random_metrics(table)
    assert composition.share_of_identity(table).endswith("0.5")


def test_the_page_has_the_committed_numbers():
    """Recomputed from the tables by pandas and scipy alone."""
    folder = Path(composition.__file__).parent / "results" / "composition"
    page = (Path(__file__).parents[2] / "docs/findings/composition.md").read_text()
    section = page.partition("\n---\n")[2]
    rows = {
        "as they are": "raw",
        "without multiples of the identity": "without identity",
        "and without the mean direction and the eight largest dimensions": "without "
        "large directions",
        "in the metric in which the stream is isotropic": "whitened",
        "the same, with ten times the shrinkage": "whitened, shrinkage 0.1",
        "the same, of all tokens but the first, each at length 1": "whitened, tokens "
        "alike",
        "in the metric of the second moment itself": "in the second moment",
        "turned at random, with their multiples of the identity put back": "identity "
        "alone",
        "turned at random": "turned",
    }
    read = composition.read_tables(folder)
    tables = [
        read[name]
        for name in ("smollm2-135m", "gemma-3-270m-q4_k_m", "all-MiniLM-L6-v2")
    ]
    qwen = read["qwen2.5-coder-0.5b-instruct-q4_k_m"]
    in_order = [*tables[:2], qwen, tables[2]]

    def said(values: pandas.Series) -> str:
        if values.empty:
            return "–"
        low, high = stats.ttest_1samp(values, 0).confidence_interval()
        text = f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"
        return text.replace("-0.000", "0.000").replace("-", "−")

    for name, change in rows.items():
        cells = []
        for table in in_order:
            is_meant = (table["model"] == "trained") & (table["change"] == change)
            cells.append(said(table[is_meant]["coupling"]))
        assert f"| {name} | {' | '.join(cells)} |" in section
    text = " ".join(section.split())
    for table, change, whitened, turned in (
        (tables[0], "whitened", ".013", ".008 (.001 to .021)"),
        (tables[1], "whitened", ".006", ".055, from .036 to .078"),
        (tables[2], "whitened", ".076", ".076 (.049 to .107)"),
        (qwen, "whitened", ".021", ".065 (.044 to .088)"),
        (tables[0], "whitened, tokens alike", ".017", ".009 (.005 to .013)"),
        (tables[1], "whitened, tokens alike", ".006", ".040 (.010 to .063)"),
        (tables[2], "whitened, tokens alike", ".085", ".074 (.044 to .095)"),
    ):
        drawn = table[table["change"] == composition.ROTATIONS_OF[change]]
        means = drawn.groupby("draw")["coupling"].mean()
        assert len(means) == 20
        numbers = re.findall(r"\.\d+", turned)
        found = [means.mean(), means.min(), means.max()]
        assert [f"{x:.3f}"[1:] for x in found] == numbers
        same = (
            (table["model"] == "trained")
            & (table["change"] == change)
            & table["text"].isin(drawn["text"])
        )
        assert f"{table[same]['coupling'].mean():.3f}"[1:] == whitened
        assert whitened in text
        assert turned in text
    untrained = [table[table["model"] == "untrained"] for table in tables]
    of_qwen = qwen[qwen["model"] == "untrained"]
    for table in (*untrained[:2], of_qwen):
        means = table.groupby("change")["coupling"].mean()
        shown = means.reindex(rows.values()).dropna()
        assert shown.abs().max() < 0.002
    for change in ("whitened", "whitened, tokens alike"):
        of_twin = untrained[2][untrained[2]["change"] == change]["coupling"]
        assert said(of_twin).replace("0.", ".") in text
    normalising = tables[2][tables[2]["change"] == "block(X) − X"]
    for _, values in normalising.groupby("model")["coupling"]:
        assert f"{values.mean():.3f}"[1:] in text
    firsts = [t[t["change"] == "share of the first tokens"] for t in tables]
    shares = [t[t["model"] == "trained"]["coupling"].mean() for t in firsts]
    said_of_shares = [f"{share:.3f}"[1:] for share in shares]
    assert (
        "{} of it in SmolLM2, {} in Gemma and {} in MiniLM".format(*said_of_shares)
        in text
    )
    assert composition.share_of_identity(tables[2]).endswith("0.2927 [0.2784, 0.3071]")
    assert "In MiniLM it is 29 % [28, 31], and the multiples make .104" in text
    assert composition.share_of_identity(qwen).endswith("0.6368 [0.5995, 0.6742]")
    assert "In Qwen2.5-Coder it is 64 % [60, 67], and the multiples make .197" in text


def test_the_picture_shows_the_means_of_the_committed_tables():
    """Trained models' points, from the top: by pandas alone."""
    folder = Path(composition.__file__).parent / "results" / "composition"
    figure = composition.draw(composition.read_tables(folder))
    for ax, path in zip(
        figure.axes,
        sorted(p for p in folder.glob("*.csv") if "alike" not in p.stem),
        strict=True,
    ):
        table = pandas.read_csv(path).query("model == 'trained'")
        means = table.groupby("change")["coupling"].mean()
        points = ax.containers[0].lines[0].get_xdata()
        assert points == pytest.approx([means[change] for change in composition.DRAWN])
