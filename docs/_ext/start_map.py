"""The map on the start page: that of the example report, with its style and script."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from made import write
from tl_coupling.interactive import VIEW_STYLE, explorer_script

_MAP = re.compile(
    r'aria-label="A map of coupling to explore">(.*?)</div>\s*<figcaption>', re.DOTALL
)


def start_map(app: Sphinx) -> None:
    """Write `_made/map.html`, after the report was made."""
    page = Path(app.srcdir, "_made/site/example-report.html").read_text("utf-8")
    found = _MAP.search(page)
    if found is None:
        raise ExtensionError("the report has no map")
    text = (
        f"<style>{VIEW_STYLE}</style>\n<div data-address>{found[1]}</div>\n"
        f'<script type="module">{explorer_script()}</script>\n'
    )
    write(Path(app.srcdir, "_made/map.html"), text)


def setup(app: Sphinx) -> dict[str, bool]:
    # Listeners of one priority are called in the order of the extensions: `made` writes
    # the report first.
    app.connect("builder-inited", start_map, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
