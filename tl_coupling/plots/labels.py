"""Make what all pictures share: figures, colours, and the words on them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import plain
from tl_coupling.measures import AnyMeasure, measure_named
from tl_coupling.spectra import check_k

# One look per meaning; `in_colors` has those of trained and untrained models.
UNDEFINED = "0.8"
NULL_LINE: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}
# Legends beside the axes: no corner of a curve or a scatter is always free.
ABOVE: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "fontsize": "small",
}
BELOW: dict[str, Any] = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, 0),
    "fontsize": "small",
}
MAX_LAYER_TICKS, MAX_TOKEN_TICKS = 16, 40

_Result = TypeVar("_Result")
_OFF_SCREEN = ContextVar("off_screen", default=False)


class Picture(Figure):
    """A figure that pyplot shows, and that a notebook shows once."""

    def _ipython_display_(self) -> None:
        # The inline backend shows what is still open when a cell has run: it would show
        # this one a second time.
        if "inline" in matplotlib.get_backend():
            from matplotlib import pyplot

            pyplot.close(self)
        # Tells IPython to display it like any other figure.
        raise NotImplementedError


@contextmanager
def off_screen() -> Iterator[None]:
    """Draw figures only into files: pyplot neither shows nor keeps them.

    Example:
        >>> with tlc.plots.off_screen():
        ...     tlc.plot_trajectories(trace).savefig("trajectories.png")
    """
    token = _OFF_SCREEN.set(True)
    try:
        yield
    finally:
        _OFF_SCREEN.reset(token)


def new_figure(
    width: float,
    height: float,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> Figure:
    """Make a figure of that many inches.

    Pyplot knows it unless it is made `off_screen`.
    """
    if _OFF_SCREEN.get():
        return Figure(figsize=(width, height), layout=layout)
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout=layout, FigureClass=Picture)


def named(results: Any, kind: type[_Result]) -> dict[str, _Result]:
    """Return results of one kind by the name that they are drawn under.

    One alone goes by its model's name. Maps must be of layers.
    """
    # A dataset is a mapping too.
    if isinstance(results, kind) or not isinstance(results, Mapping):
        provenance = getattr(results, "attrs", None) or getattr(
            results, "provenance", {}
        )
        results = {short_path(provenance.get("model") or kind.__name__): results}
    if not results:
        raise ValueError(f"`results` is empty: wanted at least one {kind.__name__}")
    for name, result in results.items():
        if isinstance(result, CouplingMap) and result.kind != "depth":
            wanted = (
                "this picture wants maps of layers, kind 'depth' (`depth_coupling`)"
            )
            raise ValueError(f"{wanted}, {name!r} is of kind {result.kind!r}")
    return dict(results)


def common_k(maps: Sequence[CouplingMap], k: int | None) -> int:
    """`k`, or what all maps hold; checked against each."""
    held = [result.k for result in maps]
    if k is None and len(set(held)) > 1:
        raise ValueError(
            "`k` must be given where the maps hold different numbers of singular "
            f"vectors, here {held}"
        )
    k = held[0] if k is None else k
    check_k(k, min(held))
    return k


def in_colors(results: Mapping[str, _Result]) -> Iterator[tuple[str, _Result, str]]:
    """Yield name, result and colour.

    The first trained result is blue (C0), the first untrained one orange (C1).
    """
    count = [0, 0]
    for name, result in results.items():
        untrained = name == "untrained" or bool(
            getattr(result, "provenance", {}).get("untrained")
        )
        yield name, result, f"C{(2 * count[untrained] + untrained) % 10}"
        count[untrained] += 1


def one_null(nulls: Any) -> float | None:
    """Return what random subspaces give, if that is the same everywhere.

    It is for all measures but one.
    """
    known = np.asarray(nulls, float)
    known = known[np.isfinite(known)]
    return (
        float(known[0])
        if known.size and np.ptp(known) <= 1e-6 * abs(known[0])
        else None
    )


def draw_null(line: Callable[..., Any], nulls: Any) -> bool:
    """Draw a dashed line where there is `one_null`, and say whether there is.

    `line` is `ax.axhline` or `ax.axvline`.
    """
    if (null := one_null(nulls)) is not None:
        line(null, label=f"random subspaces, {null:.3f}", **NULL_LINE)
    return null is not None


def mark_null(bar: Axes, null: float) -> None:
    """Draw a line across a colour bar that is seen on every colour."""
    for color, linewidth in (("white", 3), ("black", 1)):
        bar.axhline(null, color=color, linewidth=linewidth)


def name_ticks(
    axis: Axis,
    names: Sequence[Any],
    most: int,
    at: np.ndarray | None = None,
    **options: Any,
) -> None:
    """Set a tick for each name.

    Where there are more than `most`, every second, third … name has one.
    """
    every = slice(None, None, math.ceil(len(names) / most))
    at = np.arange(len(names)) if at is None else at
    # parse_math: a token may hold a dollar sign.
    axis.set_ticks(
        at[every], [plain(name) for name in names[every]], parse_math=False, **options
    )


def token_name(provenance: Mapping[str, Any], position: int) -> str:
    """Return a position and its token in quotes, printable on one line."""
    tokens = provenance.get("str_tokens")
    return (
        f"{position}"
        if tokens is None
        else f"{position} ‘{repr(tokens[position])[1:-1].strip() or '␣'}’"
    )


def measure_label(
    measure: AnyMeasure, k: int, p: int | float = 2, absolute: bool = False
) -> str:
    """Return a measure in words, with k and its options."""
    return measure_named(measure, p=p, absolute=absolute).label_at(k)


def map_heading(maps: Sequence[Any], k: int | None = None) -> str:
    """Return what was measured, on which model, for which prompt and token.

    The title says only what all maps have in common.
    """
    first = maps[0]
    what = [f"{first.kind.capitalize()} coupling"]
    what += (
        [first.orientation] if len({result.orientation for result in maps}) == 1 else []
    )
    what += [] if k is None else [f"k = {k}"]
    if first.kind == "context":
        ends = {
            (result.provenance.get("fixed"), result.provenance.get("position"))
            for result in maps
        }
        known = [
            (end, held) for end, held in ends if len(ends) == 1 and held is not None
        ]
        what += [
            f"{end} fixed at {token_name(first.provenance, held)}"
            for end, held in known
        ]
    provenances = [result.provenance for result in maps]
    prompts = {getattr(result, "n_prompts", 1) for result in maps}
    if max(prompts) > 1:
        what += [f"mean over {prompts.pop()} prompts"] if len(prompts) == 1 else []
        return heading(
            " · ".join(what),
            [
                {**provenance, "prompt": None, "image": None}
                for provenance in provenances
            ],
        )
    positions = [result.row_positions[0] for result in maps if result.kind == "depth"]
    return heading(" · ".join(what), provenances, positions)


def heading(
    what: str, provenances: Sequence[Mapping[str, Any]], positions: Sequence[int] = ()
) -> str:
    """Return a title: `what`, the model, the prompt or the image, and the token if any.

    The title says only what all provenances have in common.
    """
    known = {
        key: value
        for key, value in provenances[0].items()
        if all(p.get(key) == value for p in provenances)
    }
    model = short_path(str(known.get("model") or ""))
    model += (
        ""
        if known.get("checkpoint") is None
        else f" at checkpoint {known['checkpoint']}"
    )
    model += " (untrained)" if known.get("untrained") else ""
    prompt = " ".join(
        (known.get("prompt") or (known.get("image") or {}).get("name") or "").split()
    )
    where = (
        [f"“{prompt if len(prompt) <= 48 else prompt[:47].rstrip() + '…'}”"]
        if prompt
        else []
    )
    tokens = {token_name(*token) for token in zip(provenances, positions, strict=False)}
    where += [f"token {tokens.pop()}"] if len(tokens) == 1 else []
    return "\n".join(filter(None, (what, model, " · ".join(where))))


def short_path(model: str) -> str:
    """Return the last two parts of a local model's path, and other names as they are."""
    return "/".join(Path(model).parts[-2:]) if Path(model).is_absolute() else model


def entitle(of: Axes | Figure, text: str) -> None:
    """Set a title that is not read as mathematics."""
    (of.set_title if isinstance(of, Axes) else of.suptitle)(
        plain(text), fontsize="medium", parse_math=False
    )


def beside_formulas(name: str) -> str:
    """Escape dollars in a name that stands beside formulas."""
    return plain(name).replace("$", r"\$")


def plain_legend(of: Axes | Figure, *handles_and_labels: Any, **options: Any) -> Legend:
    """Add a legend without a frame, whose names are not read as mathematics."""
    drawn = of.legend(*handles_and_labels, frameon=False, **options)
    for text in drawn.get_texts():
        text.set_text(plain(text.get_text()))
        text.set_parse_math(False)
    return drawn


def finish_lines(ax: Axes, title: str, **legend: Any) -> None:
    """Set whole numbers below, a title above, and a legend."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    entitle(ax, title)
    plain_legend(ax, **legend)
