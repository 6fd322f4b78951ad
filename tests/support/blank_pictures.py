"""Pictures that are made but not rendered, for tests that do not look at them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

_SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@contextmanager
def unrendered() -> Iterator[None]:
    """Let figures save a blank picture in this context."""
    from matplotlib.animation import Animation
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    with (
        mock.patch.object(Figure, "savefig", _save_blank),
        mock.patch.object(Figure, "get_tightbbox", return_value=Bbox.unit()),
        mock.patch.object(Animation, "save", _save_one_frame),
    ):
        yield


def _save_blank(_: object, target: Any, **options: Any) -> None:
    """Write a blank picture to a path or a buffer: SVG where that is asked for, else
    PNG.
    """
    picture = io.BytesIO()
    if options.get("format") == "svg":
        picture.write(_SVG)
    else:
        Image.new("RGB", (1, 1), "white").save(picture, "PNG")
    if isinstance(target, str | Path):
        Path(target).write_bytes(picture.getvalue())
    else:
        target.write(picture.getvalue())


def _save_one_frame(animation: Any, target: Path, **_: object) -> None:
    # Drawn once, or matplotlib warns of an animation that nobody saw.
    animation._init_draw()
    animation._draw_was_started = True
    Image.new("RGB", (1, 1), "white").save(target, "GIF")
