"""The rooms of the package, their levels, and which of them imports which."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import tl_coupling as tlc

PACKAGE = Path(tlc.__file__).parent
# From the bottom up: a room imports rooms of lower levels, and of its own level as long
# as there is no cycle.
LEVELS = [
    "interrupts",
    "arguments progress files results",
    "models prompts",
    "spectra measures statistics",
    "blocks",
    "jacobians",
    "comparisons influence trajectories dynamics",
    "directions training",
    "portraits",
    "pictures interactive report",
    "studies.surveys",
    "studies.redundancy studies.generalization",
    "studies.plots",
    "cli",
]
# Files that hand out public names of rooms under the path where users know them.
PUBLIC_PATHS = {
    "gradients": {"blocks"},
    "traces": {"blocks"},
    "plots": {"pictures", "studies.plots"},
    "surveys": {"studies.surveys"},
    "redundancy": {"studies.redundancy"},
    "generalization": {"studies.generalization"},
}
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
# Files that only hand out what stands in others.
DOORS = {"__init__", "__main__", "studies/__init__", "pictures/__init__", *PUBLIC_PATHS}
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).with_suffix("").as_posix() not in DOORS
]


def room_of(path: Path) -> str:
    return room_named(path.relative_to(PACKAGE).with_suffix("").parts)


def room_named(parts: Sequence[str]) -> str:
    """Return the room in which a module is, "" for the package itself; those of
    `studies` are rooms of their own.
    """
    return ".".join(parts[: 2 if tuple(parts[:1]) == ("studies",) else 1])


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports at run time, also inside
    functions.
    """
    unread: list[ast.AST] = [ast.parse(path.read_text())]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unread += node.orelse
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["tl_coupling", *path.relative_to(PACKAGE).parts]
            start = (
                [*here[: -node.level], *filter(None, [node.module])]
                if node.level
                else [node.module or ""]
            )
            yield from (
                (node.lineno, ".".join([*start, alias.name])) for alias in node.names
            )
        else:
            unread += ast.iter_child_nodes(node)


def imports_between_rooms() -> Iterator[tuple[str, str, str]]:
    """Yield the importing room, the imported one, and where it says so; "" is the
    package itself.
    """
    for path in MODULES:
        for line, name in imported(path):
            top, *rest = name.split(".")
            if top == "tl_coupling":
                other = room_named(rest) if room_named(rest) in LEVEL else ""
                if other != room_of(path):
                    yield (
                        room_of(path),
                        other,
                        f"{path.relative_to(PACKAGE)}:{line} imports {name}",
                    )


def every_import(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each absolute import from the package, those for type
    checkers included.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.split(".")[0] == "tl_coupling":
                yield from ((module, alias.name) for alias in node.names)


def file_of(module: str) -> Path | None:
    """Return the file of a dotted name, if it is a module of the package."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def imports_between_files() -> dict[Path, set[Path]]:
    """Return the files that each file imports, those for type checkers included."""
    below: dict[Path, set[Path]] = {}
    for path in MODULES:
        files = {
            file_of(f"{module}.{name}") or file_of(module)
            for module, name in every_import(path)
        }
        below[path] = {file for file in files if file is not None} - {path}
    return below


def reach_ins() -> Iterator[str]:
    """Yield where a file imports from a file of another room, past what that room's
    `__init__` hands out.
    """
    for path in MODULES:
        for module in sorted({module for module, _ in every_import(path)}):
            _, *parts = module.split(".")
            room = room_named(parts)
            if len(parts) > room.count(".") + 1 and room != room_of(path):
                yield f"{path.relative_to(PACKAGE)} imports from {module}"


def classes_by_room() -> dict[str, set[str]]:
    """Return the names of the classes that are defined in each room."""
    classes: dict[str, set[str]] = {}
    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        classes.setdefault(room_of(path), set()).update(names)
    return classes
