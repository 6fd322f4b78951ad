"""Files of results as named values, by their formats."""

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import xarray
from PIL import Image

from same_numbers.left_out import NOT_CONTENT, NOT_NUMBERS, NOT_RESULTS
from same_numbers.values import Array, Values

PNG_IN_TEXT = "data:image/png;base64,"
# The class of a variable in xarray's tables, an item of a list.
XARRAY_VARIABLE = "xr-var-item"
# Of the tables that are printed; a line of them is no text.
BORDERS = "┏┓┗┛┡┩┳┻╇┴└┘─━ "


def kind_of(path: Path) -> str:
    """Return what is counted together in the table."""
    return READERS.get(path.suffix, (OTHER, _read_bytes))[0]


def read(path: Path) -> Values:
    """Return what is compared of a file; of an unknown format all its bytes are."""
    _, reader = READERS.get(path.suffix, (OTHER, _read_bytes))
    return reader(path)


def _read_netcdf(path: Path) -> Values:
    values: dict[str, Array | str] = {}
    # As stored: neither times nor missing values are interpreted.
    with xarray.open_dataset(path, decode_cf=False) as dataset:
        for name, variable in dataset.variables.items():
            if name in NOT_NUMBERS:
                continue
            values[str(name)] = _sized(variable.values)
            values[f"dimensions of {name}"] = ", ".join(map(str, variable.dims))
            values |= _attributes(f"{name}.", variable.attrs)
        values |= _attributes("", dataset.attrs)
    return values


def _attributes(prefix: str, attributes: dict[str, Any]) -> Values:
    """Return attributes; those that are JSON entry by entry."""
    values: dict[str, Array | str] = {}
    for name, attribute in attributes.items():
        if name in NOT_NUMBERS:
            continue
        if isinstance(attribute, str):
            attribute = _parsed(attribute)
        elif isinstance(attribute, np.ndarray | np.generic):
            attribute = attribute.tolist()
        values |= _entries(attribute, f"{prefix}{name}")
    return values


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _read_npz(path: Path) -> Values:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays if name not in NOT_NUMBERS}


def _read_npy(path: Path) -> Values:
    return {"array": np.load(path)}


def _read_json(path: Path) -> Values:
    return _entries(json.loads(path.read_text(encoding="utf-8")), "")


def _entries(content: Any, name: str) -> dict[str, Array | str]:
    """Return numbers, lists of them and texts, by the keys that lead there."""
    if isinstance(content, dict):
        parts = [(key, content[key]) for key in content if key not in NOT_NUMBERS]
        return _all_entries(parts, name) or {name: "{}"}
    numbers = _as_numbers(content)
    if numbers is not None:
        return {name: numbers}
    if isinstance(content, list):
        return _all_entries(enumerate(content), name) or {name: "[]"}
    return {name: json.dumps(content, ensure_ascii=False)}


def _all_entries(parts: Iterable[tuple[Any, Any]], name: str) -> dict[str, Array | str]:
    values: dict[str, Array | str] = {}
    for key, part in parts:
        values |= _entries(part, f"{name}/{key}".lstrip("/"))
    return values


def _as_numbers(content: Any) -> Array | None:
    """Return a number, or a table of them; None for all else."""
    leaves = list(_leaves(content))
    are_numbers = [
        isinstance(leaf, int | float) and not isinstance(leaf, bool) for leaf in leaves
    ]
    if not leaves or not all(are_numbers):
        return None
    try:
        return np.array(content, dtype=float)
    except ValueError:
        # Rows of unequal lengths.
        return None


def _leaves(content: Any) -> Iterator[Any]:
    if isinstance(content, list):
        for part in content:
            yield from _leaves(part)
    else:
        yield content


def _read_csv(path: Path) -> Values:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    if not rows:
        return {"rows": "none"}
    heads, *cells = rows
    values: dict[str, Array | str] = {}
    for number, head in enumerate(heads):
        if head in NOT_NUMBERS:
            continue
        column = [row[number] if number < len(row) else "" for row in cells]
        try:
            values[head] = np.array([float(cell) for cell in column])
        except ValueError:
            values[head] = "\n".join(column)
    values["lengths of rows"] = np.array([len(row) for row in rows])
    return values


def _read_png(path: Path) -> Values:
    return {"pixels": _pixels(path.read_bytes())}


def _pixels(png: bytes) -> Array:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGBA"))


def _read_page(path: Path) -> Values:
    return page_values(path.read_text(encoding="utf-8"))


def page_values(markup: str) -> Values:
    """Return the text, the elements and the pictures of HTML or SVG."""
    page = _Page()
    page.feed(markup)
    page.close()
    pictures = {f"picture {n}": pixels for n, pixels in enumerate(page.pictures)}
    return {
        "text": "\n".join(page.texts),
        "elements": "\n".join(page.elements),
        **pictures,
    }


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[str] = []
        self.pictures: list[Array] = []
        # Where the texts and elements of xarray's variable begin.
        self.variable_start: tuple[int, int] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element, with its attributes."""
        if ("class", XARRAY_VARIABLE) in attrs:
            self.variable_start = (len(self.texts), len(self.elements))
        described = [tag]
        for name, content in attrs:
            if name in NOT_CONTENT:
                continue
            if content is not None and content.startswith(PNG_IN_TEXT):
                png = base64.b64decode(content.removeprefix(PNG_IN_TEXT))
                self.pictures.append(_pixels(png))
                content = f"picture {len(self.pictures) - 1}"
            described.append(f'{name}="{content}"')
        self.elements.append(" ".join(described))

    def handle_endtag(self, tag: str) -> None:
        """Drop a variable of xarray's that is no number."""
        if tag != "li" or self.variable_start is None:
            return
        first_text, first_element = self.variable_start
        self.variable_start = None
        name = self.texts[first_text]
        if name in NOT_NUMBERS:
            del self.texts[first_text:]
            del self.elements[first_element:]

    def handle_data(self, data: str) -> None:
        """Note the text between two tags; scripts, and the data in them, are text."""
        if data.strip():
            # Beside its tables xarray has a plain text of the whole.
            self.texts.append(_without_times(data.strip()))


def _read_notebook(path: Path) -> Values:
    """Return the outputs of cells; their sources are what a refactoring changes."""
    notebook = nbformat.read(path, as_version=4)
    values: dict[str, Array | str] = {}
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code_cells):
        printed: dict[str, str] = {}
        objects = []
        for output in cell.outputs:
            if output.output_type == "stream":
                # In how many pieces it came is a matter of time.
                printed[output.name] = printed.get(output.name, "") + output.text
            else:
                objects.append(output)
        for stream, text in printed.items():
            if stream not in NOT_RESULTS:
                values[f"cell {number} {stream}"] = text
        for place, output in enumerate(objects):
            values |= _object_values(output, f"cell {number} output {place}")
    return values


def _object_values(output: Any, name: str) -> Values:
    """Return an error, or what stands for an object, in every format."""
    if output.output_type == "error":
        return {f"{name} error": f"{output.ename}: {output.evalue}"}
    values: dict[str, Array | str] = {}
    for media_type, content in output.data.items():
        described = f"{name} {media_type}"
        if media_type == "image/png":
            values[described] = _pixels(base64.b64decode(content))
        elif media_type in ("text/html", "image/svg+xml"):
            parts = page_values(content)
            values |= {f"{described} {part}": value for part, value in parts.items()}
        elif isinstance(content, str):
            values[described] = _without_times(content)
        else:
            values |= _entries(content, described)
    return values


def _without_times(text: str) -> str:
    """Return an object's text; a dataset's without the variables that are left out."""
    if not text.startswith("<xarray."):
        return text
    lines = text.splitlines()
    return "\n".join(
        line for line in lines if NOT_NUMBERS.keys().isdisjoint(line.split()[:1])
    )


def _read_printed(path: Path) -> Values:
    """Return what a command printed.

    The width of a table is that of its cells: compared are cells, and the texts around
    a table whichever way they are broken into lines.
    """
    paragraphs: list[list[str]] = [[]]
    columns: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        is_head = line.startswith("┃")
        if is_head or line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("┃│").split(line[0])]
            if is_head:
                columns = cells
            row = zip(columns, cells, strict=True)
            compared = [cell for head, cell in row if head not in NOT_NUMBERS]
            paragraphs += [[" | ".join(compared)], []]
        elif line.strip(BORDERS):
            paragraphs[-1] += line.split()
    return {"text": "\n".join(" ".join(words) for words in paragraphs if words)}


def _read_bytes(path: Path) -> Values:
    return {"bytes": np.frombuffer(path.read_bytes(), dtype=np.uint8)}


def _sized(array: Array) -> Array:
    """Return texts of netCDF, which are objects, as an array that has a width."""
    if array.dtype.kind == "O":
        return array.astype(str)
    return array


OTHER = "other files"
READERS: dict[str, tuple[str, Callable[[Path], Values]]] = {
    ".nc": ("netCDF", _read_netcdf),
    ".npz": ("NumPy", _read_npz),
    ".npy": ("NumPy", _read_npy),
    ".json": ("JSON", _read_json),
    ".csv": ("CSV", _read_csv),
    ".png": ("PNG", _read_png),
    ".svg": ("SVG", _read_page),
    ".html": ("HTML", _read_page),
    ".ipynb": ("notebook", _read_notebook),
    ".txt": ("printed", _read_printed),
}
