"""The rooms of the package, their levels, and which of them imports which."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tl_coupling as tlc

PACKAGE = Path(tlc.__file__).parent
# From the bottom up: a room imports rooms of lower levels, and of its own level as long
# as there is no cycle.
LEVELS = [
    "arguments interrupts progress files saved",
    "models prompts",
    "spectra measures statistics",
    "blocks",
    "gradients",
    "traces",
    "jacobians",
    "comparisons influence trajectories",
    "portraits",
    "surveys",
    "redundancy generalization",
    "plots interactive report",
    "cli",
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms.split()}
MODULES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0][:2] != "__"
]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
    """The importing room, the imported one, and where it says so; "" is the package
    itself.
    """
    for path in MODULES:
        for line, name in imported(path):
            top, *rest = name.split(".")
            if top == "tl_coupling":
                other = rest[0] if rest and rest[0] in LEVEL else ""
                if other != room_of(path):
                    yield (
                        room_of(path),
                        other,
                        f"{path.relative_to(PACKAGE)}:{line} imports {name}",
                    )
