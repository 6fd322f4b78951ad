"""Words of code stay whole: browsers break lines after the hyphens of `--k`."""

from docutils import nodes
from sphinx.application import Sphinx

# A line of a telephone has 44 letters of code. What is longer than that may break.
LONGEST = 40


def mark(app: Sphinx, doctree: nodes.document) -> None:
    """Give code without long words a class that `_static/site.css` knows."""
    for literal in doctree.findall(nodes.literal):
        words = literal.astext().split()
        if words and max(map(len, words)) <= LONGEST:
            literal["classes"].append("whole-words")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
