"""The API reference: a page for every name of the top level and every room, written
from the code before the build.

Signatures spell types out as a reader thinks of them, and single backticks link where
they hold a public name.
"""

import collections.abc
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from jaxtyping import AbstractArray
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import tl_coupling
from front_page import first_paragraph, front_page, heading, table
from made import write
from names import (
    HOMES,
    ROOMS,
    at_the_top,
    documented,
    in_the_room,
    page_of,
    page_of_group,
    plot_groups,
)

# What base classes from elsewhere bring is documented there.
FOREIGN = (
    "object, tuple, RuntimeError, ValueError, Exception, BaseException, Executor, "
    "TrainerCallback, RenderedHTML"
)
# Names of `training` that columns of tables elsewhere have as well.
COLUMNS = {"coupling", "measure"}
# Stands for ", " until the docstrings are read: Sphinx splits names at commas.
JOINED = "\N{INVISIBLE SEPARATOR}"
# Stands for a colon as long, for napoleon splits properties there.
COLON = "\N{FULLWIDTH COLON}"


def write_pages(app: Sphinx) -> None:
    """Return the sources of `docs/api`."""
    pages = {"api/index": front_page()}
    for room in ROOMS:
        pages[f"api/{room}/index"] = _room(room)
        for name in at_the_top(room):
            thing = getattr(tl_coupling, name)
            pages[page_of(name)] = heading(name) + _directive(
                f"tl_coupling.{name}", thing
            )
    for title, names in plot_groups().items():
        pages[page_of_group(title)] = _group_of_plots(title, names)
    for path in Path(app.srcdir, "api").rglob("*.rst"):
        if str(path.relative_to(app.srcdir).with_suffix("")) not in pages:
            path.unlink()
    for page, text in pages.items():
        write(Path(app.srcdir, f"{page}.rst"), text)


def _directive(name: str, thing: Any) -> str:
    kind, options = "function", ""
    # A class under a function's name, such as `process_pool`, is spoken of as one.
    if inspect.isclass(thing) and name.endswith(thing.__name__):
        kind = "exception" if issubclass(thing, Exception) else "class"
        options = f"   :members:\n   :inherited-members: {FOREIGN}\n"
    return f".. auto{kind}:: {name}\n{options}\n"


def _thumbnails(names: list[str]) -> str:
    """Show what `plot_*` draw; each picture opens the plot's entry."""
    lines = [
        f"   {name}: {first_paragraph(getattr(tl_coupling.plots, name))}\n"
        for name in names
    ]
    return ".. plots::\n   :reference:\n\n" + "".join(lines) + "\n"


def _hidden_toctree(pages: list[str]) -> str:
    return (
        ".. toctree::\n   :hidden:\n\n"
        + "".join(f"   /{page}\n" for page in pages)
        + "\n"
    )


def _plots() -> str:
    """Write the page of the plots: pictures by group, and the names that draw nothing."""
    module = ROOMS["plots"]
    others = [
        name
        for name in in_the_room("plots")
        if page_of(f"{module.__name__}.{name}") == "api/plots/index"
    ]
    text = heading("plots") + f".. automodule:: {module.__name__}\n\n"
    text += f".. currentmodule:: {module.__name__}\n\n"
    for title, names in plot_groups().items():
        text += heading(title, "-") + _thumbnails(names)
    text += heading("Other names", "-") + table(others, module)
    groups = [page_of_group(title) for title in plot_groups()]
    text += _hidden_toctree(groups + [page_of(name) for name in at_the_top("plots")])
    return text + "".join(
        _directive(f"{module.__name__}.{name}", getattr(module, name))
        for name in others
    )


def _group_of_plots(title: str, names: list[str]) -> str:
    """Write the page of a group of plots, but for those that have a page of their own."""
    module = ROOMS["plots"]
    text = heading(title) + f".. currentmodule:: {module.__name__}\n\n"
    text += "Plots of one group, each with its picture and its arguments. "
    text += "The :doc:`gallery </gallery>` has all.\n\n"
    alone = [name for name in names if name in at_the_top("plots")]
    if alone:
        links = ", ".join(f"`tl_coupling.{name}`" for name in alone)
        text += f"With pages of their own: {links}.\n\n"
    return text + "".join(
        _directive(f"{module.__name__}.{name}", getattr(module, name))
        for name in names
        if name not in alone
    )


def _room(room: str) -> str:
    if room == "plots":
        return _plots()
    module, top, own = ROOMS[room], at_the_top(room), in_the_room(room)
    text = (
        heading(room)
        + f".. automodule:: {module.__name__}\n\n.. currentmodule:: {module.__name__}\n\n"
    )
    if top:
        text += f".. rubric:: At the top level\n\n{table(top, tl_coupling)}"
        text += _hidden_toctree([page_of(name) for name in top])
    if own:
        text += f".. rubric:: In `tl_coupling.{room}`\n\n{table(own, module)}"
    return text + "".join(
        _directive(f"{module.__name__}.{name}", getattr(module, name)) for name in own
    )


# Types.


def spelled(kind: Any) -> str:
    """Return a type as a reader writes it: shapes kept, checks of values left out,
    names without their modules.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, str):
        return kind
    if isinstance(kind, typing.ForwardRef):
        return kind.__forward_arg__
    if kind is None or kind is types.NoneType:
        return "None"
    if kind is Ellipsis:
        return "..."
    if isinstance(kind, typing.TypeVar):
        # Bound to a class where it is what a class method of it returns.
        return "Self" if kind.__bound__ else kind.__name__.strip("_")
    if isinstance(kind, list):
        return f"[{', '.join(map(spelled, kind))}]"
    if inspect.isclass(kind) and issubclass(kind, AbstractArray):
        return f'{kind.dtype.__name__}[{spelled(kind.array_type)}, "{kind.dim_str.strip()}"]'
    if origin is typing.Annotated:
        return spelled(arguments[0])
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(spelled, arguments))
    if origin is collections.abc.Callable:
        return (
            "Callable"
            if arguments[0] is Ellipsis or "Any" in map(spelled, arguments[0])
            else _generic(kind)
        )
    return _generic(kind) if arguments else getattr(kind, "__name__", str(kind))


def _generic(kind: Any) -> str:
    return f"{typing.get_origin(kind).__name__}[{', '.join(map(spelled, typing.get_args(kind)))}]"


class _Verbatim:
    """What `inspect` prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> str:
    """As it is written in code, or "..." where that is made anew for every call."""
    if callable(value):
        return value.__name__
    return "..." if "<" in repr(value) else repr(value)


def _spelled_parameter(one: inspect.Parameter) -> inspect.Parameter:
    changes = {}
    if one.annotation is not one.empty:
        changes["annotation"] = _Verbatim(spelled(one.annotation))
    if one.default is not one.empty:
        changes["default"] = _Verbatim(_default(one.default))
    return one.replace(**changes)


def spell_signature(
    app: Sphinx, what: str, name: str, thing: Any, *_: Any
) -> tuple[str, str | None] | None:
    if what not in ("function", "method", "class"):
        return None
    owner = _lookup(name.rpartition(".")[0])
    has_self = what == "method" and inspect.isfunction(
        inspect.getattr_static(owner, name.rpartition(".")[2])
    )
    signature = inspect.signature(thing)
    parameters = [
        _spelled_parameter(one)
        for one in list(signature.parameters.values())[has_self:]
    ]
    returned = None if what == "class" else signature.return_annotation
    shown = None if returned in (None, signature.empty) else spelled(returned)
    return str(inspect.Signature(parameters)), shown


@functools.cache
def _lookup(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], tl_coupling)


def skip_fields(
    app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """Return the fields of a named tuple, which are in its signature."""
    return True if type(thing).__name__ == "_tuplegetter" else None


# Docstrings.


def several_names(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Keep `rows, columns: what they are` one entry: napoleon would make two, each with
    the text of both.
    """
    for i, line in enumerate(lines):
        lines[i] = re.sub(
            # Errors have a link each.
            r"^    (?!\w*(?:Error|Warning)\b)\w+(, \w+)+(?=:)",
            lambda names: names[0].replace(", ", JOINED),
            line,
        )


def whole_first_lines(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Keep `What it is: its values` one sentence: in the first line of a property,
    napoleon takes what stands before a colon for a type.
    """
    if what in ("attribute", "property") and lines:
        lines[0] = lines[0].replace(": ", f"{COLON} ")


def part_names(app: Sphinx, doctree: nodes.document) -> None:
    for text in list(doctree.findall(nodes.Text)):
        parted = text.replace(JOINED, ", ").replace(COLON, ":")
        if parted != text:
            text.parent.replace(text, nodes.Text(parted))


# Links.


@functools.cache
def _known() -> dict[str, str]:
    """Documented names by each way in which one is spoken of: as at the top, in its
    room, by its module, or alone.
    """
    known: dict[str, str] = {}
    for full in documented():
        _, *rest = full.split(".")
        for spoken in (full, ".".join(rest), f"tlc.{'.'.join(rest)}", rest[-1]):
            known.setdefault(spoken, full)
        if len(rest) == 1:
            known.setdefault(f"{HOMES[rest[0]]}.{rest[0]}", full)
            known.setdefault(
                f"{HOMES[rest[0]].removeprefix('tl_coupling.')}.{rest[0]}", full
            )
    for room in ROOMS:
        known |= {
            f"tlc.{room}": f"tl_coupling.{room}",
            f"tl_coupling.{room}": f"tl_coupling.{room}",
            # Where the code of three rooms stands.
            f"tl_coupling.studies.{room}": f"tl_coupling.{room}",
        }
    return known


def target_of(spoken: str) -> str | None:
    """Return the documented name that is meant: itself, or the class of a member that
    has no entry of its own.
    """
    spoken = spoken.strip().removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", spoken):
        return None
    parts = spoken.split(".")
    if parts[0] == "tl_coupling" and len(parts) > 3:
        parts = ["tl_coupling", parts[1], parts[-1]]
    known = _known()
    return known.get(".".join(parts)) or (
        known.get(".".join(parts[:-1])) if len(parts) > 1 else None
    )


def resolve(
    app: Sphinx,
    env: BuildEnvironment,
    node: addnodes.pending_xref,
    contnode: nodes.Element,
) -> Any:
    """Resolve what Sphinx did not find: a public name as it is spoken of, else code.
    Only explicit roles are left to warn.
    """
    if node.get("refdomain") != "py":
        return None
    if (found := _link(app, env, node, node["reftarget"], contnode)) is not None:
        return found
    in_signature = any(
        isinstance(above, addnodes.desc_signature | nodes.field)
        for above in _above(node)
    )
    is_code = node["reftype"] == "obj" and not node["reftarget"].startswith(
        "tl_coupling."
    )
    return contnode if is_code or in_signature else None


def _link(
    app: Sphinx,
    env: BuildEnvironment,
    node: addnodes.pending_xref,
    spoken: str,
    content: nodes.Element,
) -> Any:
    full = target_of(spoken)
    python = env.domains.python_domain
    return full and python.resolve_xref(
        env, node["refdoc"], app.builder, "obj", full, node, content
    )


def link_code(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Code in prose that begins with `tlc.` links, too."""
    for code in list(doctree.findall(nodes.literal)):
        if code.astext().startswith("tlc.") and not any(
            isinstance(above, nodes.reference) for above in _above(code)
        ):
            node = addnodes.pending_xref("", refdoc=page)
            if link := _link(
                app, app.env, node, code.astext().partition("(")[0], code.deepcopy()
            ):
                code.replace_self(link)


def _above(node: nodes.Node) -> Iterator[nodes.Node]:
    while (node := node.parent) is not None:
        yield node


def unlink_arguments(app: Sphinx, doctree: nodes.document) -> None:
    """Leave an argument that is called like a public name, such as `trace`, without a
    link to it, and so a column of a table.
    """
    columns = set() if app.env.docname.startswith("api/training") else COLUMNS
    for described in doctree.findall(addnodes.desc):
        parameters = list(described.findall(addnodes.desc_parameter))
        names = columns | {
            name.astext()
            for one in parameters
            for name in one.findall(addnodes.desc_sig_name)
        }
        for content in described.findall(addnodes.desc_content):
            for reference in list(content.findall(addnodes.pending_xref)):
                if reference["reftype"] == "obj" and reference["reftarget"] in names:
                    reference.replace_self(reference.children)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-signature", spell_signature)
    app.connect("autodoc-skip-member", skip_fields)
    # Before napoleon reads them.
    app.connect("autodoc-process-docstring", several_names, priority=400)
    app.connect("autodoc-process-docstring", whole_first_lines, priority=400)
    app.connect("doctree-read", part_names)
    app.connect("doctree-read", unlink_arguments)
    app.connect("missing-reference", resolve)
    app.connect("doctree-resolved", link_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
