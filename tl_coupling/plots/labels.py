"""What every picture shares: axes of its own, the words on it, and the maps it takes."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tl_coupling.comparisons import CouplingMap
from tl_coupling.spectra import check_k

_Result = TypeVar("_Result")
_MEASURES = {
    "coupling": r"coupling $1 - \tilde{m}$",
    "normalized_miscoupling": r"normalised mis-coupling $\tilde{m}$",
    "miscoupling": "mis-coupling $m$",
    "spectral_miscoupling": "spectral mis-coupling $m_K$",
    "captured_energy": "captured energy",
}
_MAX_LAYER_TICKS, _MAX_TOKEN_TICKS = 16, 40


def own_axes(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Axes:
    """Axes on a Figure of their own; pyplot does not know it."""
    return Figure(figsize=(width, height), layout=layout).subplots()


def common_k(maps: Sequence[CouplingMap], k: int | None) -> int:
    """`k`, or what all maps hold; checked against each."""
    held = [result.k for result in maps]
    if k is None and len(set(held)) > 1:
        raise ValueError(f"`k` must be given where the maps hold different numbers of singular vectors, here {held}")
    k = held[0] if k is None else k
    check_k(k, min(held))
    return k


def by_name(results: Any) -> dict[str, CouplingMap]:
    """Depth maps by the name they are drawn under; one map goes by its model's."""
    maps = named(results, CouplingMap)
    for name, result in maps.items():
        check_depth(result, name)
    return maps


def named(results: Any, kind: type[_Result]) -> dict[str, _Result]:
    """Results of one kind by the name they are drawn under; one alone goes by its model's."""
    if isinstance(results, kind):
        # A result describes itself, whichever kind it is.
        results = {short_path(getattr(results, "provenance", {}).get("model") or kind.__name__): results}
    if not results:
        raise ValueError(f"`results` is empty: wanted at least one {kind.__name__}")
    return dict(results)


def check_depth(result: CouplingMap, name: str) -> None:
    """Raise unless the map compares layers."""
    if result.kind != "depth":
        raise ValueError(
            f"this picture wants maps of layers, kind 'depth' (`depth_coupling`), {name!r} is of kind {result.kind!r}"
        )


def label_pairs(ax: Axes, result: CouplingMap) -> None:
    """Ticks and axis labels of a map: layers, or tokens."""
    depth = result.kind == "depth"
    of_rows, of_cols = side_labels(result)
    sides = (
        (ax.xaxis, result.col_layers, result.col_positions, of_cols),
        (ax.yaxis, result.row_layers, result.row_positions, of_rows),
    )
    for axis, layers, positions, label in sides:
        labels = [str(layer) for layer in layers] if depth else [token(result, position) for position in positions]
        axis.set_label_text(label)
        shown = range(0, len(labels), math.ceil(len(labels) / (_MAX_LAYER_TICKS if depth else _MAX_TOKEN_TICKS)))
        rotation = 0 if depth or axis is ax.yaxis else 90
        # parse_math: a token may hold a dollar sign.
        axis.set_ticks(list(shown), [labels[i] for i in shown], rotation=rotation, parse_math=False)


def side_labels(result: CouplingMap) -> tuple[str, str]:
    """What the rows are, and what the columns are."""
    if result.kind == "depth":
        return "layer of J₁", "layer of the singular vectors"
    what = {"output": "input token", "input": "output token"}.get(result.provenance.get("fixed", ""), "token")
    return (
        f"{what} of J₁, layer {result.row_layers[0]}",
        f"{what} of the singular vectors, layer {result.col_layers[0]}",
    )


def token(result: CouplingMap, position: int) -> str:
    """A position of a map's prompt and its token, printable on one line."""
    return token_name(result.provenance, position)


def token_name(provenance: Mapping[str, Any], position: int) -> str:
    """A position and its token, printable on one line."""
    tokens = provenance.get("str_tokens")
    return f"{position}" if tokens is None else f"{position} {repr(tokens[position])[1:-1].strip() or '␣'}"


def measure_label(measure: str, k: int, p: int | float = 2, absolute: bool = False) -> str:
    """A measure in words, with k and its options."""
    variant = f", p = {p:g}{', |A|' if absolute else ''}" if measure == "spectral_miscoupling" else ""
    return f"{_MEASURES[measure]} (k = {k}{variant})"


def title(maps: Sequence[CouplingMap], k: int | None = None) -> str:
    """What was measured; on which model; for which prompt and token. Only what all maps have in common."""
    first = maps[0]
    what = [f"{first.kind.capitalize()} coupling"]
    what += [first.orientation] if len({result.orientation for result in maps}) == 1 else []
    what += [] if k is None else [f"k = {k}"]
    if first.kind == "context":
        ends = {(result.provenance.get("fixed"), result.provenance.get("position")) for result in maps}
        what += [f"{end} fixed at {token(first, held)}" for end, held in ends if len(ends) == 1 and held is not None]
    tokens = {token(result, result.row_positions[0]) for result in maps} if first.kind == "depth" else set()
    return heading(" · ".join(what), [result.provenance for result in maps], tokens)


def heading(what: str, provenances: Sequence[Mapping[str, Any]], tokens: Collection[str] = ()) -> str:
    """`what`; the model; the prompt, and the token if there is one. Only what all provenances have in common."""
    known = {key: value for key, value in provenances[0].items() if all(p.get(key) == value for p in provenances)}
    model = short_path(str(known.get("model") or ""))
    model += "" if known.get("checkpoint") is None else f" at checkpoint {known['checkpoint']}"
    model += " (untrained)" if known.get("untrained") else ""
    prompt = " ".join((known.get("prompt") or "").split())
    where = [f"“{prompt if len(prompt) <= 48 else prompt[:47].rstrip() + '…'}”"] if prompt else []
    where += [f"token {next(iter(tokens))}"] if len(tokens) == 1 else []
    return "\n".join(filter(None, (what, model, " · ".join(where))))


def short_path(model: str) -> str:
    """The last two parts of a local model's path; other names as they are."""
    return "/".join(Path(model).parts[-2:]) if Path(model).is_absolute() else model


def finish_lines(ax: Axes, title: str) -> None:
    """Whole numbers below, title above, a legend without mathtext."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title, fontsize="medium", parse_math=False)
    for text in ax.legend(frameon=False).get_texts():
        text.set_parse_math(False)
