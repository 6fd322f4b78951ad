"""The atlas: small maps of all that is committed, on the page that opens them."""

from pathlib import Path

import xarray
from sphinx.application import Sphinx

from made import ROOT, write
from tl_coupling.interactive import VIEW_STYLE, atlas_script, show_atlas

MAPS = ROOT / "demos/studies/results/atlas"


def atlas(app: Sphinx) -> None:
    """Write `_made/atlas.html`."""
    maps = [xarray.load_dataset(path) for path in sorted(MAPS.glob("*.nc"))]
    text = (
        f"<style>{VIEW_STYLE}</style>\n{show_atlas(maps).body}\n"
        f'<script type="module">{atlas_script()}</script>\n'
    )
    write(Path(app.srcdir, "_made/atlas.html"), text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", atlas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
