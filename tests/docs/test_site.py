"""The site as a reader sees it: Chromium without a network, at the widths of a laptop
and of a telephone.

`make check-docs` builds the site and runs this; SITE is the folder.
"""

import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urldefrag, urljoin, urlsplit

import pytest

import pages
from browser import (
    chromium,
    complaints,
    loaded,
    open_address,
    requested,
    scrolls_sideways,
    served,
    settle,
    wait,
)
from public_api import public_names

SITE = Path(os.environ.get("SITE", "")).resolve()
pytestmark = [
    pytest.mark.long("shows the site in a browser"),
    pytest.mark.skipif(
        "SITE" not in os.environ, reason="the site is not built: use `make check-docs`"
    ),
]

WIDE, NARROW = 1280, 390
PAGES = (
    sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    if "SITE" in os.environ
    else []
)
FORMULAS = [
    page for page in PAGES if re.search(r'class="math[ "]', (SITE / page).read_text())
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(SITE) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium(served=True) as driver:
        yield driver


@pytest.fixture
def visit(browser, address):
    """Open a page at a width, and say what the browser asked for and complained of
    meanwhile.
    """

    def go(page: str, width: int = WIDE) -> Any:
        open_address(browser, address + page, width)
        return browser

    return go


def seen(driver: Any, css: str) -> Any:
    """Return the first element that can be seen."""
    return next(
        element
        for element in driver.find_elements("css selector", css)
        if element.is_displayed()
    )


def color(driver: Any, css: str, what: str) -> tuple[float, ...]:
    script = (
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    )
    return tuple(
        map(float, re.findall(r"[\d.]+", driver.execute_script(script, css, what))[:3])
    )


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Of WCAG 2: 1 to 21."""

    def luminance(rgb: tuple[float, ...]) -> float:
        parts = [
            c / 255 / 12.92
            if c / 255 <= 0.03928
            else ((c / 255 + 0.055) / 1.055) ** 2.4
            for c in rgb
        ]
        return sum(
            weight * part
            for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_pages_are_quiet_local_and_fit_the_screen(visit, address, width):
    assert len(PAGES) > 80
    wrong = {}
    for page in PAGES:
        driver = visit(page, width)
        hosts = {
            url
            for url in requested(driver)
            if not url.startswith((address, "data:", "blob:"))
        }
        if found := [
            *complaints(driver),
            *hosts,
            *["scrolls sideways"] * scrolls_sideways(driver),
        ]:
            wrong[page] = found
    assert not wrong


class Links(HTMLParser):
    """Where a page points to, and what in it can be pointed to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}
        self.figures: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.targets.add(value)
            elif name == "data-atlas" and value:
                self.figures |= json.loads(value)["figures"].keys()

    def has(self, anchor: str) -> bool:
        """Say whether a place is on the page, or a figure that an address opens."""
        figure = parse_qs(anchor).get("map", [None])[0]
        return figure in self.figures or unquote(anchor) in self.anchors


def test_no_link_is_broken():
    pages = {page: Links((SITE / page).read_text()) for page in PAGES}
    broken, followed = [], 0
    for page, links in pages.items():
        for target in links.targets:
            url, anchor = urldefrag(urljoin(f"http://site/{page}", target))
            if urlsplit(url).netloc != "site" or urlsplit(url).scheme != "http":
                continue
            followed += 1
            path = unquote(urlsplit(url).path).lstrip("/") or "index.html"
            is_known = pages[path].has(anchor) if path in pages else not anchor
            if not (SITE / path).is_file() or not is_known:
                broken.append(f"{page}: {target}")
    assert followed > 1000
    assert not broken


def test_every_public_name_is_where_the_rule_says():
    from sphinx_extensions import module

    for name, page in module("names").documented().items():
        assert f'id="{name}"' in (SITE / f"{page}.html").read_text()


def test_parameters_with_one_description_are_one_entry():
    text = (SITE / "api/plots/training.html").read_text()
    assert "<strong>checkpoints, k, measure</strong> – as in" in text


def test_no_property_is_cut_at_a_colon():
    """Napoleon takes what stands before it for a type."""
    reference = [page for page in PAGES if page.startswith("api/")]
    assert len(reference) > 50
    assert not [
        page
        for page in reference
        if '<dt class="field-odd">Type<' in (SITE / page).read_text()
    ]


def test_long_names_break_between_words(visit):
    driver = visit("api/redundancy/index.html", NARROW)
    lines_of_words = driver.execute_script(
        "return [...document.querySelectorAll('dt.sig .sig-name .pre')].map(name => "
        "[name.getClientRects().length, ...[...name.childNodes].filter(part => "
        "part.nodeType == Node.TEXT_NODE).map(part => { const range = "
        "document.createRange(); range.selectNode(part); "
        "return range.getClientRects().length; })])"
    )
    # `redundancy_correlations` is longer than a line, no word of it is.
    assert any(lines > 1 for lines, *_ in lines_of_words)
    assert all(set(of_words) == {1} for _, *of_words in lines_of_words)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_navigation(visit, width):
    driver = visit("index.html", width)
    if width == NARROW:
        assert not [
            link
            for link in driver.find_elements("css selector", ".sidebar-tree a")
            if on_screen(driver, link)
        ]
        seen(driver, "label[for='__navigation']").click()
        wait(
            driver,
            "return document.querySelector('.sidebar-drawer').getBoundingClientRect().left >= 0",
        )
    (link,) = [
        a
        for a in driver.find_elements("css selector", ".sidebar-tree a")
        if a.text == "API reference"
    ]
    assert on_screen(driver, link)
    click(driver, link)
    wait(driver, "return location.pathname == '/api/index.html'")
    click(
        driver,
        driver.find_element(
            "css selector", "article a[href$='#tl_coupling.depth_coupling']"
        ),
    )
    wait(driver, "return location.pathname == '/api/comparisons/depth_coupling.html'")
    assert driver.find_element("css selector", "article h1").text.startswith(
        "depth_coupling"
    )


def click(driver: Any, element: Any) -> None:
    driver.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element
    )
    settle(driver)
    element.click()


def on_screen(driver: Any, element: Any) -> bool:
    box = driver.execute_script(
        "return arguments[0].getBoundingClientRect().toJSON()", element
    )
    return box["width"] > 0 and 0 <= box["left"] < driver.execute_script(
        "return innerWidth"
    )


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("depth_coupling", "api/comparisons/depth_coupling.html"),
        ("effective_rank", "api/spectra/index.html"),
        ("CouplingMap", "api/comparisons/class-CouplingMap.html"),
    ],
)
def test_search_finds_a_name(visit, words, page):
    driver = visit("index.html")
    box = seen(driver, "input[name='q']")
    box.send_keys(words)
    box.submit()
    wait(
        driver,
        (
            "return /search.html/.test(location.href) && "
            "document.querySelectorAll('#search-results li').length"
        ),
    )
    first = driver.find_element("css selector", "#search-results li a")
    assert urlsplit(first.get_attribute("href")).path == f"/{page}"


def test_formulas_are_drawn(visit):
    assert len(FORMULAS) > 10
    for page in FORMULAS:
        driver = visit(page)
        wait(driver, "return document.querySelectorAll('mjx-container').length")
        drawn, wanted, empty, errors = driver.execute_script(
            "const drawn = [...document.querySelectorAll('mjx-container')];"
            "return [drawn.length, document.querySelectorAll('.math').length,"
            "  drawn.filter(one => one.getBoundingClientRect().width < 2).length,"
            "  [...document.querySelectorAll('mjx-merror, "
            "[data-mjx-error]')].map(one => one.textContent)]"
        )
        assert drawn >= wanted > 0, page
        assert not empty, page
        assert not errors, page
    assert driver.execute_script(
        "return document.fonts.check('12px MJXZERO') && "
        "[...document.fonts].some(f => f.status == 'loaded')"
    )


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_report_is_alive(visit, width):
    driver = visit("report.html", width)
    driver.switch_to.frame(driver.find_element("css selector", "iframe.report"))
    try:
        wait(
            driver,
            (
                "return [...document.querySelectorAll('[data-circuitsvis]')].every(div "
                "=> div.children.length)"
            ),
        )
        widgets = driver.find_elements("css selector", "[data-circuitsvis]")
        assert len(widgets) > 3
        assert driver.find_elements(
            "css selector",
            "[data-circuitsvis] canvas, [data-circuitsvis] svg, [data-circuitsvis] span",
        )
        assert not scrolls_sideways(driver)
    finally:
        driver.switch_to.default_content()


def test_dark_mode(visit):
    driver = visit("house.html")
    shown = []
    for theme in ("light", "dark"):
        for _ in range(3):
            if (
                driver.find_element("css selector", "body").get_attribute("data-theme")
                == theme
            ):
                break
            seen(driver, "button.theme-toggle").click()
        assert (
            driver.find_element("css selector", "body").get_attribute("data-theme")
            == theme
        )
        page = color(driver, "body", "backgroundColor")
        assert contrast(color(driver, "article p", "color"), page) > 7
        room = color(driver, "svg.house rect", "fill")
        assert contrast(color(driver, "svg.house text", "fill"), room) > 7
        assert contrast(color(driver, "svg.house path.import", "stroke"), page) > 3
        shown.append(page)
    light, dark = shown
    assert sum(light) > 3 * 200 > 3 * 60 > sum(dark)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_house_can_be_read(visit, width):
    driver = visit("house.html", width)
    heights = driver.execute_script(
        "return [...document.querySelectorAll('svg.house "
        "text')].map(one => one.getBoundingClientRect().height)"
    )
    assert min(heights) >= 12


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith("gallery/")]
)
def test_notebooks_have_their_outputs(visit, page):
    driver = visit(page)
    sizes = driver.execute_script(
        # Small maps in tables have a pixel for each pair.
        "const pictures = '.cell_output img:not([style*=pixelated])';"
        "return [...document.querySelectorAll(pictures)].map(one => one.naturalWidth)"
    )
    assert len(sizes) >= 4
    assert min(sizes) > 100
    assert "Warning" not in "".join(
        output.text for output in driver.find_elements("css selector", ".cell_output")
    )
    badge = driver.find_element(
        "css selector", "a[href^='https://colab.research.google.com/github/']"
    )
    assert badge.get_attribute("href").endswith(
        f"/blob/main/demos/{Path(page).stem}.ipynb"
    )
    assert badge.find_element("css selector", "img").size["width"] > 50


def test_cards_have_pictures(visit):
    sizes = visit("gallery.html").execute_script(
        "return [...document.querySelectorAll('.sd-card-img-top')].map(one "
        "=> [one.naturalWidth, one.naturalHeight])"
    )
    assert (
        len(sizes) == len([page for page in PAGES if page.startswith("gallery/")]) + 1
    )
    assert all(size == [640, 400] for size in sizes)


@pytest.mark.parametrize("page", ["gallery.html", "api/plots/index.html"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_plot_has_a_thumbnail_that_opens_a_page(visit, page, width):
    driver = visit(page, width)
    sizes = loaded(driver, ".plots img")
    n_plots = len([name for name in public_names() if ".plot_" in name])
    assert len(sizes) == n_plots > 40
    assert all(size == [640, 400] for size in sizes)
    assert all(
        link.get_attribute("href")
        for link in driver.find_elements("css selector", ".plots a")
    )


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_filters_show_the_pictures_of_one_subject(visit, width):
    """With the keyboard alone; whole sections without one go, and come back."""
    driver = visit("gallery.html", width)
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

    def shown(css: str) -> list[Any]:
        return [
            element
            for element in driver.find_elements("css selector", css)
            if element.is_displayed()
        ]

    filters = {
        button.text.partition(" ")[0]: button for button in shown(".filters button")
    }
    all_plots = len(shown(".plot"))
    assert filters["all"].text == f"all {all_plots}"
    filters["tokens"].send_keys(keys.ENTER)
    names = {element.text.replace("\n", "") for element in shown(".plot code")}
    assert "plot_influence" in names
    assert filters["tokens"].text == f"tokens {len(names)}"
    assert filters["tokens"].get_attribute("aria-pressed") == "true"
    assert filters["all"].get_attribute("aria-pressed") == "false"
    assert not shown("#training")
    assert not scrolls_sideways(driver)
    filters["all"].send_keys(keys.SPACE)
    assert len(shown(".plot")) == all_plots


def test_no_column_of_the_papers_table_is_out_of_sight_on_a_telephone(visit):
    driver = visit("PAPER.html", NARROW)
    cells = driver.find_elements(
        "css selector", "#the-paper-figure-by-figure > .table-wrapper td"
    )
    ends = [cell.rect["x"] + cell.rect["width"] for cell in cells if cell.text]
    assert max(ends) <= NARROW


def test_a_thumbnail_opens_the_block_that_draws_it(visit):
    driver = visit("gallery.html")
    (card,) = [
        link
        for link in driver.find_elements("css selector", ".plots a")
        if link.text == "plot_head_coupling"
    ]
    click(driver, card)
    wait(driver, "return location.pathname == '/concepts/carriers.html'")
    place = urlsplit(driver.current_url).fragment
    code = driver.execute_script(
        "return document.getElementById(arguments[0]).textContent", place
    )
    assert "plot_head_coupling(heads)" in code


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.startswith(("concepts/", "how-to/"))],
)
def test_pages_show_what_their_blocks_draw(visit, page):
    source = pages.ROOT / "docs" / Path(page).with_suffix(".md")
    names = [name for block in pages.blocks(source) for name in block.plots]
    driver = visit(page)
    sizes = loaded(driver, "article img")
    # And those of the page itself, which no block of it draws.
    n_own = len(re.findall(r"(?m)^!\[", source.read_text()))
    assert len(sizes) == len(names) + n_own
    # Twice the pixels that are shown.
    assert all(size[0] > 600 for size in sizes)


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("page", ["concepts/coupling.html", "gallery.html"])
def test_the_drawing_of_coupling_can_be_read(visit, page, width):
    driver = visit(page, width)
    heights = driver.execute_script(
        "return [...document.querySelectorAll('figure.coupling svg text')]"
        ".map(one => one.getBoundingClientRect().height)"
    )
    assert len(heights) > 30
    assert min(heights) >= 12


@pytest.mark.parametrize("page", ["index.html", "findings/depth.html"])
def test_a_shared_link_shows_a_picture_and_says_what_it_is(page: str) -> None:
    source = (SITE / page).read_text(encoding="utf-8")
    properties = dict(
        re.findall(r'<meta property="(og:[a-z]+)" content="([^"]*)"', source)
    )
    assert len(properties["og:title"]) > 5
    assert len(properties["og:description"]) > 50
    image = urlsplit(properties["og:image"])
    assert image.scheme == "https"
    assert (SITE / "_images" / Path(image.path).name).stat().st_size > 10_000
    assert 'name="twitter:card" content="summary_large_image"' in source
