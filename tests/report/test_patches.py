"""The report on an image: what its page says and shows, as text and in a real
browser.
"""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import browser
import tl_coupling as tlc
from blank_pictures import unrendered
from tl_coupling.report import html_report, write_report
from vision_models import NETWORKS, pixels, vit

# Who makes the page shows it, where tests are grouped.
pytestmark = pytest.mark.xdist_group("report of an image")

NAME = "<b>&amp;.png"


@pytest.fixture(scope="module")
def runs(
    folder_vit: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tlc.portraits.Portrait]:
    image = tmp_path_factory.mktemp("image") / NAME
    image.write_bytes((folder_vit / "image.png").read_bytes())
    return {
        name: tlc.portrait(
            tlc.trace(tlc.load_model(str(folder_vit), untrained=untrained), image),
            k=(4, 8),
            position=0,
        )
        for name, untrained in (("trained", False), ("untrained", True))
    }


@pytest.fixture(scope="module")
def page(
    runs: dict[str, tlc.portraits.Portrait], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", runs)


@pytest.fixture(scope="module")
def text(runs: dict[str, tlc.portraits.Portrait]) -> str:
    with unrendered():
        return text_of(html_report(runs))


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page[: page.index("<script")]).split())


@pytest.mark.long("makes a report of an image")
def test_the_picture_is_shown_once_each_pixel_a_square(
    page: Path, folder_vit: Path
) -> None:
    source = page.read_text(encoding="utf-8")
    assert "The image &lt;b&gt;&amp;amp;.png" in source
    (data,) = re.findall(r'src="data:image/png;base64,([^"]*)" alt="The image', source)
    with (
        Image.open(io.BytesIO(base64.b64decode(data))) as shown,
        Image.open(folder_vit / "image.png") as image,
    ):
        assert shown.size == (8 * 14, 16 * 14)
        np.testing.assert_array_equal(
            np.asarray(shown)[7::14, 7::14], np.asarray(image)
        )


def test_the_words_are_those_for_an_image(text: str) -> None:
    assert (
        "9 tokens: 0 cls and 4 × 2 patches, named by row and column, 1 0,0 … 8 3,1"
        in text
    )
    assert "What the other tokens do to 0 cls" in text
    assert "How certain the class is" in text
    for of_texts in (
        "tokens before",
        "stands before",
        "next token",
        "the last token",
        "prompt",
    ):
        assert of_texts not in text.partition("How this was made")[0]


def test_the_numbers_over_the_picture_are_those_of_the_results(
    runs: dict[str, tlc.portraits.Portrait], text: str
) -> None:
    for name, run in runs.items():
        norms = run.influence.frobenius_norm[:, 1:]
        share = norms / norms.sum(1, keepdim=True)
        for what, values in (
            (f"Share of influence, all layers, {name}.", share.mean(0)),
            (f"Share of influence, middle layer 1, {name}.", share[1]),
            (f"Coupling, {name}.", run.tokens["self"].coupling(4)[0, 1:]),
            (
                f"Line-shape score, {name}.",
                tlc.line_shape_score(run.trace.residual)[1:],
            ),
        ):
            at = int(values.argmax())
            assert (
                f"{what} Largest at {at + 1} {at // 2},{at % 2} : {values[at]:.3g}"
                in text
            )
        assert f"0 cls : {tlc.line_shape_score(run.trace.residual)[0]:.3g}." in text


@pytest.mark.long("makes a report of an image")
def test_a_model_without_classes_has_no_entropy(folder_vit: Path) -> None:
    trace = tlc.trace(vit("ViTModel")[0], pixels())
    with pytest.warns(UserWarning, match="no logit-lens entropy"):
        measured = tlc.portrait(trace, k=(4,), position=-1)
    with unrendered():
        text = text_of(html_report({"trained": measured}))
    assert "How certain" not in text
    assert "The image as the model reads it, 8 × 16 pixels." in text
    # The measured patch has no share of its own.
    assert "What the other tokens do to 8 3,1" in text
    assert "Share of influence, all layers, trained." in text


@pytest.mark.long("makes a report of an image")
def test_tokens_that_are_no_patches_are_not_drawn_over_the_picture(
    runs: dict[str, tlc.portraits.Portrait],
) -> None:
    trace = runs["trained"].trace
    unknown = replace(trace, provenance=trace.provenance | {"patch_grid": None})
    with unrendered():
        page = html_report({"trained": replace(runs["trained"], trace=unknown)})
    assert 'id="patches"' not in page
    assert "#patches" not in page
    assert "9 tokens: 0 cls 1 0,0 2 0,1" in text_of(page)
    assert "The image" in text_of(page)


@pytest.mark.long("makes a report of an image")
def test_a_text_that_is_read_both_ways_is_no_image() -> None:
    network = NETWORKS["bert"]()
    with pytest.warns(UserWarning, match="no logit-lens entropy"), torch.no_grad():
        measured = tlc.portrait(tlc.trace_modules(network.blocks, network.run), k=(4,))
    with unrendered():
        text = text_of(html_report({"trained": measured}))
    assert "What the other tokens do to 5 5" in text
    assert "The image" not in text
    # Its blocks normalise after adding: said on top, not only among how it was made.
    assert (
        "Remarks: layer 0: the block normalises the stream itself"
        in text.partition("Across depth")[0]
    )


@pytest.mark.long("shows a page in a browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser(
    runs: dict[str, tlc.portraits.Portrait], page: Path, width: int, tmp_path: Path
) -> None:
    with browser.chromium() as driver:
        browser.open_page(driver, page, width)
        assert all(
            url.startswith(("file:", "data:")) for url in browser.requested(driver)
        )
        assert browser.complaints(driver) == []
        assert not browser.scrolls_sideways(driver)
        assert browser.spilling(driver) == []
        assert (
            driver.execute_script(
                "return document.querySelectorAll('b img, header b:not(.tlc-explorer b)').length"
            )
            == 0
        )
        # Names in a row do not run together.
        row = "return document.querySelector('.colored-tokens').textContent"
        assert driver.execute_script(row).split()[:3] == ["0,0", "0,1", "1,0"]
        driver.execute_script("document.querySelector('nav a').click()")
        browser.wait(
            driver,
            "return Math.abs(document.querySelector('#patches').getBoundingClientRect().top) < 50",
        )
        boxes: list[Any] = driver.execute_script(
            "return [...document.querySelectorAll('#patches "
            "img')].filter(i => i.complete && i.naturalWidth > 99)"
            ".map(i => i.getBoundingClientRect()).map(box => [box.left, box.right])"
        )
        # All layers, three thirds of them, coupling, and the line-shape score.
        assert len(boxes) == 6 * len(runs)
        assert all(0 <= left < right - 200 and right <= width for left, right in boxes)
        browser.screenshot(driver, tmp_path / "page.png")
        # Patches are coloured, the picture below them is grey.
        left, top = driver.execute_script(
            "const box = document.querySelector('#patches img').getBoundingClientRect();"
            "return [box.left + scrollX, box.top + scrollY]"
        )
        with Image.open(tmp_path / "page.png") as shot:
            seen = np.asarray(
                shot.convert("HSV").crop(
                    (int(left), int(top), int(left) + 200, int(top) + 200)
                )
            )
        assert (seen[..., 1] > 40).mean() > 0.2
