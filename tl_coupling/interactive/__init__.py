"""Draw views to explore with the pointer and the keyboard: couplings of layers and tokens,
values of tokens, and values of layers and tokens.

Every function takes results and returns a `View`, which displays itself in Jupyter and
Colab and loads nothing from a network. `str(view)` is its HTML; a page with several
views takes `circuitsvis_script()` once and `view.body` of each.

>>> view = tlc.interactive.show_coupling(tlc.depth_coupling(trace, k=4))
"""
# ruff: noqa: F401

from tl_coupling.interactive.atlas import atlas_script, show_atlas
from tl_coupling.interactive.explorer import explore, explorer_script, show_coupling
from tl_coupling.interactive.views import (
    VIEW_STYLE,
    View,
    circuitsvis_script,
    show_layers_by_token,
    show_token_coupling,
    show_tokens,
    visible_token,
)

__all__ = [
    "View",
    "circuitsvis_script",
    "explore",
    "show_atlas",
    "show_coupling",
    "show_layers_by_token",
    "show_token_coupling",
    "show_tokens",
]
__dir__ = __all__.copy
