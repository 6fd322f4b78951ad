"""The sections of a report that are there only where they were asked for."""

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny
import tl_coupling as tlc
from blank_pictures import unrendered
from html_reader import Reader
from tl_coupling.report import html_report

ASKED = {"with_carriers": True, "with_products": True, "decoded_layer": 0}
SECTIONS = ["what-carries-coupling", "blocks-together", "directions"]


@pytest.fixture(scope="module")
def runs(tokenizer_folder: Path) -> dict[str, tlc.portraits.Portrait]:
    models = {
        "trained": tiny.huggingface_model("llama", 0),
        "untrained": tiny.huggingface_model("llama", 1),
    }
    return {
        name: tlc.portrait(
            tlc.trace(tiny.bridge(model, tokenizer_folder), tiny.TOKENS),
            k=(4,),
            **ASKED,
        )
        for name, model in models.items()
    }


@pytest.fixture(scope="module", autouse=True)
def _unrendered() -> Iterator[None]:
    """Only text is looked at."""
    with unrendered():
        yield


@pytest.fixture(scope="module")
def page(runs: dict[str, tlc.portraits.Portrait], _unrendered: None) -> str:
    return html_report(runs)


def section_of(page: str, name: str) -> str:
    return page.split(f'<section id="{name}">')[1].split("</section>")[0]


@pytest.mark.long("measures all that a report may hold")
def test_sections_are_there_where_they_were_asked_for(page, runs):
    read = Reader(page)
    assert read.open == [""]
    ids = [attributes.get("id") for attributes in read.all("section")]
    assert [name for name in ids if name in SECTIONS] == SECTIONS
    links = [attributes.get("href") for attributes in read.all("a")]
    assert {f"#{name}" for name in SECTIONS} <= set(links)
    plain = {
        name: replace(run, carriers=None, products=None, decoded=None)
        for name, run in runs.items()
    }
    without = html_report(plain)
    assert not any(f'id="{name}"' in without for name in SECTIONS)
    assert not any(f"#{name}" in without for name in SECTIONS)


def test_runs_must_have_the_same_sections(runs):
    first, second = runs.values()
    with pytest.raises(ValueError, match="'b' must have the same parts, got \\['carr"):
        html_report({"a": first, "b": replace(second, decoded=None)})


def test_shares_are_those_of_the_results(page, runs):
    section = section_of(page, "what-carries-coupling")
    for name, run in runs.items():
        merged = run.carriers.by_branch()
        for i, label in enumerate(merged.labels):
            row = re.search(
                rf"<tr><th[^>]*>{label}, {name}</th>(.+?)</tr>", section
            ).group(1)
            low, high = merged.null_interval(label)
            assert re.findall("<td>(.+?)</td>", row) == [
                f"{float(merged.mean('diagonal_share')[i]):.3f}",
                f"{float(merged.mean('jacobian_share')[i]):.3f}",
                f"{float(merged.mean()[i]):+.3f}",
                f"{low:+.3f} to {high:+.3f}",
            ]
    assert section.count("<img") == 3


def test_products_are_those_of_the_results(page, runs):
    section = section_of(page, "blocks-together")
    for run in runs.values():
        assert f"log σ₁ is {float(run.products.log_largest[-1]):.2f} after 2" in section
        low, high = run.products.null_interval[-1].tolist()
        assert f"turned blocks have {low:.2f} to {high:.2f}" in section


def test_directions_show_both_ends_of_each(page, runs):
    decoded = runs["trained"].decoded
    section = section_of(page, "directions")
    cards = section.split('<div class="direction">')[1:]
    assert len(cards) == len(decoded.gains) == 6
    network = decoded.ways.index("network")
    for i, card in enumerate(cards):
        ends = re.findall(r"<dt>writes .</dt><dd>(.+?)</dd>", card)
        shown = [re.findall("<code>(.*?)</code>", end) for end in ends]
        assert [list(map(html.unescape, tokens)) for tokens in shown] == [
            [text.strip() or "␣" for text in decoded.texts_of(network, i, end)[:8]]
            for end in (0, 1)
        ]
        component = int(decoded.reads[i].abs().argmax())
        largest = f"{decoded.components[component]} {decoded.reads[i, component]:+.2f}"
        assert f"<dt>reads</dt><dd>{largest}" in card
        assert f"σ = {float(decoded.gains[i]):.2f}" in card
        assert "one group with" not in card


def test_a_direction_names_the_others_of_its_group(runs):
    decoded = replace(runs["trained"].decoded, groups=torch.tensor([0, 1, 1, 2, 1, 3]))
    page = html_report({"trained": replace(runs["trained"], decoded=decoded)})
    cards = section_of(page, "directions").split('<div class="direction">')[1:]
    groups = [re.findall(r"one group with ([\d, ]+);", card) for card in cards]
    assert groups == [[], ["2, 4"], ["1, 4"], [], ["1, 2"], []]


def above_random(decoded: tlc.directions.Decoded) -> list[int]:
    """Return which directions have the largest kurtosis of all, by a plain loop."""
    network = decoded.ways.index("network")
    own = decoded.kurtosis[network].tolist()
    drawn = decoded.control_kurtosis[0, network].tolist()
    return [i for i, value in enumerate(own) if all(value > other for other in drawn)]


def test_directions_of_an_untrained_model_are_said_to_be_random(page, runs):
    section = section_of(page, "directions")
    said = (
        "nothing is above random, none of 6 directions has a higher kurtosis than each"
    )
    # Neither of the tiny models was trained.
    assert [above_random(run.decoded) for run in runs.values()] == [[], []]
    for name in ("Trained", "untrained"):
        assert f"{name}: {said} of 20 random directions" in section
    assert "The tokens below are then no sign" in section


def test_directions_that_stand_out_are_named_beside_what_chance_gives(runs):
    run = runs["trained"]
    kurtosis = run.decoded.kurtosis.clone()
    kurtosis[run.decoded.ways.index("network"), [1, 4]] = 50.0
    decoded = replace(run.decoded, kurtosis=kurtosis)
    assert above_random(decoded) == [1, 4]
    page = html_report({"main": replace(run, decoded=decoded)})
    section = section_of(page, "directions")
    assert (
        "Main: 2 of 6 directions (1, 4) have a higher kurtosis than each of 20 random "
        "directions, where chance alone gives 0.3."
    ) in section
    assert "nothing is above random" not in section
    assert "no sign" not in section


def test_tokens_are_escaped(runs):
    run = runs["trained"]
    texts = ("<script>alert(1)</script>",) * len(run.decoded.texts)
    page = html_report(
        {"trained": replace(run, decoded=replace(run.decoded, texts=texts))}
    )
    assert "<script>alert" not in page
    assert "script&gt;alert(1)" in section_of(page, "directions")


@pytest.mark.long("measures all that a report may hold")
def test_the_command_takes_them(call, folder_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    options = {"model": folder_model, "prompt": "w3 w14 w15", "k": 4, "out": out}
    call(
        "report",
        "--carriers",
        "--products",
        "--no-untrained",
        directions=-1,
        drawn=True,
        **options,
    )
    page = out.read_text(encoding="utf-8")
    assert "singular vectors of layer 1 at" in section_of(page, "directions")
    assert all(f'id="{name}"' in page for name in SECTIONS)
