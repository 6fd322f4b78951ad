"""Pictures of results, with matplotlib.

Every function draws what a result holds and labels itself from it, takes `ax=` (or
`fig=`) and returns what it drew on; by default that is a new figure, which a notebook
and `plt.show()` display. Inside `with off_screen():` pyplot neither shows nor keeps
figures: for programs that only save them.

>>> ax = tlc.plot_coupling(tlc.depth_coupling(trace, k=4))
"""
# ruff: noqa: F403

from tl_coupling.pictures import *
from tl_coupling.pictures import __all__ as _pictures
from tl_coupling.studies.plots import *
from tl_coupling.studies.plots import __all__ as _pictures_of_studies

__all__ = sorted([*_pictures, *_pictures_of_studies])
__dir__ = __all__.copy
