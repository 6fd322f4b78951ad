"""The atlas: what a page holds of saved maps, and what a browser does with it."""

import base64
import io
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL.Image
import pytest
import xarray

import browser
from tl_coupling.interactive import View, show_atlas

KS = (3, 10)
N_STEPS = 6


def made_up_maps(
    model: str = "alpha",
    checkpoints: tuple[object, ...] = ("main", "untrained"),
    tasks: tuple[str, ...] = ("sums", "riddles & <b>"),
    n_layers: int = 5,
    seed: int = 0,
) -> xarray.Dataset:
    """Maps by task as `task_maps` returns them, of random values."""
    rng = np.random.default_rng(seed)
    sizes = (1, len(checkpoints), len(tasks), len(KS), n_layers, n_layers)
    dims = ("model", "checkpoint", "task", "k", "layer", "other_layer")
    values = 0.02 + 0.7 * rng.random(sizes)
    nulls = np.broadcast_to(1 - np.sqrt(1 - 1 / np.array(KS)), sizes[:4])
    layers = list(range(n_layers))
    return xarray.Dataset(
        {
            "coupling": (dims, values),
            "null_coupling": (dims[:4], nulls),
            "n_prompts": (dims[:3], np.full(sizes[:3], 4)),
        },
        {
            "model": [model],
            "checkpoint": list(checkpoints),
            "task": list(tasks),
            "k": list(KS),
            "layer": layers,
            "other_layer": layers,
        },
    )


def steps(n: int = N_STEPS) -> xarray.Dataset:
    return made_up_maps("beta", tuple(2**i for i in range(n)), ("text",), 3, seed=1)


class Page(HTMLParser):
    """What stands in a view: its numbers, and its small maps with their pictures."""

    def __init__(self, view: View):
        super().__init__()
        self.numbers: dict[str, Any] = {}
        self.links: list[dict[str, str]] = []
        self.pictures: list[dict[str, str]] = []
        self.texts: list[str] = []
        self.feed(view.body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: str(value) for name, value in attrs}
        if "data-atlas" in given:
            self.numbers = json.loads(given["data-atlas"])
        if given.get("class") == "tlc-small":
            self.links.append(given)
            self.texts.append("")
        if tag == "img":
            self.pictures.append(given)

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


def part_of(maps: xarray.Dataset, link: dict[str, str]) -> xarray.Dataset:
    """The map that a link of a small map is of."""
    checkpoints = {"trained": "main", "untrained": "untrained"}
    run = link["data-run"]
    checkpoint: object = checkpoints.get(run)
    if checkpoint is None:
        checkpoint = int(run.removeprefix("step "))
    return maps.sel(
        model=link["data-model"], task=link["data-task"], checkpoint=checkpoint
    )


def naive_mean(values: np.ndarray) -> float:
    n = len(values)
    different = [values[i, j] for i in range(n) for j in range(n) if i != j]
    return sum(different) / len(different)


def test_a_page_holds_every_value() -> None:
    maps = made_up_maps()
    held = Page(show_atlas(maps)).numbers["figures"]
    assert list(held) == ["alpha/sums", "alpha/riddles & <b>"]
    for name, figure in held.items():
        task = name.partition("/")[2]
        assert figure["ks"] == list(KS)
        assert [run["name"] for run in figure["runs"]] == ["trained", "untrained"]
        for run, checkpoint in zip(figure["runs"], ("main", "untrained"), strict=True):
            saved = maps.sel(model="alpha", checkpoint=checkpoint, task=task)
            codes = np.frombuffer(base64.b64decode(run["values"]), "<u2")
            values = codes.reshape(saved["coupling"].shape) / 65534
            np.testing.assert_allclose(values, saved["coupling"], rtol=1e-3)
            np.testing.assert_allclose(run["nulls"], saved["null_coupling"], atol=1e-5)


def test_small_maps_show_the_values_on_one_scale() -> None:
    several = {"alpha": made_up_maps(), "beta": steps()}
    page = Page(show_atlas(list(several.values())))
    assert len(page.links) == len(page.pictures) == 4 + N_STEPS
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 1, 2001))[:, :3] * 255
    values = [
        part_of(several[link["data-model"]], link)["coupling"].sel(k=10).values
        for link in page.links
    ]
    top = max(value[~np.eye(len(value), dtype=bool)].max() for value in values)
    for picture, expected in zip(page.pictures, values, strict=True):
        data = base64.b64decode(picture["src"].partition(",")[2])
        pixels = np.array(PIL.Image.open(io.BytesIO(data)).convert("RGB"), dtype=float)
        shares = np.abs(pixels[:, :, None] - scale).sum(-1).argmin(-1) / 2000
        is_own = np.eye(len(expected), dtype=bool)
        assert (pixels[is_own] == 0xBB).all()
        np.testing.assert_allclose(
            (shares * top)[~is_own], expected[~is_own], atol=0.02 * top
        )


def test_small_maps_say_their_mean_beside_chance() -> None:
    maps = made_up_maps()
    page = Page(show_atlas(maps))
    chance = 1 - np.sqrt(1 - 1 / 10)
    for link, picture, text in zip(page.links, page.pictures, page.texts, strict=True):
        mean = naive_mean(part_of(maps, link)["coupling"].sel(k=10).values)
        assert f"mean {mean:.3f}" in text
        assert f"{mean / chance:.1f} × chance" in text
        for words in (link["data-model"], link["data-run"], link["data-task"]):
            assert words in picture["alt"]


def test_a_link_names_the_strongest_pair_of_its_map() -> None:
    maps = steps()
    page = Page(show_atlas(maps))
    for place, link in enumerate(page.links):
        values = part_of(maps, link)["coupling"].sel(k=10).values.copy()
        np.fill_diagonal(values, -1)
        row, col = np.unravel_index(values.argmax(), values.shape)
        assert link["href"] == f"#map=beta/text&k=10&pair={row},{col}&run={place}"


def test_layers_that_a_model_does_not_have_are_not_shown() -> None:
    deep = made_up_maps()
    shallow = made_up_maps("gamma", n_layers=3)
    joined = xarray.concat([deep, shallow], "model", join="outer")
    held = Page(show_atlas(joined)).numbers["figures"]
    assert held["gamma/sums"]["row_keys"] == [0, 1, 2]
    assert held["alpha/sums"]["row_keys"] == [0, 1, 2, 3, 4]


def test_what_was_not_measured_is_left_out() -> None:
    maps = made_up_maps()
    is_twin_on_sums = (maps["checkpoint"] == "untrained") & (maps["task"] == "sums")
    partly = maps.assign(coupling=maps["coupling"].where(~is_twin_on_sums))
    runs = [link["data-run"] for link in Page(show_atlas(partly)).links]
    assert runs == ["trained", "trained", "untrained"]


def test_an_undefined_value_is_grey() -> None:
    maps = made_up_maps(checkpoints=("main",), tasks=("sums",))
    maps["coupling"][..., 0, 3] = np.nan
    (picture,) = Page(show_atlas(maps)).pictures
    data = base64.b64decode(picture["src"].partition(",")[2])
    image = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    assert image.getpixel((3, 0)) == (0xBB, 0xBB, 0xBB)
    assert image.getpixel((0, 3)) != (0xBB, 0xBB, 0xBB)


def test_the_same_maps_give_the_same_page_and_no_name_is_read_as_html() -> None:
    bodies = {show_atlas(made_up_maps()).body for _ in range(2)}
    assert len(bodies) == 1
    assert "<b>&" not in bodies.pop().replace("<b>riddles &amp;", "")


@pytest.mark.parametrize(
    ("maps", "k", "message"),
    [
        ([], None, "`data` has no maps"),
        (xarray.Dataset({"loss": ("prompt", [1.0])}), None, "wanted maps by task"),
        (
            made_up_maps(),
            7,
            r"`k` = 7 was not measured for alpha, trained, sums; there",
        ),
        ([made_up_maps(), made_up_maps()], None, "holds alpha/sums, trained twice"),
        (
            [made_up_maps(), made_up_maps(checkpoints=("x",), n_layers=4)],
            None,
            "'x' has others than 'trained'",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(
    maps: Any, k: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        show_atlas(maps, k=k)


# --- in a browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.chromium() as driver:
        yield driver


def opened(driver: Any, page: Path, address: str = "", width: int = 1280) -> None:
    browser.resize(driver, width)
    for kind in ("browser", "performance"):
        driver.get_log(kind)
    driver.get("about:blank")
    driver.get(f"{page.as_uri()}{address}")
    browser.wait(driver, "return document.querySelector('[data-drawn]') !== null")
    browser.settle(driver)


def visible_runs(driver: Any) -> list[tuple[str, str, str]]:
    links = driver.find_elements("css selector", ".tlc-small")
    return [
        tuple(link.get_attribute(f"data-{fact}") for fact in ("model", "run", "task"))
        for link in links
        if link.is_displayed()
    ]


def choose(driver: Any, part: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    select = driver.find_element("css selector", f"select[data-part={part}]")
    Select(select).select_by_value(value)


def shown_text(driver: Any, part: str) -> str:
    (text,) = [
        each.text
        for each in driver.find_elements("css selector", f"[data-part={part}]")
        if each.is_displayed()
    ]
    return str(text)


def figure_is_open(driver: Any) -> bool:
    return bool(driver.find_element("css selector", "[data-part=open]").is_displayed())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    view = show_atlas([made_up_maps(), steps()])
    return view.save(tmp_path_factory.mktemp("atlas") / "atlas.html")


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 358])
def test_filters_and_links(chromium: Any, page: Path, width: int) -> None:
    opened(chromium, page, width=width)
    requested = browser.requested(chromium)
    from_elsewhere = [address for address in requested if address[:5] != "data:"]
    assert set(from_elsewhere) <= {"about:blank", page.as_uri()}
    assert not browser.scrolls_sideways(chromium)
    assert not figure_is_open(chromium)
    # Filters, alone and together.
    n_maps = 4 + N_STEPS
    assert len(visible_runs(chromium)) == n_maps
    choose(chromium, "state", "untrained")
    assert {run for _, run, _ in visible_runs(chromium)} == {"untrained"}
    assert shown_text(chromium, "count") == f"2 of {n_maps} maps"
    headings = chromium.find_elements("css selector", ".tlc-atlas h4")
    assert [h.text for h in headings if h.is_displayed()] == ["alpha"]
    choose(chromium, "task", "sums")
    assert visible_runs(chromium) == [("alpha", "untrained", "sums")]
    choose(chromium, "state", "")
    choose(chromium, "task", "")
    choose(chromium, "model", "beta")
    assert len(visible_runs(chromium)) == N_STEPS
    choose(chromium, "model", "")
    # A link, by keyboard: both checkpoints on that task, at the strongest pair.
    from selenium.webdriver.common.keys import Keys

    maps = made_up_maps()
    link = chromium.find_elements("css selector", ".tlc-small")[1]
    address = link.get_attribute("href").partition("#")[2]
    link.send_keys(Keys.ENTER)
    browser.settle(chromium)
    assert figure_is_open(chromium)
    assert chromium.current_url.partition("#")[2] == address
    trained = maps["coupling"].sel(
        model="alpha", checkpoint="main", task="riddles & <b>", k=10
    )
    row, col = (int(part) for part in address.rpartition("=")[2].split(","))
    value = trained.sel(layer=row, other_layer=col).item()
    assert float(shown_text(chromium, "value")) == pytest.approx(value, rel=0.02)
    assert value == np.max(np.where(np.eye(5, dtype=bool), -1, trained.values))
    # The keyboard goes on in the figure, whose address has the map.
    figure = chromium.switch_to.active_element
    assert figure.get_attribute("data-part") == "map"
    figure.send_keys(Keys.ARROW_LEFT)
    moved = max(col - 1, 0)
    value = trained.sel(layer=row, other_layer=moved).item()
    assert float(shown_text(chromium, "value")) == pytest.approx(value, rel=0.02)
    assert chromium.current_url.endswith(f"&k=10&pair={row},{moved}")
    slider = [
        each
        for each in chromium.find_elements("css selector", "[data-part=slider]")
        if each.is_displayed()
    ]
    slider[0].send_keys(Keys.ARROW_LEFT)
    assert shown_text(chromium, "k") == "k = 3"
    assert not browser.scrolls_sideways(chromium)
    # Closed by Escape, the link has the focus again.
    slider[0].send_keys(Keys.ESCAPE)
    assert not figure_is_open(chromium)
    assert chromium.switch_to.active_element == link
    assert browser.complaints(chromium) == []


@pytest.mark.long("shows a page in a browser")
def test_an_address_opens_a_figure_at_a_checkpoint(chromium: Any, page: Path) -> None:
    opened(chromium, page, "#map=beta/text&k=3&pair=2,0&run=4")
    expected = steps()["coupling"].sel(
        model="beta", checkpoint=16, task="text", k=3, layer=2, other_layer=0
    )
    assert float(shown_text(chromium, "value")) == pytest.approx(
        expected.item(), rel=0.02
    )
    assert shown_text(chromium, "run") == "step 16"
    chromium.back()
    # A map that is not there opens nothing.
    opened(chromium, page, "#map=nobody/text&k=3")
    assert not figure_is_open(chromium)
    assert browser.complaints(chromium) == []


@pytest.mark.long("shows a page in a browser")
def test_the_canvas_of_a_figure_has_the_saved_values(chromium: Any, page: Path) -> None:
    opened(chromium, page, "#map=alpha/sums&k=10&pair=0,1")
    saved = made_up_maps()["coupling"].sel(model="alpha", task="sums", k=10)
    is_own = np.eye(5, dtype=bool)
    top = max(saved.values[place][~is_own].max() for place in range(2))
    scale = matplotlib.colormaps["viridis"](np.linspace(0, 1, 2001))[:, :3] * 255
    for place in range(2):
        data = chromium.execute_script(
            "return document.querySelectorAll('canvas[data-part=map]')[arguments[0]]"
            ".toDataURL()",
            place,
        )
        image = PIL.Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2])))
        cell = image.width / 5
        centres = [
            ((i + 0.5) * cell, (j + 0.5) * cell) for j in range(5) for i in range(5)
        ]
        pixels = np.array([image.getpixel((int(x), int(y)))[:3] for x, y in centres])
        shares = np.abs(pixels[:, None] - scale).sum(-1).argmin(-1) / 2000
        drawn = (shares * top).reshape(5, 5)
        expected = saved.values[place]
        np.testing.assert_allclose(drawn[~is_own], expected[~is_own], atol=0.02 * top)


@pytest.mark.long("shows a page in a browser")
def test_without_scripts_all_small_maps_are_there(chromium: Any, page: Path) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get("about:blank")
        chromium.get(page.as_uri())
        pictures = chromium.find_elements("css selector", ".tlc-small img")
        assert len(pictures) == 4 + N_STEPS
        for picture in pictures:
            assert picture.is_displayed()
            assert picture.size["width"] == picture.size["height"] > 50
        assert not chromium.find_elements("css selector", "select")
    finally:
        chromium.execute_cdp_cmd(
            "Emulation.setScriptExecutionDisabled", {"value": False}
        )
