"""Pictures on the pages, without building the site: where they go, what the gallery
lists, and the drawing that explains coupling.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import pages
import tl_coupling as tlc
from sphinx_extensions import DOCS, module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    pytest.importorskip("sphinx", reason="Sphinx is not installed: `make docs`")
    module("house")
    module("made")
    module("names")
    module("coupling_drawing")
    return module("figures")


def save_picture(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (800, 600), "white").save(file)


def illustrated_blocks() -> dict[str, list[pages.Block]]:
    return {
        pages.page_name(path): [block for block in pages.blocks(path) if block.plots]
        for path in pages.PAGES
        if path.parent.name in ("concepts", "how-to")
    }


def test_every_concept_has_a_picture_and_none_twice() -> None:
    for page, blocks in illustrated_blocks().items():
        names = [name for block in blocks for name in block.plots]
        # One file for each name.
        assert len(set(names)) == len(names), page
        assert names or not page.startswith("concepts/"), page


def test_pages_print_no_shapes() -> None:
    printed = [
        block
        for path in pages.PAGES
        for block in pages.blocks(path)
        if "torch.Size" in (block.prints or "")
    ]
    assert not printed


def test_pictures_stand_below_their_blocks(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class App:
        srcdir = DOCS

    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "docs/figures")
    for page, blocks in illustrated_blocks().items():
        names = [name for block in blocks for name in block.plots]
        for name in names:
            save_picture(tmp_path / f"docs/figures/pages/{page}/{name}.png")
        before = (DOCS / f"{page}.md").read_text()
        source = [before]
        figures.show_below_blocks(App, page, source)
        shown = re.findall(r"^!\[.*\]\(/figures/pages/(.+)\.png\)", source[0], re.M)
        assert shown == [f"{page}/{name}" for name in names]
        labels = [f"({figures.anchor(name)})=" for name in names]
        added = [
            line
            for line in source[0].splitlines()
            if re.match(r"!\[.*\]\(/figures/", line) or line in labels
        ]
        rest = [line for line in source[0].splitlines() if line not in added]
        assert "".join(rest) == "".join(before.splitlines())
    # The page of a vision transformer: a picture after what its block prints.
    page = "how-to/vision"
    source = [(DOCS / f"{page}.md").read_text()]
    figures.show_below_blocks(App, page, source)
    label, code, printed, picture = (
        source[0].index(text)
        for text in (
            "(drawn-by-plot-patches)=",
            "plot_patches(image, influence",
            "17 sources",
            "![",
        )
    )
    assert label < code < printed < picture


def test_the_gallery_lists_every_plot_once(figures: ModuleType) -> None:
    text = (DOCS / "gallery.md").read_text()
    grids = re.findall(r"^```\{plots\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    thumbnails = [
        figures.Thumbnail.from_line(line)
        for grid in grids
        for line in grid.splitlines()
    ]
    public = [name.rpartition(".")[2] for name in figures.plots()]
    assert sorted(thumbnail.plot for thumbnail in thumbnails) == sorted(public)
    assert all(thumbnail.caption.endswith(".") for thumbnail in thumbnails)
    # A filter that shows one or two pictures is none; a picture without is never found.
    subjects = Counter(
        subject for thumbnail in thumbnails for subject in thumbnail.subjects
    )
    assert min(subjects.values()) >= 3
    assert all(thumbnail.subjects for thumbnail in thumbnails)
    assert all(re.fullmatch("[a-z]+", subject) for subject in subjects)


def test_every_plot_has_an_example_that_calls_it(figures: ModuleType) -> None:
    for name in figures.plots():
        assert pages.plots_in(figures.example_of(name))[-1] == name.rpartition(".")[2]


def test_figures_are_saved_by_name_with_their_titles(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    figure.suptitle("Two\nlines")
    figure.subplots().set_title("$5")
    pages.save_figures([figure], ["plot_this"], tmp_path / "page")
    with Image.open(tmp_path / "page/plot_this.png") as image:
        assert image.size == (800, 600)
        assert image.info["Description"] == "Two, lines; 5"
    with pytest.raises(ValueError, match="zip"):
        pages.save_figures([figure], ["plot_this", "plot_that"], tmp_path)


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return module("coupling_drawing")


def test_the_drawing_says_what_its_matrices_give(drawing: ModuleType) -> None:
    values = re.findall(r'class="value"[^>]*>coupling (.+?)<', drawing.drawing())
    expected = [
        1 - float(tlc.normalized_miscoupling(drawing.U.T @ jacobian @ drawing.V))
        for _, _, jacobian, _ in drawing.PANELS
    ]
    assert [float(value) for value in values] == pytest.approx(expected, abs=0.005)
    defined, coupled, other = expected
    assert defined == pytest.approx(1)
    assert coupled == pytest.approx(1)
    assert other < tlc.random_subspace_null(2)


def test_the_directions_of_the_drawing_are_singular_vectors(
    drawing: ModuleType,
) -> None:
    spectrum = tlc.svd(drawing.PANELS[0][2])
    for drawn, computed in ((drawing.U, spectrum.U), (drawing.V, spectrum.Vh.mT)):
        cosines = (drawn * computed).sum(0).abs()
        torch.testing.assert_close(cosines, torch.ones(2))


def test_the_drawing_stays_inside_its_panels(drawing: ModuleType) -> None:
    figure = ElementTree.fromstring(drawing.drawing())
    panels = figure.findall("div/svg")
    assert len(panels) == 3
    for panel in panels:
        for text in panel.iter("text"):
            words = text.text or ""
            # Letters of 13 px are about 7 px wide.
            half = 3.5 * len(words)
            assert half <= float(text.get("x", 0)) <= drawing.WIDTH - half, words
            assert 12 <= float(text.get("y", 0)) <= drawing.HEIGHT, words


def test_a_picture_without_a_width_opens_whole(
    figures: ModuleType, tmp_path: Path
) -> None:
    nodes = pytest.importorskip("docutils.nodes")
    docutils = pytest.importorskip("docutils.utils")
    save_picture(tmp_path / "pictures" / "sharp.png")
    save_picture(tmp_path / "_made" / "plain.png")
    document = docutils.new_document("page")
    cases = {
        "sharp": {"uri": "pictures/sharp.png"},
        "plain": {"uri": "_made/plain.png"},
        "narrow": {"uri": "pictures/sharp.png", "width": "150px"},
        "card": {"uri": "pictures/sharp.png", "classes": ["sd-card-img-top"]},
        "drawing": {"uri": "_made/house.svg"},
    }
    images = {name: nodes.image(**attributes) for name, attributes in cases.items()}
    document += list(images.values())
    figures.open_whole(SimpleNamespace(srcdir=tmp_path), document)
    widths = {name: image.get("width") for name, image in images.items()}
    assert widths == {
        "sharp": "400px",
        "plain": "736px",
        "narrow": "150px",
        "card": None,
        "drawing": None,
    }


def test_code_stays_whole_unless_a_word_is_longer_than_a_line() -> None:
    nodes = pytest.importorskip("docutils.nodes")
    docutils = pytest.importorskip("docutils.utils")
    words = module("whole_words")
    document = docutils.new_document("page")
    texts = ["tl-coupling depth --k 10", "--k " + "a-" * words.LONGEST, ""]
    document += [nodes.literal(text=text) for text in texts]
    words.mark(SimpleNamespace(), document)
    assert [literal["classes"] for literal in document] == [["whole-words"], [], []]


@pytest.mark.parametrize(("width", "height"), [(6.0, 4.0), (4.0, 8.0)])
def test_a_thumbnail_shows_the_plot_alone(
    figures: ModuleType, tmp_path: Path, width: float, height: float
) -> None:
    """Of a black plot with a red title, above a legend in red."""
    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots()
    ax.set_facecolor("black")
    figure.suptitle("A title", color="red", fontsize=30)
    figure.legend([], title="a legend", title_fontsize=20, loc="outside lower center")
    figure.legends[0].get_title().set_color("red")
    pages.save_figures([figure], ["plot_this"], tmp_path)
    whole = Image.open(tmp_path / "plot_this.png").convert("RGB")
    card = figures.card((tmp_path / "plot_this.png").read_bytes())
    small = Image.open(io.BytesIO(card)).convert("RGB")
    assert small.size == (640, 400)
    assert share_of(whole, RED) > 0.001
    assert share_of(small, RED) == 0
    assert share_of(small, BLACK) > 0.4


RED = (255, 0, 0)
BLACK = (0, 0, 0)


def share_of(image: Image.Image, color: tuple[int, int, int]) -> float:
    """Return the share of a picture's dots that are near to a colour."""
    dots = np.asarray(image, int)
    return float((np.abs(dots - color).max(axis=-1) < 40).mean())


def test_what_is_white_around_a_picture_is_no_part_of_its_thumbnail(
    figures: ModuleType,
) -> None:
    picture = Image.new("RGBA", (800, 600), (255, 255, 255, 0))
    picture.paste((0, 0, 0, 255), (300, 300, 460, 400))
    written = io.BytesIO()
    picture.save(written, "PNG")
    small = Image.open(io.BytesIO(figures.card(written.getvalue()))).convert("RGB")
    assert share_of(small, BLACK) == 1
