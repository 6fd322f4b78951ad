"""Formulas that docstrings write as text, such as `J^l_{t1 t2}`, have their indices below
and above the line in the reference.
"""

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx

# `_{…}` and `^{…}`, or a single letter or digit, of a symbol that has one letter:
# `null_p` is a name.
INDEX = re.compile(r"(?<![A-Za-z]{2})([_^])(?:\{([^{}]*)\}|(ij|\w)(?![A-Za-z0-9]))")


def parts(formula: str) -> Iterator[nodes.Node]:
    """Yield the text of a formula, and its indices."""
    end = 0
    for found in INDEX.finditer(formula):
        if found.start() > end:
            yield nodes.Text(formula[end : found.start()])
        kind = nodes.subscript if found[1] == "_" else nodes.superscript
        yield kind("", found[2] or found[3])
        end = found.end()
    if end < len(formula):
        yield nodes.Text(formula[end:])


def set_indices(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Set the indices in code and paragraphs of a page of the reference."""
    if not page.startswith("api/"):
        return
    for text in list(doctree.findall(nodes.Text)):
        is_prose = isinstance(text.parent, nodes.literal | nodes.paragraph)
        if is_prose and INDEX.search(text):
            text.parent.replace(text, list(parts(text)))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", set_indices)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
