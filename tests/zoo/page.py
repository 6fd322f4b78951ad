"""The zoo's findings, as lines for a terminal and as docs/ARCHITECTURES.md."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from real import page as real_page
from zoo.measure import DTYPES, N_LAYERS, PAIRS, TOLERANCE
from zoo.models import HOOKED
from zoo.registry import MEASURED_AS
from zoo.run import Row

# {TransformerLens version: {name: {precision: finding}}}
Found = dict[str, dict[str, Row]]

VERDICTS = {
    "correct": "all measured Jacobians equal autograd's, in each precision that is not refused",
    "refused": "one line says what the model is and what to do",
    "not built": "no model of this architecture can be made here",
    "does not run": "the model raises an error by itself, with or without tl_coupling",
    "unclear": "an error without a clear message, or none where one is due",
    "wrong": "a Jacobian that is not autograd's",
}
FAILURES = ("wrong", "unclear")


def verdict(row: Row) -> str:
    """Return the worst of the three precisions if it is a failure; else what float32
    gave.
    """
    verdicts = [finding["verdict"] for finding in row.values()]
    return next((bad for bad in FAILURES if bad in verdicts), row["float32"]["verdict"])


def failed(found: Found) -> bool:
    """Whether anything, on any line, is wrong or unclear."""
    return any(
        verdict(row) in FAILURES for rows in found.values() for row in rows.values()
    )


def lines(found: Found) -> Iterator[str]:
    """One line for each architecture, then the counts."""
    for line, rows in found.items():
        yield f"TransformerLens {line}"
        for name, row in rows.items():
            cells = " ".join(f"{_cell(finding):<14}" for finding in row.values())
            yield f"  {name:<44} {verdict(row):<10} {cells} {_remark(name, row)}"
        yield f"  {_counts(rows)}"


_INTRODUCTION = f"""\
Each architecture that TransformerLens names is built as a tiny random model, {N_LAYERS} layers deep. Block Jacobians at
the first, middle and last layer, of the first, middle and last token and of {len(PAIRS) - 3} pairs of tokens, are
compared with plain autograd over the whole original model, without TransformerLens or tl_coupling.
A number is the largest relative error: at most {TOLERANCE["float32"]:.0e} in float32 and bfloat16,
{TOLERANCE["float64"]:.0e} in float64, where HuggingFace's norms and softmax still compute in float32. A bfloat16 model
is linearised in float32 at its own residual stream, and so is the model that it is compared with. Of models with
image or audio towers, the text stack is measured; vision models are given pixels.
"""


def page(found: Found) -> str:
    """docs/ARCHITECTURES.md: the newest TransformerLens line in full, and where the
    others differ.
    """
    newest = max(found)
    registry = {name: row for name, row in found[newest].items() if name not in HOOKED}
    text = [
        "# Supported architectures",
        "",
        "Which architectures are measured, and how far each agrees with plain autograd.",
        "Written by `make zoo`, and its last section by `make real`; not edited by hand.",
        "",
    ]
    text += [
        f"- TransformerLens {line}: {_counts(rows)}."
        for line, rows in sorted(found.items(), reverse=True)
    ]
    text += ["", _INTRODUCTION, *_table(["verdict", "meaning"], VERDICTS.items())]
    text += ["", f"## TransformerLens {newest}", ""]
    text += _table(
        ["architecture", *_COLUMNS],
        ([name, *_cells(name, row)] for name, row in registry.items()),
    )
    for line, rows in found.items():
        if line == newest:
            continue
        others = {
            n: row
            for n, row in rows.items()
            if n in registry and verdict(row) != verdict(registry[n])
        }
        hooked = [
            [n.removeprefix("HookedTransformer, "), *_cells(n, rows[n])]
            for n in HOOKED
            if n in rows
        ]
        missing = [name for name in registry if name not in rows]
        text += ["", f"## Where TransformerLens {line} differs", ""]
        text += _table(
            ["architecture", *_COLUMNS],
            ([n, *_cells(n, row)] for n, row in others.items()),
        )
        if missing:
            text += ["", f"It does not list {', '.join(missing)}."]
        if hooked:
            text += [
                "",
                f"## HookedTransformer {line}",
                "",
                "Straight from its constructor.",
                "",
            ]
            text += _table(["kind", *_COLUMNS], hooked)
    written = "\n".join(text) + "\n"
    outcomes = real_page.recorded()
    return real_page.with_section(written, outcomes) if outcomes else written


_COLUMNS = ["verdict", "way", *DTYPES, "remark"]


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    filled = [
        head,
        ["---"] * len(head),
        *([_escaped(cell) for cell in row] for row in rows),
    ]
    return [f"| {' | '.join(cells)} |" for cells in filled]


def _cells(name: str, row: Row) -> list[str]:
    ways = dict.fromkeys(way for finding in row.values() for way in finding["ways"])
    return [
        verdict(row),
        ", ".join(ways),
        *map(_cell, row.values()),
        _remark(name, row),
    ]


def _counts(rows: dict[str, Row]) -> str:
    counted = Counter(map(verdict, rows.values()))
    in_float32 = sum(row["float32"]["verdict"] == "correct" for row in rows.values())
    counts = ", ".join(f"{counted[word]} {word}" for word in VERDICTS)
    return (
        f"{len(rows)} architectures, {in_float32} correct in float32; "
        f"over all precisions {counts}"
    )


def _cell(finding: dict[str, Any]) -> str:
    if finding["error"] is None:
        return "–" if finding["verdict"] == "not built" else finding["verdict"]
    return (
        f"{'' if finding['verdict'] == 'correct' else 'wrong, '}{finding['error']:.0e}"
    )


def _remark(name: str, row: Row) -> str:
    """Return what is measured under this name, and what the precisions that are not
    correct said.
    """
    sentences: dict[str, list[str]] = {}
    for precision, finding in row.items():
        if finding["sentence"]:
            sentences.setdefault(finding["sentence"], []).append(precision)
    parts = [MEASURED_AS[name]] if name in MEASURED_AS else []
    for sentence, precisions in sentences.items():
        parts.append(
            sentence
            if len(precisions) == len(row)
            else f"{', '.join(precisions)}: {sentence}"
        )
    return " ".join(parts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
