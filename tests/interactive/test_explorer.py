"""The map to explore: its numbers as a page holds them, and what a browser does with it."""

import base64
import dataclasses
import io
import json
import math
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor, nn

import browser
import tl_coupling as tlc
from tl_coupling.interactive import View, show_coupling
from tl_coupling.interactive.explorer import explorer_script

N_LAYERS = 4
K = 6


def depth_map(seed: int, diagonal: float, kind: str = "depth") -> tlc.CouplingMap:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(N_LAYERS, N_LAYERS, K, K, generator=generator)
    matrices = noise + diagonal * torch.eye(K)
    is_depth = kind == "depth"
    order = tuple(range(N_LAYERS))
    return tlc.CouplingMap(
        matrices=matrices.double(),
        singular_values=torch.linspace(9, 4, K).expand(N_LAYERS, K).double(),
        frobenius_norms=torch.full((N_LAYERS,), 20.0).double(),
        d_model=32,
        row_layers=order if is_depth else (1,) * N_LAYERS,
        col_layers=order if is_depth else (2,) * N_LAYERS,
        row_positions=(5,) * N_LAYERS if is_depth else order,
        col_positions=(5,) * N_LAYERS if is_depth else order,
        kind=kind,
        orientation="ujv",
        provenance={"str_tokens": ["<s>", "</script>", "\n", "é", "b", "c"]},
    )


class Held(HTMLParser):
    """The numbers that a view holds."""

    def __init__(self, view: View):
        super().__init__()
        self.numbers: dict[str, Any] = {}
        self.feed(view.body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-map" in given:
            self.numbers = json.loads(str(given["data-map"]))


def naive_coupling(A: Tensor) -> float:
    total = sum(float(entry) ** 2 for entry in A.flatten())
    diagonal = sum(float(A[i, i]) ** 2 for i in range(len(A)))
    return 1 - math.sqrt((total - diagonal) / total)


def held_matrices(run: dict[str, Any], n_rows: int, n_cols: int, m: int) -> np.ndarray:
    """The matrices of a page: of each number the upper two bytes of its four."""
    codes = base64.b64decode(run["matrices"])
    lower_half = b"\0\0"
    entries = [
        struct.unpack("<f", lower_half + codes[i : i + 2])[0]
        for i in range(0, len(codes), 2)
    ]
    return np.array(entries).reshape(n_rows, n_cols, m, m)


def relative_errors(held: np.ndarray, result: tlc.CouplingMap, k: int) -> np.ndarray:
    """Of every pair's A at k: in Frobenius norm, and in its largest entry."""
    expected = result.matrices[..., :k, :k].cpu().double().numpy()
    difference = held[..., :k, :k] - expected
    in_norm = np.linalg.norm(difference, axis=(2, 3)) / np.linalg.norm(
        expected, axis=(2, 3)
    )
    largest = np.abs(expected).max((2, 3))
    in_largest = np.abs(np.abs(held[..., :k, :k]).max((2, 3)) - largest) / largest
    return np.stack([in_norm, in_largest])


def assert_held_exactly(result: tlc.CouplingMap, m: int) -> None:
    (run,) = Held(show_coupling(result, matrix_k=m)).numbers["runs"]
    held = held_matrices(run, *result.matrices.shape[:2], m)
    for k in range(1, m + 1):
        errors = relative_errors(held, result, k)
        assert np.median(errors, axis=(1, 2)).max() < 0.01
        assert errors.max() < 0.02


def test_a_page_holds_every_value_and_matrix() -> None:
    result = depth_map(0, 2.0)
    held = Held(show_coupling(result, matrix_k=3)).numbers
    (run,) = held["runs"]
    codes = np.frombuffer(base64.b64decode(run["values"]), "<u2")
    codes = codes.reshape(K, N_LAYERS, N_LAYERS)
    matrices = held_matrices(run, N_LAYERS, N_LAYERS, 3)
    for row in range(N_LAYERS):
        for column in range(N_LAYERS):
            A = result.matrices[row, column]
            for k in range(1, K + 1):
                expected = naive_coupling(A[:k, :k])
                assert abs(codes[k - 1, row, column] / 65534 - expected) < 1e-5
            error = np.abs(matrices[row, column] - A[:3, :3].numpy())
            assert (error <= A[:3, :3].abs().numpy() / 200).all()
    # 1 − √(1 − 1/k), in any space.
    nulls = np.array(run["nulls"])
    expected_nulls = [1 - math.sqrt(1 - 1 / k) for k in range(1, K + 1)]
    assert np.abs(nulls - np.array(expected_nulls)[:, None]).max() < 1e-5
    assert run["sigma"][0] == [9.0, 8.0, 7.0]


def test_weak_pairs_are_held_as_exactly_as_strong_ones() -> None:
    """Pairs of 1e-6 to 10 σ₁, and in each an entry that is far above the others."""
    result = depth_map(0, 1.0)
    sizes = torch.logspace(-5, 2, N_LAYERS**2, dtype=torch.float64)
    matrices = result.matrices * sizes.view(N_LAYERS, N_LAYERS, 1, 1)
    matrices[..., -1, -1] *= 1000
    for each in (matrices, matrices.float()):
        assert_held_exactly(dataclasses.replace(result, matrices=each), K)


def test_matrices_of_a_model_are_held_exactly(tiny_trace: tlc.Trace) -> None:
    assert_held_exactly(tlc.depth_coupling(tiny_trace, k=8), 8)
    positions = tuple(range(len(tiny_trace.str_tokens)))
    tokens = tlc.self_coupling(tiny_trace, 0, 1, positions=positions, k=4)
    assert_held_exactly(tokens, 4)


@pytest.mark.long("measures SmolLM2")
def test_matrices_of_a_trained_model_are_held_exactly(smollm2: nn.Module) -> None:
    trace = tlc.trace(smollm2, "What is the capital of France? The capital is")
    assert_held_exactly(tlc.depth_coupling(trace, k=16), 16)


def test_a_pair_that_is_0_is_held_as_0() -> None:
    matrices = depth_map(0, 1.0).matrices.clone()
    matrices[1, 2] = 0
    result = dataclasses.replace(depth_map(0, 1.0), matrices=matrices)
    with pytest.warns(UserWarning, match="undefined"):
        (run,) = Held(show_coupling(result)).numbers["runs"]
    assert not held_matrices(run, N_LAYERS, N_LAYERS, K)[1, 2].any()


def test_an_undefined_value_is_no_number() -> None:
    matrices = depth_map(0, 1.0).matrices.clone()
    matrices[1, 2] = 0
    result = dataclasses.replace(depth_map(0, 1.0), matrices=matrices)
    with pytest.warns(UserWarning, match="undefined"):
        held = Held(show_coupling(result)).numbers
    codes = np.frombuffer(base64.b64decode(held["runs"][0]["values"]), "<u2")
    assert set(codes.reshape(K, N_LAYERS, N_LAYERS)[:, 1, 2]) == {65535}


def test_the_same_data_give_the_same_page_and_no_token_is_read_as_html() -> None:
    views = [show_coupling(depth_map(1, 1.0, "self")) for _ in range(2)]
    assert views[0].body == views[1].body
    assert "</script>" not in views[0].body
    assert "<script>" not in views[0].body


def test_what_cannot_be_shown_together_is_refused() -> None:
    with pytest.raises(ValueError, match="`results` is empty"):
        show_coupling({})
    others = {"layers": depth_map(0, 1.0), "tokens": depth_map(0, 1.0, "self")}
    with pytest.raises(ValueError, match="maps of the same pairs, 'tokens' has others"):
        show_coupling(others)
    with pytest.raises(ValueError, match="k"):
        show_coupling(depth_map(0, 1.0), k=K + 1)


def test_prompts_of_different_lengths_are_shown_together() -> None:
    """Their last tokens are at different positions; layers are what is compared."""
    short, long = depth_map(0, 1.0), depth_map(1, 1.0)
    elsewhere = (3,) * N_LAYERS
    long = dataclasses.replace(long, row_positions=elsewhere, col_positions=elsewhere)
    held = Held(show_coupling({"short": short, "long": long})).numbers
    assert [run["name"] for run in held["runs"]] == ["short", "long"]


def test_many_runs_do_not_stand_side_by_side() -> None:
    steps = {f"step {step}": depth_map(step, 0.5 * step) for step in range(6)}
    held = Held(show_coupling(steps)).numbers
    assert [run["name"] for run in held["runs"]] == list(steps)
    assert len(steps) > held["most_side_by_side"] >= 2


def test_what_directions_write_is_in_the_page(tiny_trace: tlc.Trace) -> None:
    decoded = tlc.directions.decode(tiny_trace, layer=1, k=2, n_tokens=3)
    result = tlc.depth_coupling(tiny_trace, k=4)
    held = Held(show_coupling(result, decoded=decoded)).numbers
    first, second = held["directions"]["1"]
    texts = [decoded.texts[token] for token in decoded.tokens[-1, 0, 0].tolist()]
    assert all(text.strip() in first for text in texts)
    assert first != second


# --- in a browser


@pytest.fixture(scope="module")
def chromium() -> Any:
    with browser.chromium() as driver:
        yield driver


def text_of(driver: Any, part: str) -> str:
    return str(
        driver.execute_script(
            'return document.querySelector(`[data-part="${arguments[0]}"]`).textContent',
            part,
        )
    )


def said(driver: Any) -> str:
    return text_of(driver, "said")


def crosshair(driver: Any) -> list[list[int]]:
    """The row and the column that each map's crosshair marks."""
    places = driver.execute_script(
        "return [...document.querySelectorAll('.tlc-cell')].map(cell => "
        "[parseFloat(cell.style.top), parseFloat(cell.style.left)])"
    )
    return [[round(p * N_LAYERS / 100) for p in place] for place in places]


def centre_of(
    driver: Any, row: int, column: int, index: int = 0
) -> tuple[float, float]:
    """Of a cell of one of the maps side by side, on the screen."""
    left, top, width, height = driver.execute_script(
        "const box = document.querySelectorAll('[data-part=map]')[arguments[0]]"
        ".getBoundingClientRect(); return [box.left, box.top, box.width, box.height]",
        index,
    )
    return (
        left + (column + 0.5) * width / N_LAYERS,
        top + (row + 0.5) * height / N_LAYERS,
    )


def png(driver: Any, part: str, index: int = 0) -> str:
    """A canvas as it is drawn, in base64; of those side by side, one."""
    return str(
        driver.execute_script(
            "return document.querySelectorAll(`[data-part=${arguments[0]}]`)[arguments[1]]"
            ".toDataURL()",
            part,
            index,
        )
    ).partition(",")[2]


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 358])
def test_the_map_in_a_browser(chromium: Any, tmp_path: Path, width: int) -> None:
    trained, untrained = depth_map(0, 3.0), depth_map(1, 0.0)
    runs = {"trained": trained, "untrained": untrained}
    view = show_coupling(runs, k=4)
    page = tmp_path / "map.html"
    view.save(page)
    browser.open_page(chromium, page, width)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    browser.settle(chromium)
    first_request, *others = browser.requested(chromium)
    assert first_request == page.as_uri()
    assert all(address.startswith("data:") for address in others)
    assert browser.complaints(chromium) == []
    assert not browser.scrolls_sideways(chromium)

    def expected(result: tlc.CouplingMap, row: int, column: int, k: int) -> str:
        return f"{naive_coupling(result.matrices[row, column, :k, :k]):.3f}"

    assert chromium.execute_script(
        "return document.querySelectorAll('[data-part=map]').length"
    ) == len(runs)

    chance = 1 - math.sqrt(1 - 1 / 4)
    shown_means = chromium.execute_script(
        "return [...document.querySelectorAll('[data-part=mean]')].map(e => e.textContent)"
    )
    pairs = [(i, j) for i in range(N_LAYERS) for j in range(N_LAYERS) if i != j]
    for shown, run in zip(shown_means, runs.values(), strict=True):
        mean = np.mean([naive_coupling(run.matrices[pair][:4, :4]) for pair in pairs])
        assert shown == f"mean {mean:.3f}, {mean / chance:.1f} × chance"

    # Hover, over either map: the same pair in both, and its values of both.
    for index in range(len(runs)):
        browser.move_to(chromium, *centre_of(chromium, 2, 1, index))
        assert text_of(chromium, "value") == expected(trained, 2, 1, 4)
        times = naive_coupling(trained.matrices[2, 1, :4, :4]) / chance
        assert text_of(chromium, "times") == f"{times:.1f} × chance"
        assert "J₁ of layer 2, top 4 singular vectors of layer 1" in said(chromium)
        for name, run in runs.items():
            assert f"{name} {expected(run, 2, 1, 4)}" in said(chromium)
        assert f"chance (random subspaces) {chance:.3f}" in said(chromium)
        assert crosshair(chromium) == [[2, 1]] * len(runs)
    # Click.
    choose_pair(chromium, 3, 0)
    assert "J₁ of layer 3, top 4 singular vectors of layer 0" in said(chromium)
    assert "9.00, 8.00, 7.00, 6.00" in text_of(chromium, "about")
    assert chromium.current_url.endswith("#k=4&pair=3,0")
    # Keyboard.
    from selenium.webdriver.common.keys import Keys

    first, second = chromium.find_elements("css selector", "[data-part=map]")
    first.send_keys(Keys.ARROW_UP, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    # Beside the maps, the pair that is said is the chosen one.
    browser.move_to(chromium, 1, 1)
    assert "J₁ of layer 2, top 4 singular vectors of layer 2" in said(chromium)
    assert text_of(chromium, "times") == "a layer with itself"
    second.send_keys(Keys.ARROW_UP)
    assert text_of(chromium, "value") == expected(trained, 1, 2, 4)
    assert chromium.current_url.endswith("#k=4&pair=1,2")
    # Slider.
    slider = chromium.find_element("css selector", "[data-part=slider]")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert text_of(chromium, "k") == "k = 5"
    assert text_of(chromium, "value") == expected(trained, 1, 2, 5)
    assert chromium.current_url.endswith("#k=5&pair=1,2")
    # Difference.
    before = png(chromium, "map", 1)
    chromium.find_element("css selector", "[data-part=difference]").click()
    a, b = (naive_coupling(run.matrices[1, 2, :5, :5]) for run in (trained, untrained))
    assert f"trained − untrained = {a - b:.3f}" in said(chromium)
    assert png(chromium, "map", 1) != before
    assert browser.complaints(chromium) == []


@pytest.mark.long("shows a page in a browser")
def test_an_address_opens_a_map_at_a_pair(chromium: Any, tmp_path: Path) -> None:
    page = show_coupling(depth_map(0, 3.0), k=4).save(tmp_path / "map.html")
    chromium.get("about:blank")
    chromium.get(f"{page.as_uri()}#k=2&pair=3,1")
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    assert "J₁ of layer 3, top 2 singular vectors of layer 1" in said(chromium)
    # What the map does not have is left as it is.
    chromium.get("about:blank")
    chromium.get(f"{page.as_uri()}#k=99&pair=3,77")
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    row, column = Held(show_coupling(depth_map(0, 3.0), k=4)).numbers["pair"]
    expected = f"J₁ of layer {row}, top 4 singular vectors of layer {column}"
    assert expected in said(chromium)


@pytest.mark.long("shows a page in a browser")
def test_the_line_of_a_pair_at_every_k(chromium: Any, tmp_path: Path) -> None:
    """The paths as drawn, against the values and the null of every k."""
    runs = {"trained": depth_map(0, 3.0), "untrained": depth_map(1, 0.0)}
    page = show_coupling(runs, k=4).save(tmp_path / "map.html")
    browser.open_page(chromium, page, 1280)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    choose_pair(chromium, 2, 1)
    paths = chromium.execute_script(
        "return [...document.querySelectorAll('[data-part=curves] path')].map(p => "
        "p.getAttribute('d'))"
    )[1:]
    _, _, _, height = map(
        float,
        chromium.execute_script(
            "return document.querySelector('[data-part=curves] svg').getAttribute('viewBox')"
        ).split(),
    )
    drawn = [
        [1 - float(y) / height for y in re.findall(r"[ML][\d.]+,(-?[\d.]+)", path)]
        for path in paths
    ]
    chance = [1 - math.sqrt(1 - 1 / k) for k in range(1, K + 1)]
    values = [
        [naive_coupling(run.matrices[2, 1, :k, :k]) for k in range(1, K + 1)]
        for run in runs.values()
    ]
    np.testing.assert_allclose(drawn, [chance, *reversed(values)], atol=1e-4)


@pytest.mark.long("shows a page in a browser")
def test_the_scale_stays_for_every_k(chromium: Any, tmp_path: Path) -> None:
    result = depth_map(0, 3.0)
    page = show_coupling(result, k=4).save(tmp_path / "map.html")
    browser.open_page(chromium, page, 1280)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    pairs = [(i, j) for i in range(N_LAYERS) for j in range(N_LAYERS) if i != j]
    tops = {
        k: max(naive_coupling(result.matrices[pair][:k, :k]) for pair in pairs)
        for k in (2, 4, 6)
    }
    assert tops[2] > tops[4] + 0.01
    for k, goes_beyond in ((4, False), (6, tops[6] > tops[4] + 1e-4), (2, True)):
        choose_k(chromium, k)
        assert float(text_of(chromium, "high")) == pytest.approx(tops[4], abs=6e-4)
        beyond = text_of(chromium, "beyond")
        assert beyond.startswith("and above") == goes_beyond
        chance = 1 - math.sqrt(1 - 1 / k)
        assert f"chance, {chance:.3f}" in beyond
        left = chromium.execute_script(
            "return document.querySelector('[data-part=chance]').style.left"
        )
        share = float(left.rstrip("%")) / 100
        assert share == pytest.approx(min(chance / tops[4], 1), abs=1e-3)


@pytest.mark.long("shows a page in a browser")
def test_without_scripts_a_picture_stands_in_its_place(
    chromium: Any, tmp_path: Path
) -> None:
    view = show_coupling({"trained": depth_map(0, 3.0), "untrained": depth_map(1, 0.0)})
    page = view.save(tmp_path / "map.html")
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(page.as_uri())
        shown = chromium.find_elements("css selector", "main *")
        visible = [element for element in shown if element.is_displayed()]
        assert [element.tag_name for element in visible] == ["div", "div", "img"]
        assert "interactive map" in visible[-1].get_attribute("alt")
    finally:
        chromium.execute_cdp_cmd(
            "Emulation.setScriptExecutionDisabled", {"value": False}
        )
    picture = PIL.Image.open(io.BytesIO(view._repr_png_() or b""))
    assert visible[-1].size == {"width": picture.width, "height": picture.height}


def drawn_shares(
    driver: Any, part: str, n_rows: int, n_cols: int, cmap: str, index: int = 0
) -> Any:
    """What the colours of a canvas say: shares of the scale from its first colour (0) to
    its last (1).
    """
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(png(driver, part, index))))
    width, height = picture.size
    centres = [
        (int((column + 0.5) * width / n_cols), int((row + 0.5) * height / n_rows))
        for row in range(n_rows)
        for column in range(n_cols)
    ]
    pixels = np.array([picture.getpixel(centre)[:3] for centre in centres])
    shares = np.linspace(0, 1, 2001)
    scale = matplotlib.colormaps[cmap].resampled(2001)(shares)[:, :3] * 255
    nearest = np.abs(pixels[:, None] - scale).sum(-1).argmin(1)
    return shares[nearest].reshape(n_rows, n_cols)


def choose_pair(driver: Any, row: int, column: int) -> None:
    driver.execute_script(
        "const map = document.querySelector('[data-part=map]');"
        "map.dispatchEvent(new MouseEvent('click', {clientX: arguments[0], "
        "clientY: arguments[1], bubbles: true}))",
        *centre_of(driver, row, column),
    )


def choose_k(driver: Any, k: int) -> None:
    driver.execute_script(
        "const slider = document.querySelector('[data-part=slider]');"
        "slider.value = arguments[0]; slider.dispatchEvent(new Event('input'))",
        k,
    )


def largest_entry(results: dict[str, tlc.CouplingMap], *pair: int, k: int) -> float:
    return max(
        float(run.matrices[pair][:k, :k].abs().max()) for run in results.values()
    )


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("n_runs", [1, 2, 6])
@pytest.mark.parametrize("width", [1280, 390])
def test_colours_say_every_matrix_on_one_scale_for_all_runs(
    chromium: Any, tmp_path: Path, n_runs: int, width: int
) -> None:
    trained = depth_map(0, 3.0)
    weak = depth_map(1, 0.0)
    # Of another σ₁, as an untrained model is.
    untrained = dataclasses.replace(
        weak,
        matrices=weak.matrices / 5,
        singular_values=weak.singular_values / 20,
    )
    steps = {f"step {i}": depth_map(i, 0.5 * i) for i in range(n_runs)}
    results = {"trained": trained, "untrained": untrained} if n_runs == 2 else steps
    page = tmp_path / "map.html"
    show_coupling(results, k=4).save(page)
    browser.open_page(chromium, page, width)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    for i, (name, result) in enumerate(results.items()):
        # Few runs stand side by side, many are gone through by a slider.
        index = i if n_runs == 2 else 0
        if n_runs > 2:
            chromium.execute_script(
                "const runs = document.querySelector('[data-part=runs]');"
                "runs.value = arguments[0]; runs.dispatchEvent(new Event('input'))",
                i,
            )
        for row, column, k in ((2, 1, 4), (0, 3, 4), (3, 3, 6), (1, 0, 1)):
            choose_k(chromium, k)
            choose_pair(chromium, row, column)
            largest = largest_entry(results, row, column, k=k)
            caption = chromium.find_elements(
                "css selector", "[data-part=matrices] figcaption"
            )[index].text
            assert n_runs == 1 or name in caption
            (end,) = re.findall(r"full at ([\d.e+-]*\d)", text_of(chromium, "about"))
            assert float(end) == pytest.approx(largest, rel=0.005)
            colours = drawn_shares(chromium, "matrix", k, k, "RdBu_r", index)
            drawn = (2 * colours - 1) * float(end)
            expected = result.matrices[row, column, :k, :k].numpy()
            assert np.abs(drawn - expected).max() < 0.02 * largest
        values = np.array(
            [
                [naive_coupling(A[:4, :4]) for A in matrices]
                for matrices in result.matrices
            ]
        )
        choose_k(chromium, 4)
        others = ~np.eye(N_LAYERS, dtype=bool)
        # The chosen pair has a frame.
        others[1, 0] = False
        drawn_map = drawn_shares(chromium, "map", N_LAYERS, N_LAYERS, "viridis", index)
        top = float(text_of(chromium, "high"))
        assert np.abs(drawn_map * top - values)[others].max() < 0.02 * top
    assert browser.complaints(chromium) == []


@pytest.mark.long("shows a page in a browser")
def test_a_pair_that_is_0_in_every_run_is_white(chromium: Any, tmp_path: Path) -> None:
    matrices = depth_map(0, 1.0).matrices.clone()
    matrices[1, 2] = 0
    result = dataclasses.replace(depth_map(0, 1.0), matrices=matrices)
    page = tmp_path / "map.html"
    with pytest.warns(UserWarning, match="undefined"):
        show_coupling(result).save(page)
    browser.open_page(chromium, page, 900)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    choose_pair(chromium, 1, 2)
    drawn = drawn_shares(chromium, "matrix", K, K, "RdBu_r")
    assert np.abs(drawn - 0.5).max() < 0.001
    assert browser.complaints(chromium) == []


@pytest.mark.long("shows a page in a browser")
def test_steps_play(chromium: Any, tmp_path: Path) -> None:
    steps = {f"step {step}": depth_map(step, 0.5 * step) for step in range(6)}
    page = tmp_path / "steps.html"
    show_coupling(steps).save(page)
    browser.open_page(chromium, page, 900)
    browser.wait(chromium, "return document.querySelector('[data-drawn]') !== null")
    assert text_of(chromium, "run") == "step 0"
    chromium.find_element("css selector", "[data-part=play]").click()
    browser.wait(
        chromium,
        "return document.querySelector('[data-part=run]').textContent === 'step 3'",
    )
    chromium.find_element("css selector", "[data-part=play]").click()
    assert re.fullmatch(r"step \d", text_of(chromium, "run"))


def test_a_page_of_a_model_of_30_layers_is_small(tmp_path: Path) -> None:
    """Two runs, 30 layers, k = 50: 1.5 MB, script and style included."""
    generator = torch.Generator().manual_seed(0)
    order = tuple(range(30))
    large = tlc.CouplingMap(
        matrices=torch.randn(30, 30, 50, 50, generator=generator),
        singular_values=torch.linspace(9, 4, 50).expand(30, 50),
        frobenius_norms=torch.full((30,), 60.0),
        d_model=576,
        row_layers=order,
        col_layers=order,
        row_positions=(9,) * 30,
        col_positions=(9,) * 30,
        kind="depth",
        orientation="ujv",
        provenance={},
    )
    view = show_coupling({"trained": large, "untrained": large})
    page = view.save(tmp_path / "map.html").read_bytes()
    assert len(page) < 1.6e6
    # Compressed.
    assert explorer_script()[:50].encode() not in page
