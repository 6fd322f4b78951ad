"""The report: the page as text, and the page in a real browser."""

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from torch import nn

import browser
import tiny
import tl_coupling as tlc
from blank_pictures import unrendered
from html_reader import Reader
from tl_coupling.interactive import visible_token
from tl_coupling.report import html_report, write_report

# Who makes the page shows it, where tests are grouped.
pytestmark = [
    pytest.mark.xdist_group("report"),
    # Tokens may be of any script; a picture's font has not all of them.
    pytest.mark.filterwarnings("ignore:Glyph .* missing from font"),
]

HOSTILE = [
    "<s>",
    "</script>",
    "\n",
    "$x$",
    "法国",
    "&amp;",
    "<img src=x onerror=window.hit=1>",
    "\udc80",
]
PROMPT = "<b>w3</b> </blockquote> & “w14”"


def hostile(trace: tlc.Trace) -> tlc.Trace:
    words = {"str_tokens": HOSTILE, "prompt": PROMPT, "model": "a<b>/c"}
    return replace(
        trace, str_tokens=tuple(HOSTILE), provenance=trace.provenance | words
    )


@pytest.fixture(scope="module")
def runs(tokenizer_folder: Path) -> dict[str, tlc.portraits.Portrait]:
    models = {
        "trained": tiny.huggingface_model("llama", 0),
        "untrained": tiny.huggingface_model("llama", 1),
    }
    return {
        name: tlc.portrait(
            hostile(tlc.trace(tiny.bridge(model, tokenizer_folder), tiny.TOKENS)),
            k=(8, 4),
        )
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def page(
    runs: dict[str, tlc.portraits.Portrait], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", runs)


@pytest.fixture(scope="module")
def read(page: Path) -> Reader:
    return Reader(page.read_text(encoding="utf-8"))


def test_bad_input_says_what_was_wanted(
    tiny_trace: tlc.Trace, runs: dict[str, tlc.portraits.Portrait]
) -> None:
    for call, message in (
        (lambda: html_report({}), "`runs` is empty"),
        (
            lambda: html_report(runs | {"x": tlc.portrait(tiny_trace, k=(4, 8))}),
            "'x' must have the same tokens, got",
        ),
        (
            lambda: html_report(runs | {"x": replace(runs["trained"], ks=(4,))}),
            "same k",
        ),
        (
            lambda: html_report(runs | {"x": replace(runs["trained"], position=3)}),
            "same position",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_page_is_well_formed_and_says_what_it_is(read: Reader) -> None:
    assert read.open == [""]
    assert read.all("html") == [{"lang": "en"}]
    assert "Transformer block coupling: a<b>/c" in read.text
    assert PROMPT in read.text
    ids = [attrs["id"] for _, attrs in read.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for attrs in read.all("a")]
    assert [link for link in links if link.startswith("#")] == [
        f"#{name}" for name in ids
    ]
    assert {link for link in links if not link.startswith("#")} == {
        "https://arxiv.org/abs/2407.07810"
    }
    for image in read.all("img"):
        assert len(str(image["alt"])) > 20
        assert float(str(image["width"])) > float(str(image["height"])) / 2 > 0
    assert len(read.all("figcaption")) == len(read.all("figure"))


def test_the_page_loads_nothing_and_allows_nothing(page: Path, read: Reader) -> None:
    for _, attrs in read.elements:
        for name in ("src", "action", "srcset", "data"):
            assert str(attrs.get(name, "#")).startswith(("#", "data:image/")), (
                name,
                attrs[name],
            )
        assert not [name for name in attrs if name.startswith("on")]
    assert "href" not in {
        name for tag, attrs in read.elements if tag != "a" for name in attrs
    }
    (policy,) = [
        m["content"]
        for m in read.all("meta")
        if m.get("http-equiv") == "Content-Security-Policy"
    ]
    source = page.read_bytes().decode()
    (script,) = re.findall(r"<script[^>]*>(.*?)</script", source, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert str(policy).split("; ") == [
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert source.count("CircuitsVis.render(") == 1
    assert not re.search(r"url\(|@import", source[: source.index("<body>")])


def test_the_numbers_are_those_of_the_results(
    runs: dict[str, tlc.portraits.Portrait], read: Reader
) -> None:
    for run, k in itertools.product(runs.values(), (4, 8)):
        values = run.depth.coupling(k)
        mean = float((values.sum() - values.trace()) / 2)
        assert f"{mean:.3f}" in read.text
        assert f"{1 - math.sqrt(1 - 1 / k):.3f}" in read.text
    for run, kind in itertools.product(
        runs.values(), ("self", "fixed input", "fixed output")
    ):
        assert f"{float(run.tokens[kind].coupling(4).mean()):.3f}" in read.text
    facts = runs["trained"].depth.provenance
    for fact in (
        facts["architecture"],
        facts["versions"]["torch"],
        json.dumps(facts["tokens"]),
    ):
        assert fact in read.text


def test_the_widgets_hold_the_measurements(
    runs: dict[str, tlc.portraits.Portrait], read: Reader
) -> None:
    found = [
        (str(attrs["data-circuitsvis"]), json.loads(str(attrs["data-props"])))
        for _, attrs in read.elements
        if "data-circuitsvis" in attrs
    ]
    rows = [
        [cell["text"] for cell in props["values"]]
        for name, props in found
        if name == "ColoredTokens"
    ]
    expected = [
        values
        for run in runs.values()
        for values in (
            tlc.line_shape_score(run.trace.residual),
            run.entropy[0],
            run.entropy[-1],
        )
    ]
    for values in expected:
        assert [f"{value:.4g}" for value in values.tolist()] in rows
    # Two measures of influence and the entropy, by layer, and three measures of paths.
    assert len(rows) == len(runs) * (2 * tiny.N_LAYERS + (tiny.N_LAYERS + 1) + 3)


def test_maps_of_trained_and_untrained_share_a_scale_and_no_figure_stays_open(
    runs: dict[str, tlc.portraits.Portrait], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[Any, set[tuple[float, float]]] = {}
    original = tlc.plots.plot_coupling

    def spy(result: tlc.CouplingMap, **options: Any) -> Any:
        ax = original(result, **options)
        which = result.kind, result.provenance.get("fixed"), options["k"]
        drawn.setdefault(which, set()).add(ax.images[0].get_clim())
        return ax

    monkeypatch.setattr("tl_coupling.pictures.plot_coupling", spy)
    open_before = pyplot.get_fignums()
    with unrendered():
        html_report(runs)
    assert pyplot.get_fignums() == open_before
    kinds = ("self", None, 4), ("context", "input", 4), ("context", "output", 4)
    # The map at the top is that of the smallest k.
    assert set(drawn) == {("depth", None, 8), *kinds}
    assert [len(scales) for scales in drawn.values()] == [1] * 4
    largest = max(float(run.tokens["self"].coupling(4).max()) for run in runs.values())
    assert drawn["self", None, 4].pop() == pytest.approx(
        (0, max(largest, 4 * (1 - math.sqrt(3 / 4))))
    )


@pytest.mark.long("makes a report twice")
def test_the_same_results_give_the_same_page(
    runs: dict[str, tlc.portraits.Portrait], page: Path
) -> None:
    assert html_report(runs).encode("utf-8", "xmlcharrefreplace") == page.read_bytes()


def test_one_token(tokenizer_folder: Path) -> None:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    measured = tlc.portrait(tlc.trace(model, [3]), k=(4,))
    with unrendered():
        page = Reader(html_report({"alone": measured}))
    assert "There is no token before the measured one." in page.text
    assert "The prompt has one token" in page.text
    assert not [image for image in page.all("img") if "tokens" in str(image["alt"])]


def test_a_first_and_a_last_token_leave_maps_out(tiny_trace: tlc.Trace) -> None:
    measured = tlc.portrait(tiny_trace, k=(4,), position=0, input_position=-1)
    assert list(measured.tokens) == ["self"]
    with unrendered():
        page = html_report({"a": measured})
    assert "There is no token before the measured one." in page


def test_a_report_that_cannot_be_drawn_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="`runs` is empty"):
        write_report(path, {})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [
        ("report.html", "old")
    ]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.chromium() as driver:
        yield driver


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser_without_a_network(
    chromium: Any,
    runs: dict[str, tlc.portraits.Portrait],
    page: Path,
    read: Reader,
    width: int,
    tmp_path: Path,
) -> None:
    browser.open_page(chromium, page, width)
    requested = browser.requested(chromium)
    assert requested[0] == page.as_uri()
    assert all(url.startswith("data:") for url in requested[1:])
    assert browser.complaints(chromium) == []
    assert not browser.scrolls_sideways(chromium)
    assert browser.spilling(chromium) == []
    assert chromium.execute_script("return window.hit ?? null") is None
    assert chromium.execute_script(
        "return [...document.images].every(i => i.complete && i.naturalWidth > 99)"
    )
    # The picture of the map gives way to the map.
    assert chromium.execute_script("return document.images.length") == (
        len(read.all("img")) - 1
    )
    # Every picture fits whole.
    ends = chromium.execute_script(
        "return [...document.images].map(i => "
        "i.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert all(0 <= left < right <= width for left, right in ends)
    # Every widget of tokens shows every token.
    counts = chromium.execute_script(
        "return [...document.querySelectorAll('.colored-tokens')]"
        ".map(row => [...row.children].filter(e => e.tagName == 'SPAN').length)"
    )
    n_sources = len(HOSTILE) - 1
    by_influence = 2 * len(runs) * tiny.N_LAYERS
    assert sorted(counts) == [n_sources] * by_influence + [len(HOSTILE)] * (
        len(counts) - by_influence
    )
    # What is cut off can be scrolled to.
    cut = chromium.execute_script(
        "return [...document.querySelectorAll('main *, header *, footer *')]"
        ".filter(e => !e.closest('.scroll, .tlc-layers') && "
        "e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert cut == []
    small = chromium.execute_script(
        "return [...document.querySelectorAll('p, td, th, figcaption, h4, .colored-tokens span')]"
        ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0
    browser.screenshot(chromium, tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 100_000


@pytest.mark.long("measures SmolLM2")
def test_the_embedded_model_on_a_page(
    smollm2: nn.Module, chromium: Any, tmp_path: Path
) -> None:
    trace = tlc.trace(smollm2, "What is the capital of France? The capital is")
    measured = tlc.portrait(trace, k=(10,))
    assert measured.tokens["self"].mean() > 3 * measured.tokens["self"].null()
    path = write_report(tmp_path / "smollm2.html", {"trained": measured})
    assert path.stat().st_size < 6e6
    for width in (1280, 390):
        browser.open_page(chromium, path, width)
        assert all(
            url.startswith(("file:", "data:")) for url in browser.requested(chromium)
        )
        assert browser.complaints(chromium) == []
        assert not browser.scrolls_sideways(chromium)
        assert (
            chromium.execute_script(
                "return document.querySelectorAll('.colored-tokens').length"
            )
            # Rows of influence, of entropies and of shapes; of the first three views
            # some are shown, and all behind a click.
            == 3 * 30 + 1 + 3 + 10 + 10 + 8
        )


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_pointing_at_a_token_shows_its_value(
    chromium: Any, runs: dict[str, tlc.portraits.Portrait], page: Path, width: int
) -> None:
    browser.open_page(chromium, page, width)
    entropy = runs["trained"].entropy
    # The first token of the lowest row of the entropies, where a box that scrolls might
    # cut the tooltip off.
    place = chromium.execute_script(
        "const row = [...document.querySelectorAll('h4')].find(e => "
        "e.textContent.startsWith('logit-lens entropy'))"
        ".parentElement.querySelector('.tlc-layers').lastChild.querySelector('.colored-tokens');"
        "row.scrollIntoView({block: 'center'});"
        "window.row = row;"
        "const box = row.children[0].getBoundingClientRect(); return "
        "[box.left + 5, box.top + box.height / 2]"
    )
    browser.move_to(chromium, *place)
    shown = f"{float(entropy[-1, 0]):.4g}"
    browser.wait(
        chromium,
        f"return row.querySelector('div')?.textContent.endsWith({json.dumps(shown)})",
    )
    assert visible_token(HOSTILE[0]) in chromium.execute_script(
        "return row.querySelector('div').textContent"
    )
    on_top = chromium.execute_script(
        "const tip = row.querySelector('div'), box = tip.getBoundingClientRect();"
        "const corners = [[box.left + 2, box.top + 2], [box.right - 2, box.bottom - 2]];"
        "return corners.every(([x, y]) => tip.contains(document.elementFromPoint(x, y)))"
    )
    assert on_top
    assert not browser.scrolls_sideways(chromium)


@pytest.mark.long("shows a page in a browser")
def test_the_policy_stops_scripts_and_requests(chromium: Any, page: Path) -> None:
    browser.open_page(chromium, page, 1280)
    chromium.execute_script(
        "window.refused = []; "
        "addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective));"
        "const script = document.createElement('script'); script.textContent = 'window.hit = 1';"
        "document.body.append(script);"
        "document.body.insertAdjacentHTML('beforeend', '<img "
        'src=data:, onerror="window.hit = 2">\');'
        "const image = new Image(); image.src = "
        "'https://example.invalid/x.png'; document.body.append(image);"
    )
    browser.wait(chromium, "return refused.length >= 3")
    assert set(chromium.execute_script("return refused")) == {
        "script-src-elem",
        "script-src-attr",
        "img-src",
    }
    assert chromium.execute_script("return window.hit ?? null") is None


@pytest.mark.long("shows a page in a browser")
def test_dark_pages_stay_legible(chromium: Any, page: Path) -> None:
    try:
        dark = {
            "media": "screen",
            "features": [{"name": "prefers-color-scheme", "value": "dark"}],
        }
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        browser.open_page(chromium, page, 1280)
        contrasts = chromium.execute_script(
            """
            const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).map(v => (v / 255) ** 2.2);
              return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const back = element => { for (let e = element; e; e = e.parentElement) {
              const color = getComputedStyle(e).backgroundColor;
              if (!color.startsWith('rgba(0, 0, 0, 0')) return color; } };
            return [...document.querySelectorAll('p, td, th, figcaption, h1, h2, h4, a, code, .scale, .tlc-layers b')]
              .map(e => { const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05); });
            """
        )
        assert len(contrasts) > 50
        assert min(contrasts) > 4.5
        assert (
            chromium.execute_script(
                "return getComputedStyle(document.body).backgroundColor"
            )
            == "rgb(22, 24, 28)"
        )
    finally:
        chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": "", "features": []}
        )


def test_html_is_escaped_once(read: Reader) -> None:
    for token in HOSTILE[:-1]:
        assert visible_token(token) in read.text
    assert html.escape("&amp;") not in read.text


def test_names_of_runs_are_text_wherever_they_stand(tiny_trace: tlc.Trace) -> None:
    """In captions, tables, views and sentences; braces are no templates of ours."""
    name = "<i>{{ 7 * 7 }} {% x %} & 'y'"
    portrait = tlc.portrait(
        tiny_trace, k=(4,), with_carriers=True, with_products=True, decoded_layer=0
    )
    with unrendered():
        page = html_report({name: portrait})
    assert "<i>{{" not in page
    assert "&amp;lt;" not in page
    assert Reader(page).text.count(name) > 10


def test_the_page_opens_with_what_was_found(page: Path, runs) -> None:
    source = page.read_text(encoding="utf-8")
    start = source.index('<ul class="conclusions">')
    opening = source[start : source.index("</ul>", start)]
    how, where, which = re.findall(r"<li>(.*?)</li>", opening, re.DOTALL)
    depth = runs["trained"].depth
    mean, null = depth.mean(4), depth.null(4)
    assert f"is {mean:.3f} at k = 4, {mean / null:.1f} times the {null:.3f}" in how
    assert f"(untrained: {runs['untrained'].depth.mean(4):.3f})" in how
    values = depth.coupling(4).tolist()
    pairs = [(values[0][1], 0, 1), (values[1][0], 1, 0)]
    value, row, column = max(pairs)
    expected = f"Jacobian of layer {row} in the singular vectors of layer {column}"
    assert f"{expected}: {value:.3f}." in where
    norms = runs["trained"].influence.frobenius_norm[:, :-1]
    shares = (norms / norms.sum(1, keepdim=True)).mean(0)
    assert f"it has {float(shares.max()):.0%} of their influence" in which
