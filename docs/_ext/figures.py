"""What `plot_*` draws, on the pages: below the blocks that call it, in the API
reference, and in the gallery.

The pages are run as `tests/test_readme.py` runs them. A plot that neither a page nor a
notebook draws is drawn by the example of its docstring.
"""

import base64
import doctest
import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from docutils import nodes
from docutils.parsers.rst import directives
from PIL import Image
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import pages
from coupling_drawing import drawing
from made import ROOT, card, digest, write
from names import page_of
from public_api import public_names

FIGURES = ROOT / "docs/_made/figures"
# Saved with 200 dots an inch, shown with 100.
DOTS = 2
WIDTH_OF_PAGE = 736
# Beside the text of a docstring; a click shows the whole.
WIDTH_IN_REFERENCE = 460
EXAMPLES = Path(__file__).with_name("examples.py")


class Picture(NamedTuple):
    """A file of `docs/_made/figures`, and the page that shows how it is drawn."""

    file: Path
    page: str

    @property
    def source(self) -> str:
        """Return its path as pages write it."""
        return f"/{self.file.relative_to(ROOT / 'docs')}"

    @property
    def words(self) -> str:
        """Return what stands at its top, where the file knows it, for those who do not
        see it.
        """
        with Image.open(self.file) as image:
            return image.info.get("Description") or f"Drawn by {self.file.stem}"

    @property
    def width(self) -> int:
        with Image.open(self.file) as image:
            return image.width // DOTS


def plots() -> dict[str, Any]:
    """Return the public `plot_*` by their full names."""
    return {
        name: function
        for name, function in public_names().items()
        if name.rpartition(".")[2].startswith("plot_")
    }


def illustrated_pages() -> list[Path]:
    """Return the pages that show what their blocks draw."""
    return [path for path in pages.PAGES if path.parent.name in ("concepts", "how-to")]


# What is drawn, and when again.


def draw(app: Sphinx) -> None:
    """Draw what the pages and the examples of docstrings draw, unless the same code
    drew it before, or notebooks are not run either and there is an earlier picture.
    """
    again = app.config.nb_execution_mode != "off"
    _run(pages.__file__, _code_of_pages(), "pages", again)
    _from_notebooks()
    undrawn = [name for name in plots() if _find(name) is None]
    examples = "\n".join(example_of(name) for name in undrawn)
    _run(EXAMPLES, examples + EXAMPLES.read_text(), "examples", again, *undrawn)
    write(ROOT / "docs/_made/coupling.svg", drawing())
    for name in plots():
        picture = picture_of(name)
        write(thumbnail(name), card(picture.file.read_bytes()))


def _code_of_pages() -> str:
    return "\n".join(
        block.text
        for path in pages.PAGES
        for block in pages.blocks(path)
        if block.language == "python" and not block.needs
    )


def _run(script: str | Path, code: str, kind: str, again: bool, *names: str) -> None:
    """Run a script that draws to a folder, in an empty one."""
    key = hashlib.sha256((digest() + code).encode()).hexdigest()
    figures = FIGURES / kind
    drawn_by = figures / "digest"
    if drawn_by.exists() and not (again and drawn_by.read_text() != key):
        return
    environment = os.environ | {"MPLBACKEND": "agg"}
    paths = (ROOT / "tests", ROOT / "tests/support", environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    FIGURES.mkdir(parents=True, exist_ok=True)
    # Beside the folder that it takes the place of, once everything is drawn.
    with tempfile.TemporaryDirectory(dir=FIGURES.parent) as folder:
        drawn = Path(folder, "drawn")
        done = subprocess.run(
            [sys.executable, str(script), "--figures", str(drawn), *names],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ExtensionError(f"{kind} that draw: {done.stderr[-3000:]}")
        (drawn / "digest").write_text(key)
        shutil.rmtree(figures, ignore_errors=True)
        drawn.rename(figures)


def _from_notebooks() -> None:
    """Write the first picture of each cell of a notebook that calls a `plot_*`."""
    for path in sorted(ROOT.glob("demos/*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            drawn = [
                output["data"]["image/png"]
                for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})
            ]
            called = pages.plots_in("".join(cell["source"]))
            if drawn and called:
                file = FIGURES / "notebooks/gallery" / path.stem / f"{called[0]}.png"
                write(file, base64.b64decode(drawn[0]))


def example_of(name: str) -> str:
    """Return the code of the example in a docstring."""
    text = inspect.getdoc(plots()[name]) or ""
    return "".join(
        example.source for example in doctest.DocTestParser().get_examples(text)
    )


# Where a plot is drawn.


def _find(name: str) -> Picture | None:
    short = name.rpartition(".")[2]
    gallery = (ROOT / "docs/gallery.md").read_text()
    notebooks = re.findall(r"^gallery/\w+$", gallery, re.MULTILINE)
    for page in notebooks:
        if (file := FIGURES / "notebooks" / page / f"{short}.png").exists():
            return Picture(file, page)
    for page in map(pages.page_name, illustrated_pages()):
        if (file := FIGURES / "pages" / page / f"{short}.png").exists():
            return Picture(file, page)
    return None


@functools.cache
def picture_of(name: str) -> Picture:
    """Return what a plot draws in a notebook, else on a page, else in its example."""
    if (picture := _find(name)) is not None:
        return picture
    return Picture(FIGURES / f"examples/{name.rpartition('.')[2]}.png", page_of(name))


def thumbnail(name: str) -> Path:
    """Return the file of a plot's picture in the proportions of all cards."""
    return ROOT / f"docs/_made/thumbnails/{name.rpartition('.')[2]}.png"


# On the pages.


def show_below_blocks(app: Sphinx, page: str, source: list[str]) -> None:
    """Put pictures below the blocks that draw them, and a place to link to above."""
    path = Path(app.srcdir, f"{page}.md")
    if path not in illustrated_pages():
        return
    for block in reversed([block for block in pages.blocks(path) if block.plots]):
        pictures = [
            Picture(FIGURES / f"pages/{page}/{name}.png", page) for name in block.plots
        ]
        # Without its picture is a block that was written since pages were last run.
        shown = "\n\n".join(
            f"![{picture.words}]({picture.source}){{width={picture.width}px}}"
            for picture in pictures
            if picture.file.exists()
        )
        labels = "".join(f"({anchor(name)})=\n" for name in block.plots)
        text = source[0]
        source[0] = (
            f"{text[: block.start]}{labels}{text[block.start : block.end]}"
            f"\n\n{shown}\n\n{text[block.end :].lstrip()}"
        )


def anchor(name: str) -> str:
    """Return the place of the block that calls a plot, on its page."""
    return f"drawn-by-{name.replace('_', '-')}"


def show_in_reference(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Put a picture below the first paragraph of the docstring of a `plot_*`."""
    if name not in plots():
        return
    picture = picture_of(name)
    said = "Drawn by the example below, on SmolLM2-135M-Instruct or on small models."
    if picture.page != page_of(name):
        said = f"Drawn by the code in :doc:`/{picture.page}`."
    figure = [
        *("", f".. figure:: {picture.source}"),
        f"   :width: {min(picture.width, WIDTH_IN_REFERENCE)}px",
        f"   :alt: {picture.words}",
        *("", f"   {said}", ""),
    ]
    end = lines.index("") if "" in lines else len(lines)
    lines[end:end] = figure


class Thumbnail(NamedTuple):
    """A line `plot_name [what, is, drawn]: caption`; what is drawn may be left out."""

    plot: str
    subjects: list[str]
    caption: str

    @classmethod
    def from_line(cls, line: str) -> "Thumbnail":
        found = re.fullmatch(r"(\w+)(?: \[(.+?)\])?: (.+)", line)
        if found is None:
            raise ExtensionError(f"no `plot_name [subjects]: caption`: {line}")
        plot, subjects, caption = found.groups(default="")
        return cls(plot, subjects.split(", ") if subjects else [], caption)


class Plots(SphinxDirective):
    """A grid of thumbnails from lines, see `Thumbnail`. Each opens the page that draws
    it; with `:reference:`, its entry in the API reference. What is drawn becomes
    classes, by which `_static/gallery.js` filters.
    """

    has_content = True
    option_spec: ClassVar = {"reference": directives.flag}

    def run(self) -> list[nodes.Node]:
        names = {name.rpartition(".")[2]: name for name in plots()}
        grid = nodes.container(classes=["plots"])
        for line in self.content:
            thumbnail = Thumbnail.from_line(line)
            grid += self._card(names[thumbnail.plot], thumbnail)
        return [grid]

    def _card(self, name: str, thumbnail: Thumbnail) -> nodes.Element:
        short = thumbnail.plot
        picture = picture_of(name)
        page, place = page_of(name), name
        if "reference" not in self.options and picture.page != page:
            page = picture.page
            place = anchor(short) if not page.startswith("gallery/") else ""
        address = self.env.app.builder.get_relative_uri(self.env.docname, page)
        if place:
            address = f"{address.partition('#')[0]}#{place}"
        image = nodes.image(uri=f"/_made/thumbnails/{short}.png", alt=picture.words)
        link = nodes.reference("", "", image, internal=True, refuri=address)
        link += _breakable(short)
        words, messages = self.parse_inline(thumbnail.caption)
        subjects = [f"of-{subject}" for subject in thumbnail.subjects]
        card = nodes.container(classes=["plot", *subjects])
        card += nodes.paragraph("", "", link)
        card += nodes.paragraph("", "", *words, *messages)
        return card


def _breakable(name: str) -> nodes.literal:
    """Return a name that may go to another line after each of its words."""
    literal = nodes.literal()
    *first, last = name.split("_")
    for word in first:
        literal += [nodes.Text(f"{word}_"), nodes.raw("", "<wbr>", format="html")]
    literal += nodes.Text(last)
    return literal


def open_whole(app: Sphinx, doctree: nodes.document) -> None:
    """Give pictures the width at which they are shown: a click then opens the file.

    Sphinx links pictures that have a width to their file. Cards and thumbnails lead to
    pages, and drawings in SVG are whole at every width.
    """
    # Pictures of findings, and README's, have as many dots as the plots of pages.
    sharp = (Path(app.srcdir), Path(app.srcdir, "pictures"))
    for image in doctree.findall(nodes.image):
        file = Path(app.srcdir, image["uri"].lstrip("/"))
        has_width = {"width", "height", "scale"} & set(image.attributes)
        is_card = "sd-card-img-top" in image["classes"]
        if has_width or is_card or file.suffix != ".png" or not file.exists():
            continue
        with Image.open(file) as picture:
            dots = DOTS if file.parent in sharp else 1
            image["width"] = f"{min(picture.width // dots, WIDTH_OF_PAGE)}px"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", draw, priority=400)
    # After Sphinx has found the files.
    app.connect("doctree-read", open_whole, priority=900)
    app.connect("source-read", show_below_blocks)
    app.connect("autodoc-process-docstring", show_in_reference)
    app.add_directive("plots", Plots)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
