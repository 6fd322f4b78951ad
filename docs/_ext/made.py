"""What pages include and the code makes before the build, in `docs/_made`: gallery,
report, benchmarks, the house.
"""

import ast
import base64
import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageOps
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from house import drawing

ROOT = Path(__file__).parents[2]
CARD = 640, 400
PROMPT = "What is the capital of France? The capital is"


def write(path: Path, content: str | bytes) -> None:
    """Leaves a file alone that says the same, so that the pages with it are not made
    again.
    """
    new = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != new:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(new)


def digest() -> str:
    """Return a digest that changes with the code that notebooks and reports run and
    how, not with its comments and docstrings.
    """
    found = hashlib.sha256()
    patterns = ("tl_coupling/**/*.py", "demos/**/*.py", "docs/conf.py")
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and ast.get_docstring(node) is not None
            ):
                node.body = node.body[1:]
        found.update(ast.dump(tree).encode())
    for package in ("torch", "transformer-lens", "matplotlib"):
        found.update(importlib.metadata.version(package).encode())
    return found.hexdigest()[:16]


def notebooks(app: Sphinx) -> None:
    """Write the notebooks of `demos` without outputs, which the build makes, and a
    picture of each for its card.
    """
    sources = sorted(ROOT.glob("demos/*.ipynb"))
    for path in sources:
        notebook = json.loads(path.read_text())
        write(
            Path(app.srcdir, f"_made/{path.stem}.png"),
            card(tagged_picture(notebook, path.name)),
        )
        first, install = notebook["cells"][:2]
        badge = f"[![Open in Colab](../_static/colab.svg){{.colab}}](colab:demos/{path.name})"
        first["source"] = re.sub(
            r"<a [^>]*colab[^>]*>.*?</a>", badge, "".join(first["source"])
        )
        install["metadata"]["tags"] = ["hide-input"]
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"outputs": [], "execution_count": None}
                cell["metadata"].pop("execution", None)
        write(Path(app.srcdir, "gallery", path.name), json.dumps(notebook, indent=1))
    # Kernels run nobody's start-up files, and do not speak of how they are connected.
    quiet = Path(app.srcdir, "_made/ipython/profile_default/ipython_kernel_config.py")
    write(quiet, "c = get_config()\nc.Application.log_level = 40\n")
    os.environ["IPYTHONDIR"] = str(quiet.parents[1])
    logging.getLogger("traitlets").setLevel(logging.WARNING)
    for stale in Path(app.srcdir, "gallery").glob("*.ipynb"):
        if stale.name not in {path.name for path in sources}:
            stale.unlink()


def tagged_picture(notebook: dict[str, Any], name: str) -> bytes:
    """Return the first picture of the cell that is tagged "thumbnail"."""
    for cell in notebook["cells"]:
        if "thumbnail" in cell["metadata"].get("tags", []):
            for output in cell["outputs"]:
                if picture := output.get("data", {}).get("image/png"):
                    return base64.b64decode(picture)
    raise ExtensionError(
        f"demos/{name}: no cell with the tag `thumbnail` has a picture"
    )


def card(picture: bytes) -> bytes:
    """Return the plot of a picture on white, at the proportions that all cards have.

    Titles and legends, which are too small to read there, are cut off where the file
    says where its plot is. Of a high plot the upper part is shown.
    """
    image = Image.open(io.BytesIO(picture))
    plot = without_margins(image)
    cut = ImageOps.pad(plot, CARD, color="white")
    written = io.BytesIO()
    cut.save(written, "PNG", optimize=True)
    return written.getvalue()


def without_margins(image: Image.Image) -> Image.Image:
    """Return a picture's plot, without what is white around it."""
    plot = Image.new("RGB", image.size, "white")
    whole = image.convert("RGBA")
    plot.paste(whole, mask=whole)
    if place := image.info.get("Plot"):
        left, top, right, bottom = (float(share) for share in place.split())
        width, height = plot.size
        plot = plot.crop(
            (
                int(left * width),
                int(top * height),
                round(right * width),
                round(bottom * height),
            )
        )
    white = Image.new("RGB", plot.size, "white")
    drawn = ImageChops.difference(plot, white).getbbox()
    if drawn is not None:
        plot = plot.crop(drawn)
    return plot.crop((0, 0, plot.width, min(plot.height, plot.width)))


def report(app: Sphinx) -> None:
    """Write the report on one prompt, beside the same architecture with its initial
    weights.
    """
    page = Path(app.srcdir, "_made/site/example-report.html")
    made_by = Path(app.srcdir, "_made/report.digest")
    if not page.exists() or not made_by.exists() or made_by.read_text() != digest():
        page.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "tl_coupling",
            "report",
            "--prompt",
            PROMPT,
            "--carriers",
            "--products",
            "--directions",
            "-2",
            "--out",
            str(page),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made_by.write_text(digest())
    first = re.search(r'src="data:image/png;base64,([^"]+)"', page.read_text())
    if first is None:
        raise ExtensionError("the report has no picture")
    write(Path(app.srcdir, "_made/report.png"), card(base64.b64decode(first[1])))


def benchmarks(app: Sphinx) -> None:
    """Tables and pictures of the committed results."""
    from benchmarks import table

    results = table.read(ROOT / "benchmarks/results")
    with contextlib.redirect_stdout(io.StringIO()):
        text = table.page(results)
    write(
        Path(app.srcdir, "_made/benchmarks.md"),
        text.partition("![](benchmarks.png)")[2],
    )
    drawn = io.BytesIO()
    table.picture(results).savefig(drawn, dpi=120, metadata={"Software": None})
    write(Path(app.srcdir, "_made/benchmarks.png"), drawn.getvalue())


def house(app: Sphinx) -> None:
    """Rooms and their imports, as `tests/test_house.py` has them."""
    write(Path(app.srcdir, "_made/house.svg"), drawing())


def setup(app: Sphinx) -> dict[str, bool]:
    makers: tuple[Callable[[Sphinx], None], ...] = (
        notebooks,
        report,
        benchmarks,
        house,
    )
    for make in makers:
        app.connect("builder-inited", make)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
