"""Where a figure writes, and what of it cannot be read: cut, or across another text."""

import itertools
import re
from unittest import mock

import numpy as np
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Bbox

# In pixels: letters may touch, and antialiasing rounds.
_TOLERANCE = 1.0
# What texts of pictures write in another way: 0.46, −0.46, k and a model's name.
_MIXED_UP = {
    "a decimal without its 0": re.compile(r"(?<![\d\w])\.\d"),
    "a hyphen for a minus": re.compile(r"(?<![\w{)\]-])-\d"),
    "K for k": re.compile(r"\bK\b"),
    "the name of a file": re.compile(r"q\d_k_|\.(?:gguf|csv|png)\b"),
}


def drawn_texts(figure: Figure) -> list[tuple[str, Bbox, Path]]:
    """Return every text that is drawn: its words, its box, and its outline, which is
    turned as the text is.
    """
    texts = []
    draw = Text.draw

    # Ticks beyond the ends of an axis have texts, too: these are not drawn.
    def record(text: Text, renderer: object, *arguments: object) -> None:
        draw(text, renderer, *arguments)
        if text.get_visible() and text.get_text().strip():
            box = Text.get_window_extent(text, renderer)
            texts.append((text.get_text(), box, _outline(text, box)))

    with mock.patch.object(Text, "draw", record):
        figure.draw_without_rendering()
    return texts


def mixed_up(figure: Figure) -> list[str]:
    """Return what in the texts of a figure is written otherwise than in all pictures."""
    return [
        f"{what}: {words!r}"
        for words, *_ in drawn_texts(figure)
        for what, pattern in _MIXED_UP.items()
        if pattern.search(words)
    ]


def smallest_letters(figure: Figure, width: int) -> float:
    """Return the size of the smallest letters, in pixels, where a figure is shown so
    many pixels wide.
    """
    points = []
    draw = Text.draw

    def record(text: Text, renderer: object, *arguments: object) -> None:
        draw(text, renderer, *arguments)
        if text.get_visible() and text.get_text().strip():
            points.append(text.get_fontsize())

    with mock.patch.object(Text, "draw", record):
        figure.draw_without_rendering()
    return min(points) / 72 * width / figure.get_figwidth()


def _outline(text: Text, box: Bbox) -> Path:
    angle = text.get_rotation()
    text.set_rotation(0)
    size = np.array(Text.get_window_extent(text).size) - 2 * _TOLERANCE
    text.set_rotation(angle)
    centre = (box.p0 + box.p1) / 2
    flat = Bbox([centre - size / 2, centre + size / 2])
    turn = Affine2D().rotate_deg_around(*centre, angle)
    return turn.transform_path(Path(flat.corners()[[0, 1, 3, 2, 0]], closed=True))


def unreadable(figure: Figure) -> list[str]:
    """Return what is wrong with the texts of a figure: nothing, if all can be read."""
    texts = drawn_texts(figure)
    canvas = figure.bbox.padded(_TOLERANCE)
    problems = [
        f"cut: {words!r}"
        for words, box, _ in texts
        if not (canvas.contains(*box.p0) and canvas.contains(*box.p1))
    ]
    for (words, box, outline), (
        other_words,
        other_box,
        other_outline,
    ) in itertools.combinations(texts, 2):
        if box.overlaps(other_box) and outline.intersects_path(other_outline):
            problems.append(f"one across the other: {words!r}, {other_words!r}")
    return problems
