"""Sheets of `tools/contact_sheets.py`: nothing of a picture is lost, none hides another."""

from itertools import combinations

from PIL import Image

import contact_sheets
from contact_sheets import Cell, places, strips


def test_strips_of_a_page_are_the_whole_page() -> None:
    page = Image.new("RGB", (100, 700), "white")
    page.paste("red", (0, 650, 100, 700))
    first, *others = strips(Cell("page", page), width=50, height=120)
    assert first.label == "page"
    assert [strip.picture.size for strip in others] == [(50, 120), (50, 110)]
    assert {strip.label for strip in others} == {"page (continued)"}
    assert first.picture.getpixel((25, 60)) == (255, 255, 255)
    assert others[-1].picture.getpixel((25, 105)) == (255, 0, 0)


def test_no_picture_covers_another_or_leaves_its_sheet() -> None:
    sizes = [(40, 30), (40, 50), (40, 20), (90, 40), (100, 90), (10, 10)]
    sheet = (100, 100)
    boxes = [
        (n_sheet, x, y, x + width, y + height)
        for (n_sheet, x, y), (width, height) in zip(
            places(sizes, sheet), sizes, strict=True
        )
    ]
    assert max(box[0] for box in boxes) == 2
    for _, _, _, right, bottom in boxes:
        assert right <= sheet[0]
        assert bottom <= sheet[1]
    for one, other in combinations(boxes, 2):
        is_beside = one[3] <= other[1] or other[3] <= one[1]
        is_below = one[4] <= other[2] or other[4] <= one[2]
        assert one[0] != other[0] or is_beside or is_below


def test_sheets_have_labels_above_pictures_of_their_sizes() -> None:
    width, height = contact_sheets.SHEET
    blue = Image.new("RGB", (width // 2 - 10, height - 100), "blue")
    first, second = contact_sheets.contact_sheets(
        [Cell("this", blue), Cell("that", blue), Cell("next", blue)]
    )
    for sheet, n_pictures in ((first, 2), (second, 1)):
        colors = {color: count for count, color in sheet.getcolors(2**20)}
        assert colors[(0, 0, 255)] == n_pictures * blue.width * blue.height
        assert sheet.getpixel((1, 1)) == (255, 255, 255)
