"""Contact sheets: many pages or pictures side by side, to be looked at.

    python tools/contact_sheets.py docs/_build/html docs/coupling.png --out out/sheets

Of a folder, each of its pages at the widths of a laptop and of a telephone, light and
dark. Of a file, a picture or a page, what is seen with each of three colour-blindnesses,
which Chromium simulates. Single screenshots are kept beside the sheets.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from browser import chromium, loaded, open_address, resize, screenshot, served

# Of the screen, and of its picture on a sheet.
WIDTHS = {1280: 320, 390: 195}
SCHEMES = ("light", "dark")
VISIONS = ("none", "protanopia", "deuteranopia", "tritanopia")
WIDTH_OF_VISION = 395
# What is below is another screenful of the same.
MAX_HEIGHT = 6000
SHEET = (1600, 1520)
LABEL_HEIGHT = 18
GAP = 4


class Cell(NamedTuple):
    """A picture on a sheet, and what is written above it."""

    label: str
    picture: Image.Image


def strips(cell: Cell, width: int, height: int) -> Iterator[Cell]:
    """Yield a picture at a width, cut into strips that are no higher than `height`."""
    scale = width / cell.picture.width
    size = (width, max(1, round(cell.picture.height * scale)))
    small = cell.picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    for top in range(0, small.height, height):
        strip = small.crop((0, top, width, min(top + height, small.height)))
        continued = " (continued)" if top else ""
        yield Cell(cell.label + continued, strip)


def places(
    sizes: Iterable[tuple[int, int]], sheet: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the sheet, x and y of boxes that follow each other in rows, as words do."""
    n_sheet, x, y, row_height = 0, 0, 0, 0
    for width, height in sizes:
        if x and x + width > sheet[0]:
            x, y, row_height = 0, y + row_height, 0
        if y and y + height > sheet[1]:
            n_sheet, x, y, row_height = n_sheet + 1, 0, 0, 0
        yield n_sheet, x, y
        x += width
        row_height = max(row_height, height)


def contact_sheets(cells: list[Cell]) -> list[Image.Image]:
    """Return sheets with labelled pictures, which keep their sizes."""
    sizes = [
        (picture.width + GAP, picture.height + LABEL_HEIGHT + GAP)
        for _, picture in cells
    ]
    sheets: list[Image.Image] = []
    font = ImageFont.load_default(12)
    for cell, (n_sheet, x, y) in zip(cells, places(sizes, SHEET), strict=True):
        if n_sheet == len(sheets):
            sheets.append(Image.new("RGB", SHEET, "gray"))
        sheet = sheets[n_sheet]
        label = Image.new("RGB", (cell.picture.width, LABEL_HEIGHT), "white")
        ImageDraw.Draw(label).text((2, 1), cell.label, "black", font)
        sheet.paste(label, (x, y))
        sheet.paste(cell.picture, (x, y + LABEL_HEIGHT))
    return sheets


def save(cells: list[Cell], out: Path, name: str) -> None:
    for number, sheet in enumerate(contact_sheets(cells), 1):
        sheet.save(out / f"{name}-{number:02}.png")


def shot(driver: Any, path: Path) -> Image.Image:
    path.parent.mkdir(parents=True, exist_ok=True)
    screenshot(driver, path, MAX_HEIGHT)
    with Image.open(path) as picture:
        return picture.copy()


def show_site(driver: Any, site: Path, out: Path) -> None:
    """Save sheets of every page of a folder, for each width and scheme."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    with served(site) as address:
        for width, width_on_sheet in WIDTHS.items():
            cells: dict[str, list[Cell]] = {scheme: [] for scheme in SCHEMES}
            for page in pages:
                open_address(driver, address + page, width)
                loaded(driver, "img")
                for scheme in SCHEMES:
                    set_scheme(driver, scheme)
                    name = Path(page).with_suffix(".png")
                    picture = shot(driver, out / f"pages/{width}-{scheme}" / name)
                    height = SHEET[1] - LABEL_HEIGHT - GAP
                    cells[scheme] += strips(
                        Cell(page.removesuffix(".html"), picture),
                        width_on_sheet,
                        height,
                    )
            for scheme in SCHEMES:
                save(cells[scheme], out, f"site-{width}-{scheme}")


def set_scheme(driver: Any, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def show_visions(driver: Any, files: list[Path], out: Path) -> None:
    """Save sheets of pictures and pages, as they are and with each colour-blindness."""
    set_scheme(driver, "light")
    cells: list[Cell] = []
    for file in files:
        open_address(driver, file.resolve().as_uri(), max(WIDTHS))
        if file.suffix == ".png":
            with Image.open(file) as picture:
                resize(driver, *picture.size)
        for vision in VISIONS:
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedVisionDeficiency", {"type": vision}
            )
            picture = shot(driver, out / "visions" / vision / f"{file.stem}.png")
            label = f"{file.stem}: {vision}" if vision != "none" else file.stem
            height = SHEET[1] - LABEL_HEIGHT - GAP
            # The upper part of a page, which has its figure.
            cells.append(next(strips(Cell(label, picture), WIDTH_OF_VISION, height)))
    save(cells, out, "visions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, nargs="+", help="folders, PNG or HTML")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with chromium(served=True) as driver:
        for folder in filter(Path.is_dir, given.sources):
            show_site(driver, folder, given.out)
        if files := [path for path in given.sources if path.is_file()]:
            show_visions(driver, files, given.out)


if __name__ == "__main__":
    main()
