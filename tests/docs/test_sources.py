"""What the site is built from, without building it: pages, notebooks, names and the
picture of the house.
"""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import networkx
import pytest

import rooms
import tl_coupling as tlc
from public_api import ROOMS, public_names
from sphinx_extensions import module

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "demos").glob("*.ipynb"))
# Written by the build.
MADE = ("api/", "gallery/")


def listed(page: Path) -> list[str]:
    """Return the pages in the tables of contents of a page."""
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [
        line
        for tree in trees
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]


def test_every_page_is_listed_once_and_is_there():
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    pages -= {page for page in pages if page.startswith(("_", *MADE))}
    entries = [
        entry
        for path in DOCS.rglob("*.md")
        if path.name in ("index.md", "gallery.md", "findings.md")
        for entry in listed(path)
    ]
    assert len(set(entries)) == len(entries)
    assert {entry for entry in entries if not entry.startswith(MADE)} == pages - {
        "index"
    }


def test_every_notebook_has_a_card_with_its_picture():
    text = (DOCS / "gallery.md").read_text()
    links = set(re.findall(r":link: gallery/(\w+)", text))
    assert (
        links
        == set(re.findall(r"^gallery/(\w+)$", text, re.MULTILINE))
        == {path.stem for path in NOTEBOOKS}
    )
    for path in NOTEBOOKS:
        assert f":img-top: _made/{path.stem}.png" in text
        cells = json.loads(path.read_text())["cells"]
        (tagged,) = [
            cell for cell in cells if "thumbnail" in cell["metadata"].get("tags", [])
        ]
        assert any(
            "image/png" in output.get("data", {}) for output in tagged["outputs"]
        )


class Card(NamedTuple):
    """A card of a finding."""

    claim: str
    page: str
    picture: str
    verdict: str
    text: str
    command: str


def finding_cards(page: Path) -> list[Card]:
    cards = re.findall(
        r"::::\{grid-item-card\} (.+)\n:link: findings/(.+)\n:link-type: doc\n"
        r":img-top: (.+)\n:img-alt: .+\n\{bdg-\w+\}`(.+?)` ((?:.+\n)+)"
        r"\n\*.+\*\n:::\{card-footer\}\n(`.+`)\n:::\n::::",
        page.read_text(),
    )
    return [Card(*card) for card in cards]


FINDINGS = finding_cards(DOCS / "findings.md")


def test_every_finding_has_a_card_and_a_page() -> None:
    pages = [path.stem for path in (DOCS / "findings").glob("*.md")]
    assert sorted(card.page for card in FINDINGS) == sorted(pages)
    assert len(FINDINGS) == 9
    for card in FINDINGS:
        assert card.picture == f"pictures/card-{card.page}.png"
        assert card.verdict in ("holds", "fails here", "open")


@pytest.mark.parametrize("card", FINDINGS, ids=lambda card: card.page)
def test_a_card_says_what_its_page_says(card: Card) -> None:
    """The numbers of a page are held to results by the tests of studies."""
    page = (DOCS / "findings" / f"{card.page}.md").read_text()
    assert f"`{card.verdict}`" in page.partition("\n## ")[0]
    numbers = re.findall(r"(?<![\w.])\d*\.\d+", card.text)
    assert numbers
    assert not [number for number in numbers if number not in page]


def test_the_start_page_and_readme_give_the_same_verdicts() -> None:
    start = DOCS / "index.md"
    assert finding_cards(start) == FINDINGS[:1]
    listed_verdicts = re.findall(
        r"^- \{bdg-\w+\}`(.+?)` (.+)$", start.read_text(), re.M
    )
    assert listed_verdicts == [(card.verdict, card.claim) for card in FINDINGS]
    rows = re.findall(
        r"^\| \[(.+)\]\(docs/findings/(.+)\.md\) \| \*(.+)\* \|$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert rows == [(card.claim, card.page, card.verdict) for card in FINDINGS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_open_on_colab_and_install_there_only(path):
    title, install, *others = [
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]
    ]
    repository = re.search(
        r'^Repository = "https://github\.com/(.+?)/?"$',
        (ROOT / "pyproject.toml").read_text(),
        re.M,
    )
    assert (
        f'href="https://colab.research.google.com/github/{repository[1]}/blob/main/demos/{path.name}"'
        in title
    )
    assert '"google.colab" in sys.modules' in install
    assert not [source for source in others if "pip install" in source]


GROUPS_OF_PLOTS = [
    "layers",
    "tokens-and-their-paths",
    "heads-mlps-and-products-of-blocks",
    "directions",
    "training",
    "many-models",
]


def test_every_plot_is_in_one_group_which_is_that_of_the_gallery():
    names = module("names")
    groups = names.plot_groups()
    assert [names.page_of_group(heading) for heading in groups] == [
        f"api/plots/{group}" for group in GROUPS_OF_PLOTS
    ]
    grouped = [name for listed in groups.values() for name in listed]
    plots = [name.rpartition(".")[2] for name in public_names() if ".plot_" in name]
    assert sorted(grouped) == sorted(plots)
    assert names.page_of("tl_coupling.plots.plot_steering") == "api/plots/directions"


def test_every_public_name_has_a_page():
    pages = module("names").documented()
    assert pages.keys() == public_names().keys()
    of_their_own = [pages[f"tl_coupling.{name}"] for name in tlc.__all__]
    # Also where file systems do not tell capitals.
    assert len({page.lower() for page in of_their_own}) == len(of_their_own)
    rooms = {f"api/{room}/index" for room in ROOMS}
    groups = {page for name, page in pages.items() if ".plots.plot_" in name}
    assert groups <= {f"api/plots/{group}" for group in GROUPS_OF_PLOTS}
    assert {page for page in pages.values() if page not in of_their_own} <= (
        rooms | groups
    )
    assert {page.rpartition("/")[0] + "/index" for page in of_their_own} <= rooms


def test_the_reference_begins_with_the_front_and_has_each_name_once() -> None:
    page = module("front_page")
    text = page.front_page()
    listed = re.findall(r"`~(tl_coupling\.[\w.]+)`", text)
    assert listed[:20] == [f"tl_coupling.{name}" for name in tlc._FRONT]
    assert sorted(listed) == sorted(public_names())
    # By task: each room stands under one.
    rooms_of_tasks = [room for rooms in page.TASKS.values() for room in rooms]
    assert sorted(rooms_of_tasks) == sorted(ROOMS)
    headings = re.findall(r"^(.+)\n(=+|-+|~+)$", text, re.MULTILINE)
    assert [title for title, _ in headings[:2]] == [
        "API reference",
        next(iter(page.TASKS)),
    ]
    assert all(len(title) == len(line) for title, line in headings)


@pytest.mark.long("draws the rooms")
def test_the_house_is_drawn_as_it_is_built():
    house = module("house")
    drawn, place = house.imports(), house.places()
    built = networkx.DiGraph(
        (room, other) for room, other, _ in rooms.imports_between_rooms() if other
    )
    assert (
        networkx.transitive_closure(drawn).edges
        == networkx.transitive_closure(built).edges
    )
    assert place.keys() == rooms.LEVEL.keys()
    svg = house.drawing()
    assert re.findall(r'id="room-([\w.]+)"', svg) == list(place)
    assert len(re.findall(r'class="import"', svg)) == len(drawn.edges)
    for (room, other), (_, y, _, to_y) in house.arrows().items():
        assert y <= to_y
        assert f"<title>{room} imports {other}</title>" in svg
    # Rooms of one floor stand apart, and inside the picture.
    spans = sorted((y, x - width / 2, x + width / 2) for x, y, width in place.values())
    assert all(left >= 0 and right <= house.WIDTH for _, left, right in spans)
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(spans))
    # No arrow runs through a room.
    for (room, other), (x, y, to_x, to_y) in house.arrows().items():
        for step in range(201):
            at_x, at_y = x + (to_x - x) * step / 200, y + (to_y - y) * step / 200
            for name in place.keys() - {room, other}:
                middle, top, width = place[name]
                assert not (
                    abs(at_x - middle) < width / 2 + 2
                    and top <= at_y <= top + house.HEIGHT
                ), (
                    room,
                    other,
                    name,
                )


def where_the_house_says() -> list[tuple[str, list[str]]]:
    """Return each file that docs/house.md names, with the names that it says are in
    it: `path.py`, or `path.py`: `name`, `name`.
    """
    text = (DOCS / "house.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`((?::\s+`\w+`(?:,\s+`\w+`)*)?)", text)
    return [(path, re.findall(r"`(\w+)`", names)) for path, names in named]


@pytest.mark.parametrize(("path", "names"), where_the_house_says())
def test_the_house_has_what_its_page_names(path: str, names: list[str]) -> None:
    file = ROOT / path if path.startswith("tests/") else rooms.PACKAGE / path
    assert file.is_file()
    defined = {getattr(node, "name", "") for node in ast.parse(file.read_text()).body}
    assert set(names) <= defined


def test_the_page_on_the_house_names_functions_and_every_room() -> None:
    named = [name for _, names in where_the_house_says() for name in names]
    assert len(named) >= 10
    table = (DOCS / "house.md").read_text().split("| rooms | purpose |")[1]
    in_table = re.findall(r"`([\w.]+)/?`", table.split("\n\n")[0])
    assert set(in_table) - {"tl"} == rooms.LEVEL.keys()
