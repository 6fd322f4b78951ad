"""From portraits of a prompt to one HTML page, whole or not at all."""

import base64
import hashlib
import html
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from string import Template

from tl_coupling.border import AnyPath, checked
from tl_coupling.files import write_atomically
from tl_coupling.interactive import VIEW_STYLE, circuitsvis_script
from tl_coupling.plots import off_screen
from tl_coupling.portraits import Portrait
from tl_coupling.report import sections

_SECTIONS: dict[str, tuple[str, Callable[[sections.Runs], str]]] = {
    "depth": ("Across depth", sections.depth),
    "locality": ("Locality and graph", sections.locality),
    "singular-values": ("Singular values", sections.singular_values),
    "tokens": ("Across tokens", sections.tokens),
    "influence": ("Influence of tokens", sections.influence),
    "trajectories": ("Trajectories", sections.trajectories),
    "provenance": ("How this was made", sections.provenance),
}


@checked
def html_report(runs: Mapping[str, Portrait]) -> str:
    """One self-contained HTML page: figures with captions, coloured tokens, and how it was made.

    The page asks no host for anything, and its security policy forbids it to; scripts other than its own do not run.

    Args:
        runs: portraits of one prompt by name, the main one first: `{"trained": …, "untrained": …}`.

    Raises:
        ValueError: no runs, or runs of different tokens, layers, positions or k.

    Cost: seconds of drawing; 1.3 MB of the page are circuitsvis' script.

    Example:
        >>> page = html_report({"trained": tlc.portrait(trace, k=(4, 8))})
        >>> page.splitlines()[1]
        '<html lang="en">'
    """
    _check(runs)
    script = circuitsvis_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    facts = next(iter(runs.values())).trace.provenance
    checkpoint = facts.get("checkpoint")
    model = str(facts.get("model")) + ("" if checkpoint is None else f" at checkpoint {checkpoint}")
    template, style = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css")
    )
    with off_screen():
        drawn = {name: draw(runs) for name, (_, draw) in _SECTIONS.items()}
    return Template(template).substitute(
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:",
        title=html.escape(f"Transformer block coupling: {model}"),
        style=style + VIEW_STYLE,
        summary=sections.summary(runs),
        contents="".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in _SECTIONS.items()),
        sections="\n".join(
            f'<section id="{name}"><h2>{title}</h2>{drawn[name]}</section>' for name, (title, _) in _SECTIONS.items()
        ),
        version=facts["versions"]["tl-coupling"],
        script=script,
    )


@checked
def write_report(path: AnyPath, runs: Mapping[str, Portrait]) -> Path:
    """Write `html_report(runs)` as UTF-8, whole or not at all.

    Raises:
        ValueError: as `html_report`.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_report(f"{folder}/report.html", {"trained": tlc.portrait(trace, k=(4, 8))})
        ...     path.name
        'report.html'
    """
    # A lone surrogate (half a character, from a tokenizer of bytes) has no UTF-8.
    page = html_report(runs).encode("utf-8", "xmlcharrefreplace")
    return write_atomically(path, lambda unfinished: unfinished.write_bytes(page))


def _check(runs: Mapping[str, Portrait]) -> None:
    if not runs:
        raise ValueError("`runs` is empty: wanted at least one Portrait")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        for what, of_first, of_this in (
            ("k", first.ks, run.ks),
            ("tokens", first.trace.str_tokens, run.trace.str_tokens),
            ("layers", first.depth.row_layers, run.depth.row_layers),
            ("position", first.position, run.position),
            ("token maps", list(first.tokens), list(run.tokens)),
        ):
            if of_first != of_this:
                raise ValueError(f"wanted runs of the same {what}, {name!r} has {of_this}, the first {of_first}")
