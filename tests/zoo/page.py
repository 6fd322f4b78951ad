"""What the zoo found, as lines for a terminal and as docs/ARCHITECTURES.md."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from zoo.measure import DTYPES, PAIRS, TOLERANCE
from zoo.models import HOOKED
from zoo.registry import MEASURED_AS
from zoo.run import Row

# {TransformerLens version: {name: {precision: finding}}}
Found = dict[str, dict[str, Row]]

VERDICTS = {
    "correct": "all measured Jacobians equal autograd's, in each precision that is not refused",
    "refused": "one line says what the model is and what to do",
    "not built": "no model of this architecture can be made here",
    "unclear": "an error from inside, or none where one is due",
    "wrong": "a Jacobian that is not autograd's",
}
FAILURES = ("wrong", "unclear")


def verdict(row: Row) -> str:
    """The worst of the three precisions if it is a failure; else what float32 gave."""
    verdicts = [finding["verdict"] for finding in row.values()]
    return next((bad for bad in FAILURES if bad in verdicts), row["float32"]["verdict"])


def failed(found: Found) -> bool:
    """Whether anything, on any line, is wrong or unclear."""
    return any(verdict(row) in FAILURES for rows in found.values() for row in rows.values())


def lines(found: Found) -> Iterator[str]:
    """One line for each architecture, then the counts."""
    for line, rows in found.items():
        yield f"TransformerLens {line}"
        for name, row in rows.items():
            yield f"  {name:<44} {verdict(row):<10} {' '.join(f'{_cell(f):<14}' for f in row.values())} {_remark(name, row)}"
        yield f"  {_counts(rows)}"


def page(found: Found) -> str:
    """docs/ARCHITECTURES.md."""
    newest = max(found)
    others = [line for line in found if line != newest]
    registry = {name: row for name, row in found[newest].items() if name not in HOOKED}
    text = [
        "# Architectures",
        "",
        "Written by `make zoo`; not edited by hand.",
        "",
        *(f"- TransformerLens {line}: {_counts(rows)}." for line, rows in found.items()),
        "",
        "Each architecture that TransformerLens names is built as a tiny random model, three layers deep. Block Jacobians "
        f"at the first, middle and last layer and {len(PAIRS)} pairs of tokens are compared with plain autograd over the "
        "whole original model, in which neither TransformerLens nor tl_coupling has a part. A number is the largest "
        "relative error "
        f"(at most {TOLERANCE['float32']:.0e} in float32 and bfloat16, {TOLERANCE['float64']:.0e} in float64, where "
        "HuggingFace's norms and softmax still compute in float32). A bfloat16 model is linearised in float32 at its own "
        "residual stream, and so is the model that it is compared with.",
        "",
        "| verdict | meaning |",
        "| --- | --- |",
        *(f"| {word} | {meaning} |" for word, meaning in VERDICTS.items()),
        "",
        "Ways, cheapest first, are described in `tl_coupling/blocks/functions.py`. Of a model with towers for images or "
        "sound the text stack is measured.",
        "",
        f"| architecture | verdict | way | {' | '.join(DTYPES)} | {''.join(f'on {line} | ' for line in others)}remark |",
        f"| --- | --- | --- | {'--- | ' * (len(DTYPES) + len(others))}--- |",
    ]
    for name, row in sorted(registry.items(), key=lambda item: item[0].lower()):
        elsewhere = [verdict(found[line][name]) if name in found[line] else "–" for line in others]
        text.append(_line(name, row, elsewhere))
    for line, rows in found.items():
        hooked = {name: row for name, row in rows.items() if name in HOOKED}
        if hooked:
            text += [
                "",
                f"## HookedTransformer on {line}",
                "",
                "Straight from `HookedTransformer(HookedTransformerConfig(...))`.",
                "",
                f"| kind | verdict | way | {' | '.join(DTYPES)} | remark |",
                f"| --- | --- | --- | {'--- | ' * len(DTYPES)}--- |",
                *(_line(name.removeprefix("HookedTransformer, "), row, []) for name, row in hooked.items()),
            ]
        differing = {n: r for n, r in rows.items() if line != newest and n in registry and verdict(r) != verdict(registry[n])}
        if differing:
            text += ["", f"## Where {line} differs", "", "| architecture | verdict | remark |", "| --- | --- | --- |"]
            text += [f"| {name} | {verdict(row)} | {_escaped(_remark(name, row))} |" for name, row in differing.items()]
    return "\n".join(text) + "\n"


def _counts(rows: dict[str, Row]) -> str:
    counted = Counter(map(verdict, rows.values()))
    return f"{len(rows)} architectures, " + ", ".join(f"{counted[word]} {word}" for word in VERDICTS)


def _line(name: str, row: Row, elsewhere: list[str]) -> str:
    ways = dict.fromkeys(way for finding in row.values() for way in finding["ways"])
    cells = [name, verdict(row), ", ".join(ways), *map(_cell, row.values()), *elsewhere, _remark(name, row)]
    return f"| {' | '.join(map(_escaped, cells))} |"


def _cell(finding: dict[str, Any]) -> str:
    if finding["error"] is None:
        return "–" if finding["verdict"] == "not built" else finding["verdict"]
    return f"{'' if finding['verdict'] == 'correct' else 'wrong, '}{finding['error']:.0e}"


def _remark(name: str, row: Row) -> str:
    """What is measured under this name, and what the precisions that are not correct said."""
    said: dict[str, list[str]] = {}
    for precision, finding in row.items():
        if finding["sentence"]:
            said.setdefault(finding["sentence"], []).append(precision)
    parts = [MEASURED_AS[name]] if name in MEASURED_AS else []
    for sentence, precisions in said.items():
        parts.append(sentence if len(precisions) == len(row) else f"{', '.join(precisions)}: {sentence}")
    return " ".join(parts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
