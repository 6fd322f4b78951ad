"""What every picture shares: its figure, its colours, the words on it, and the maps it takes."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

from tl_coupling.comparisons import CouplingMap
from tl_coupling.spectra import check_k

# One look per meaning; `colors_of` has those of trained and untrained models.
UNDEFINED = "0.8"
NULL_LINE: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}

# `CouplingMap`s, or means of them over prompts.
PairMap = CouplingMap
_Result = TypeVar("_Result")
_MEASURES = {
    "coupling": r"coupling $1 - \tilde{m}$",
    "normalized_miscoupling": r"normalised mis-coupling $\tilde{m}$",
    "miscoupling": "mis-coupling $m$",
    "spectral_miscoupling": "spectral mis-coupling $m_K$",
    "captured_energy": "captured energy",
}
MAX_LAYER_TICKS, MAX_TOKEN_TICKS = 16, 40
_OFF_SCREEN = ContextVar("off_screen", default=False)


class Picture(Figure):
    """A figure that pyplot shows, and that a notebook shows once where a cell ends in it."""

    def _ipython_display_(self) -> None:
        # The inline backend shows what is still open when a cell has run: it would show this one a second time.
        if "inline" in matplotlib.get_backend():
            from matplotlib import pyplot

            pyplot.close(self)
        # Tells IPython to display it like any other figure.
        raise NotImplementedError


@contextmanager
def off_screen() -> Iterator[None]:
    """Figures made inside are only drawn into files: pyplot neither shows nor keeps them."""
    token = _OFF_SCREEN.set(True)
    try:
        yield
    finally:
        _OFF_SCREEN.reset(token)


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """A figure of that many inches, which pyplot knows unless it is made `off_screen`."""
    if _OFF_SCREEN.get():
        return Figure(figsize=(width, height), layout=layout)
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout=layout, FigureClass=Picture)


def own_axes(*figure: Any) -> Axes:
    """The only Axes of a `new_figure`."""
    return new_figure(*figure).subplots()


def colors_of(results: Mapping[str, Any]) -> dict[str, str]:
    """A colour for each result: blue (C0) for the first trained one, orange (C1) for the first untrained one."""
    colors: dict[str, str] = {}
    count = [0, 0]
    for name, result in results.items():
        untrained = name == "untrained" or bool(getattr(result, "provenance", {}).get("untrained"))
        colors[name] = f"C{(2 * count[untrained] + untrained) % 10}"
        count[untrained] += 1
    return colors


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
    # A dataset is a mapping too.
    if isinstance(results, kind) or not isinstance(results, Mapping):
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
    for axis, of_rows in ((ax.yaxis, True), (ax.xaxis, False)):
        axis.set_label_text(side_labels(result)[0 if of_rows else 1])
        if result.kind == "depth":
            name_ticks(axis, result.row_layers if of_rows else result.col_layers, MAX_LAYER_TICKS)
        else:
            positions = result.row_positions if of_rows else result.col_positions
            name_ticks(axis, [token_name(result.provenance, position) for position in positions], rotate=not of_rows)


def name_ticks(axis: Axis, names: Sequence[Any], most: int = MAX_TOKEN_TICKS, rotate: bool = False) -> None:
    """A tick for each name, or for every second, third … one where there are more than `most`."""
    shown = range(0, len(names), math.ceil(len(names) / most))
    # parse_math: a token may hold a dollar sign.
    axis.set_ticks(list(shown), [str(names[i]) for i in shown], rotation=90 if rotate else 0, parse_math=False)


def side_labels(result: CouplingMap) -> tuple[str, str]:
    """What the rows are, and what the columns are."""
    if result.kind == "depth":
        return "layer of J₁", "layer of the singular vectors"
    what = {"output": "input token", "input": "output token"}.get(result.provenance.get("fixed", ""), "token")
    return (
        f"{what} of J₁, layer {result.row_layers[0]}",
        f"{what} of the singular vectors, layer {result.col_layers[0]}",
    )


def token_name(provenance: Mapping[str, Any], position: int) -> str:
    """A position and its token in quotes, printable on one line."""
    tokens = provenance.get("str_tokens")
    return f"{position}" if tokens is None else f"{position} ‘{repr(tokens[position])[1:-1].strip() or '␣'}’"


def measure_label(measure: str, k: int, p: int | float = 2, absolute: bool = False) -> str:
    """A measure in words, with k and its options."""
    variant = f", p = {p:g}{', |A|' if absolute else ''}" if measure == "spectral_miscoupling" else ""
    return f"{_MEASURES[measure]} (k = {k}{variant})"


def title(maps: Sequence[Any], k: int | None = None) -> str:
    """What was measured; on which model; for which prompt and token. Only what all maps have in common."""
    first = maps[0]
    what = [f"{first.kind.capitalize()} coupling"]
    what += [first.orientation] if len({result.orientation for result in maps}) == 1 else []
    what += [] if k is None else [f"k = {k}"]
    if first.kind == "context":
        ends = {(result.provenance.get("fixed"), result.provenance.get("position")) for result in maps}
        known = [(end, held) for end, held in ends if len(ends) == 1 and held is not None]
        what += [f"{end} fixed at {token_name(first.provenance, held)}" for end, held in known]
    provenances = [result.provenance for result in maps]
    prompts = {getattr(result, "n_prompts", 1) for result in maps}
    if max(prompts) > 1:
        what += [f"mean over {prompts.pop()} prompts"] if len(prompts) == 1 else []
        return heading(" · ".join(what), [{**provenance, "prompt": None} for provenance in provenances])
    tokens = {token_name(result.provenance, result.row_positions[0]) for result in maps if result.kind == "depth"}
    return heading(" · ".join(what), provenances, tokens)


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


def plain_legend(of: Axes | Figure, *handles_and_labels: Any, **options: Any) -> Legend:
    """A legend without a frame; what its names hold is not read as mathematics."""
    drawn = of.legend(*handles_and_labels, **({"frameon": False} | options))
    for text in drawn.get_texts():
        text.set_parse_math(False)
    return drawn


def finish_lines(ax: Axes, title: str) -> None:
    """Whole numbers below, title above, a legend."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(title, fontsize="medium", parse_math=False)
    plain_legend(ax)
