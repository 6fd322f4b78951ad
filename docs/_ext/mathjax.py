"""MathJax from this site itself: the part of the package sphinx-mathjax-offline that
draws TeX, without its menus.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")


def copy(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    package = find_spec("sphinx-mathjax-offline")
    if package is None or package.origin is None:
        raise ExtensionError(
            "MathJax is not installed: pip install sphinx-mathjax-offline"
        )
    for part in PARTS:
        source = Path(package.origin).parent / "static/mathjax" / part
        target = Path(app.outdir, "_static/mathjax", part)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.mathjax")
    app.config.mathjax_path = "mathjax/tex-chtml.js"
    app.config.mathjax3_config = {"options": {"enableMenu": False}}
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
