"""Make what all pictures share: figures, colours, and the words on them."""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, NamedTuple, TypeVar, cast

import matplotlib
import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox, IdentityTransform
from numpy.typing import ArrayLike

from tl_coupling.arguments import Positive, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import plain
from tl_coupling.measures import MEASURES, AnyMeasure, label_of, measure_named
from tl_coupling.results import (
    RANDOM_SUBSPACES,
    changes_in_words,
    prompts_in_words,
)
from tl_coupling.spectra import check_k

# The widest that a figure may be, in inches: pages show it at 736 pixels, where letters
# of 8 points are then 11 pixels high.
PAGE_WIDTH = 7.4
# On a telephone a page is 358 pixels wide: there the small letters of a figure of this
# width are 9 pixels high.
PHONE_WIDTH = 4.6
# Okabe and Ito's colours, which colour-blind readers tell apart too, but yellow, which
# is lost on white. Each has a marker, for those who see or print no colours.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
ORANGE = "#E69F00"
PINK = "#CC79A7"
SKY = "#56B4E9"
BLACK = "#000000"
MARKERS = {
    BLUE: "o",
    VERMILION: "s",
    GREEN: "D",
    ORANGE: "^",
    PINK: "v",
    SKY: "P",
    BLACK: "X",
}
COLORS = tuple(MARKERS)
_TRAINED_COLORS = (BLUE, GREEN, SKY, BLACK)
_UNTRAINED_COLORS = (VERMILION, ORANGE, PINK)
# One look per meaning; `assign_colors` has those of trained and untrained models.
TRAINED = BLUE
UNTRAINED = VERMILION
UNDEFINED = "0.8"
NULL_LINE: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1}
# Where 95 % of random results lie.
NULL_BAND: dict[str, Any] = {"color": "0.4", "alpha": 0.2, "linewidth": 0}
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
# As many as have room along a side of a map at the sizes used here.
MAX_LAYER_TICKS = 10
# Beside one or two other maps, along the side and below.
MAX_TICKS_BESIDE = 8
MAX_TICKS_BELOW = 5
MAX_TOKEN_TICKS = 20
_LONGEST_PROMPT = 48

_Result = TypeVar("_Result")
_PAPER: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "figure.titlesize": 7,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "lines.linewidth": 0.8,
    "lines.markersize": 3,
    "savefig.dpi": 300,
    # Letters of figures that are the user's own stay text as well.
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
}


class _Surroundings(NamedTuple):
    """Where figures are made: within `off_screen`, and within `paper_style` of a width
    in inches.
    """

    off_screen: bool = False
    paper_width: float | None = None


_ON_SCREEN = _Surroundings()
# State, because whoever writes `with paper_style():` means every picture inside; and no
# global, because each thread and task of a notebook has its own.
_SURROUNDINGS = ContextVar("surroundings", default=_ON_SCREEN)


@contextmanager
def _surrounded(**changes: Any) -> Iterator[None]:
    token = _SURROUNDINGS.set(_SURROUNDINGS.get()._replace(**changes))
    try:
        yield
    finally:
        _SURROUNDINGS.reset(token)


class Picture(Figure):
    """A figure that pyplot shows, that a notebook shows once, and whose letters stay
    text in a PDF.
    """

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure, as matplotlib does."""
        # Type 3 fonts, the default, are refused by some publishers. The setting is read
        # when a figure is saved.
        with matplotlib.rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):
            super().savefig(fname, **options)

    def _ipython_display_(self) -> None:
        # The inline backend shows what is still open when a cell has run: it would show
        # this one a second time.
        if "inline" in matplotlib.get_backend():
            from matplotlib import pyplot

            pyplot.close(self)
        # Tells IPython to display it like any other figure.
        raise NotImplementedError


class Title(Text):
    """A title whose first line says what is seen; the others, small and grey, of what.

    It is one text, which `set_title` and `suptitle` replace as a whole. Renderers have
    no type in common.
    """

    size_of_rest = "x-small"

    def _parts(self, renderer: Any) -> list[Text]:
        """Return both parts as texts, each where it stands."""
        first, _, rest = self.get_text().partition("\n")
        place = self.get_transform().transform(self.get_unitless_position())
        look: dict[str, Any] = {
            "transform": IdentityTransform(),
            "ha": self.get_horizontalalignment(),
            "parse_math": False,
            "figure": self.get_figure(root=True),
            "va": "bottom",
        }
        x, y = place
        small = Text(x, y, rest, fontsize=self.size_of_rest, color="0.35", **look)
        font = self.get_fontproperties()
        large = Text(x, y, first, fontproperties=font, **look)
        small_height = small.get_window_extent(renderer).height
        large_height = large.get_window_extent(renderer).height
        gap = 0.1 * large_height
        bottom = y
        # Titles of figures hang from their place, those of Axes stand on it.
        if self.get_verticalalignment() == "top":
            bottom -= small_height + gap + large_height
        small.set_y(bottom)
        large.set_y(bottom + small_height + gap)
        return [large, small]

    def draw(self, renderer: Any, *arguments: Any, **options: Any) -> None:
        """Draw both parts."""
        if "\n" not in self.get_text() or not self.get_visible():
            super().draw(renderer, *arguments, **options)
            return
        for part in self._parts(renderer):
            part.draw(renderer, *arguments, **options)
        self.stale = False

    def get_window_extent(self, renderer: Any = None, dpi: float | None = None) -> Bbox:
        """Return the box around both parts."""
        if "\n" not in self.get_text() or not self.get_visible():
            return super().get_window_extent(renderer, dpi)
        parts = self._parts(renderer)
        return Bbox.union([part.get_window_extent(renderer) for part in parts])


@contextmanager
def off_screen() -> Iterator[None]:
    """Draw figures only into files: pyplot neither shows nor keeps them.

    Example:
        >>> with tlc.plots.off_screen():
        ...     tlc.plot_trajectories(trace).savefig("trajectories.png")
    """
    with _surrounded(off_screen=True):
        yield


@checked
@contextmanager
def paper_style(width: Positive = 3.3) -> Iterator[None]:
    """Draw figures for print: of a column's width, with small type and no titles.

    Type of 7 points, thin lines, and letters that stay text in a PDF. What a title
    would say belongs into the caption. `width` is in inches: 3.3 for a column of two,
    6.8 for both. Axes that are given to a function keep their size.

    Example:
        >>> with tlc.plots.paper_style():
        ...     ax = tlc.plot_coupling(tlc.depth_coupling(trace, k=4))
        >>> ax.figure.savefig("coupling.pdf")
        >>> float(ax.figure.get_figwidth()), ax.get_title()
        (3.3, '')
    """
    with _surrounded(paper_width=width), matplotlib.rc_context(_PAPER):
        yield


def new_figure(
    width: float,
    height: float,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> Figure:
    """Make a figure of that many inches.

    Pyplot knows it unless it is made `off_screen`.
    """
    off_screen, paper_width = _SURROUNDINGS.get()
    if paper_width is not None:
        # The proportions stay those for which the picture was laid out.
        width, height = paper_width, height * paper_width / width
    if off_screen:
        # Made without pyplot, it is freed when it is forgotten.
        return Picture(figsize=(width, height), layout=layout)
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout=layout, FigureClass=Picture)


def named(results: object, kind: type[_Result]) -> dict[str, _Result]:
    """Return results of one kind by the name that they are drawn under.

    One alone goes by its model's name. Maps must be of layers.
    """
    # A dataset is a mapping too.
    if isinstance(results, kind) or not isinstance(results, Mapping):
        # A dataset keeps its model in `attrs`, a result in `provenance`.
        provenance = getattr(results, "attrs", None) or getattr(
            results, "provenance", {}
        )
        results = {short_path(provenance.get("model") or kind.__name__): results}
    if not results:
        raise ValueError(f"`results` is empty: wanted at least one {kind.__name__}")
    for name, result in results.items():
        if isinstance(result, CouplingMap) and result.kind != "depth":
            raise ValueError(
                "this picture wants maps of layers, kind 'depth' (`depth_coupling`), "
                f"{name!r} is of kind {result.kind!r}"
            )
    return dict(results)


def color_map(cmap: str | Colormap | None) -> Colormap:
    """Return a colour map, matplotlib's default for None.

    Raises:
        ValueError: a name that matplotlib does not know.
    """
    if isinstance(cmap, str) and cmap not in colormaps:
        raise ValueError(
            f"`cmap` must be a colour map that matplotlib knows, got {cmap!r}"
        )
    return colormaps.get_cmap(cmap or rcParams["image.cmap"])


def common_k(maps: Sequence[CouplingMap], k: int | None) -> int:
    """Return `k`, by default what all maps hold; it is checked against each map."""
    largest_ks = [result.k for result in maps]
    if k is None and len(set(largest_ks)) > 1:
        raise ValueError(
            "`k` must be given where the maps hold different numbers of singular "
            f"vectors, here {largest_ks}"
        )
    k = largest_ks[0] if k is None else k
    check_k(k, min(largest_ks), min(result.d_model for result in maps))
    return k


def assign_colors(results: Mapping[str, _Result]) -> Iterator[tuple[str, _Result, str]]:
    """Yield name, result and colour.

    The first trained result is blue, the first untrained one vermilion.
    """
    n_trained = n_untrained = 0
    for name, result in results.items():
        provenance = getattr(result, "provenance", {})
        if name == "untrained" or provenance.get("untrained"):
            yield name, result, _UNTRAINED_COLORS[n_untrained % len(_UNTRAINED_COLORS)]
            n_untrained += 1
        else:
            yield name, result, _TRAINED_COLORS[n_trained % len(_TRAINED_COLORS)]
            n_trained += 1


def marked(color: str, n_points: int = 0) -> dict[str, Any]:
    """Return options of a line of this colour with its marker.

    Of many points about twelve have one.
    """
    return {
        "color": color,
        "marker": MARKERS[color],
        "markersize": 3.5,
        "markevery": max(1, n_points // 12),
    }


def numbered_look(number: int) -> dict[str, Any]:
    """Return colour and marker of one of many: no two of the first 49 are the same."""
    rounds, place = divmod(number, len(COLORS))
    color = COLORS[place]
    marker = MARKERS[COLORS[(place + rounds) % len(COLORS)]]
    return {"color": color, "marker": marker}


def signed(value: float, form: str = "g") -> str:
    """Return a number in a format of Python's, with a minus sign as ticks have it."""
    return format(value, form).replace("-", "−")


def shaded(values: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """Return a shade and a marker for each number, dark for the smallest.

    As many values have the same looks in all pictures.
    """
    # The palest shades of the map are lost on white, first for readers without blue.
    ordered = sorted(set(values))
    shades = colormaps["viridis"](np.linspace(0, 0.75, len(ordered)))
    return {
        value: {"color": to_hex(shade), "marker": marker}
        for value, shade, marker in zip(ordered, shades, MARKERS.values(), strict=False)
    }


def one_null(nulls: ArrayLike | float) -> float | None:
    """Return what random subspaces give, if that is the same everywhere.

    It is for all measures but one.
    """
    finite_nulls = np.asarray(nulls, float)
    finite_nulls = finite_nulls[np.isfinite(finite_nulls)]
    if not finite_nulls.size or np.ptp(finite_nulls) > 1e-6 * abs(finite_nulls[0]):
        return None
    return float(finite_nulls[0])


def draw_null(line: Callable[..., object], nulls: ArrayLike | float) -> bool:
    """Draw a dashed line where there is `one_null`, and say whether there is.

    `line` is `ax.axhline` or `ax.axvline`.
    """
    if (null := one_null(nulls)) is not None:
        line(null, label=f"{RANDOM_SUBSPACES}, {null:.3f}", **NULL_LINE)
    return null is not None


def draw_null_band(
    ax: Axes, x: Sequence[int] | np.ndarray, low: ArrayLike, high: ArrayLike
) -> None:
    """Draw where 95 % of random results lie."""
    ax.fill_between(x, low, high, label="95 % of random", **NULL_BAND)


def mark_null(bar: Axes, null: float, *, is_upright: bool = True) -> None:
    """Draw a line across a colour bar that is seen on every colour."""
    line = bar.axhline if is_upright else bar.axvline
    # Black on a wider white line is seen on the darkest and on the brightest colour.
    for color, linewidth in (("white", 3), ("black", 1)):
        line(null, color=color, linewidth=linewidth)


def mark_and_name_null(bar: Axes, null: float, *, is_upright: bool = True) -> None:
    """Draw the line of `mark_null`, and write what it is beside it.

    "null" is what random subspaces, or other random results, give: the picture's title
    or its caption says which.
    """
    mark_null(bar, null, is_upright=is_upright)
    if not is_upright:
        bar.text(
            null,
            1.1,
            "null ▾",
            transform=bar.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize="small",
        )
        return
    bar.text(
        -0.2,
        null,
        "null ▸",
        transform=bar.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize="small",
    )


def name_ticks(
    axis: Axis,
    names: Sequence[object],
    max_ticks: int,
    places: np.ndarray | None = None,
    **options: Any,
) -> None:
    """Set a tick for each name.

    Where there are more than `max_ticks`, every second, third … name has one.
    """
    if places is None:
        places = np.arange(len(names))
    # Rounded up, so that never more than `max_ticks` have a tick.
    step = math.ceil(len(names) / max_ticks)
    shown_names = [plain(name) for name in names[::step]]
    # parse_math: a token may hold a dollar sign.
    axis.set_ticks(places[::step], shown_names, parse_math=False, **options)


def token_name(provenance: Mapping[str, Any], position: int) -> str:
    """Return a position and its token in quotes, printable on one line."""
    tokens = provenance.get("str_tokens")
    if tokens is None:
        return f"{position}"
    # `repr` writes line breaks and control characters as escapes.
    printable = repr(tokens[position])[1:-1].strip()
    return f"{position} ‘{printable or '␣'}’"


def measure_label(
    measure: AnyMeasure | str, k: int, p: int | float = 2, absolute: bool = False
) -> str:
    """Return a measure in words, with k and its options; of the user's own, its name."""
    # A result holds no more than the name.
    if isinstance(measure, str) and measure not in MEASURES:
        return f"{measure} (k = {k})"
    named = measure_named(cast(AnyMeasure, measure), p=p, absolute=absolute)
    return named.label_at(k)


def short_measure(measure: AnyMeasure | str) -> str:
    """Return a measure in words, without the formula, which is for the caption."""
    name = measure if isinstance(measure, str) else measure_named(measure).name
    return label_of(name).partition("$")[0].strip()


def map_heading(maps: Sequence[CouplingMap], k: int | None = None) -> str:
    """Return what was measured, on which model, for which prompt and token.

    The title says only what all maps have in common.
    """
    first = maps[0]
    parts = [f"{first.kind.capitalize()} coupling"]
    # The paper's orientation is for the caption.
    if {result.orientation for result in maps} == {"vju"}:
        parts.append("V′JU")
    changes = {tuple(changes_in_words(result.provenance)) for result in maps}
    if len(changes) == 1:
        parts += changes.pop()
    if k is not None:
        parts.append(f"k = {k}")
    subject = " · ".join(parts)
    if first.kind == "context":
        subject = "\n".join([subject, *_fixed_end(maps)])
    provenances = [result.provenance for result in maps]
    numbers_of_prompts = {getattr(result, "n_prompts", 1) for result in maps}
    if max(numbers_of_prompts) > 1:
        if len(numbers_of_prompts) == 1:
            subject += f"\nmean over {numbers_of_prompts.pop()} prompts"
        prompts_of_maps = {prompts_in_words(result.provenance) for result in maps}
        if prompts_of_maps != {""} and len(prompts_of_maps) == 1:
            subject += f" · {prompts_of_maps.pop()}"
        # One prompt of many would be no title for their mean.
        no_prompt = {"prompt": None, "image": None}
        provenances = [provenance | no_prompt for provenance in provenances]
        return heading(subject, provenances)
    if any(result.is_mean_over_tokens for result in maps):
        numbers_of_tokens = {n_averaged(result) for result in maps}
        if len(numbers_of_tokens) == 1:
            subject += f"\nmean over {numbers_of_tokens.pop()}"
        return heading(subject, provenances)
    positions = [result.row_positions[0] for result in maps if result.kind == "depth"]
    return heading(subject, provenances, positions)


def n_averaged(result: CouplingMap) -> str:
    """Return how many prompts, or tokens of one, a map is the mean over, in words."""
    if result.is_mean_over_tokens and result.n_prompts == 1:
        return f"{len(result.provenance['positions'])} tokens"
    return f"{result.n_prompts} prompts"


def with_numbers(title: str, numbers: str) -> str:
    """Return a title whose first line ends with these numbers."""
    subject, *rest = title.split("\n")
    return "\n".join([f"{subject} · {numbers}", *rest])


def _fixed_end(maps: Sequence[CouplingMap]) -> list[str]:
    """Say which end of context maps is fixed at which token, if that is known of all."""
    first = maps[0].provenance
    ends = {
        (result.provenance.get("fixed"), result.provenance.get("position"))
        for result in maps
    }
    end, position = next(iter(ends))
    if len(ends) > 1 or position is None:
        return []
    return [f"{end} fixed at {token_name(first, position)}"]


def heading(
    subject: str,
    provenances: Sequence[Mapping[str, Any]],
    positions: Sequence[int] = (),
) -> str:
    """Return a title: `subject`, the model, the prompt or the image, and the token if any.

    The title says only what all provenances have in common.
    """
    common = {
        key: value
        for key, value in provenances[0].items()
        if all(provenance.get(key) == value for provenance in provenances)
    }
    model = short_path(str(common.get("model") or ""))
    if common.get("checkpoint") is not None:
        model += f" at checkpoint {common['checkpoint']}"
    if common.get("untrained"):
        model += " (untrained)"
    image = common.get("image") or {}
    prompt = " ".join((common.get("prompt") or image.get("name") or "").split())
    if len(prompt) > _LONGEST_PROMPT:
        prompt = prompt[: _LONGEST_PROMPT - 1].rstrip() + "…"
    places = [f"“{prompt}”"] if prompt else []
    tokens = {
        token_name(provenance, position)
        for provenance, position in zip(provenances, positions, strict=False)
    }
    if len(tokens) == 1:
        places.append(f"token {tokens.pop()}")
    return "\n".join(
        filter(None, (subject, " · ".join(filter(None, (model, *places)))))
    )


def short_path(model: str) -> str:
    """Return the last two parts of a local model's path, and other names as they are.

    Of a GGUF file the name is left without its ending. The random name of a temporary
    folder says nothing and is left out.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    # A name on a hub has at most an owner before it.
    if not path.is_absolute() and len(path.parts) <= 2:
        return model
    # Folders of `tempfile` are called tmp and some random letters.
    is_temporary = path.parent.parent == Path(tempfile.gettempdir())
    if is_temporary and path.parent.name.startswith("tmp"):
        return path.name
    return "/".join(path.parts[-2:])


def short_names(models: Sequence[str]) -> list[str]:
    """Return names without organisation or folder, where they stay different."""
    last_parts = [model.rsplit("/", 1)[-1] for model in models]
    return [
        last_part if last_parts.count(last_part) == 1 else model
        for model, last_part in zip(models, last_parts, strict=True)
    ]


def entitle(drawn: Axes | Figure | SubFigure, text: str) -> None:
    """Set a `Title` that is not read as mathematics; none in the style of papers.

    Its first line is what is seen. What it is of follows in one line, or as many as it
    takes.
    """
    if _SURROUNDINGS.get().paper_width is not None:
        return
    first, *rest = plain(text).split("\n")
    # An inch has about thirteen characters of 10 points, fifteen of 8 points, and
    # eighteen of 7 points.
    # Words that have no room in the first line go on below.
    width = _width(drawn)
    head = first.split(" · ")
    while len(head) > 1 and len(" · ".join(head)) > 13 * width:
        rest.insert(0, head.pop())
    lines = [" · ".join(head)]
    root = drawn.get_figure(root=True)
    assert root is not None
    is_narrow = root.get_figwidth() <= PHONE_WIDTH
    room = int((15 if is_narrow else 18) * width)
    for part in " · ".join(rest).split(" · "):
        if len(lines) > 1 and len(lines[-1]) + len(part) + 3 <= room:
            lines[-1] += f" · {part}"
        else:
            lines += wrap(part, room)
    set_title = drawn.set_title if isinstance(drawn, Axes) else drawn.suptitle
    title = set_title("\n".join(lines), fontsize="medium", parse_math=False)
    # Matplotlib makes the text of a title itself.
    title.__class__ = Title
    if is_narrow:
        # Kept: where a figure is saved without its margins it has another width.
        cast(Title, title).size_of_rest = "small"


def untitle_for_print(ax: Axes) -> None:
    """Remove the title of Axes in the style of papers; elsewhere it stays."""
    if _SURROUNDINGS.get().paper_width is not None:
        ax.set_title("")


def _width(drawn: Axes | Figure | SubFigure) -> float:
    """Return the inches that a title may take."""
    if isinstance(drawn, Figure):
        return float(drawn.get_figwidth())
    if isinstance(drawn, SubFigure):
        return float(drawn.bbox.width / drawn.dpi)
    figure = drawn.get_figure(root=True)
    assert figure is not None
    width = float(figure.get_figwidth())
    is_alone = len(figure.axes) == 1
    # A colour bar, which comes later, moves the middle of Axes that are alone.
    return 0.8 * width if is_alone else drawn.get_position().width * width


def escape_dollars(name: str) -> str:
    """Escape dollars in a name that stands beside formulas."""
    return plain(name).replace("$", r"\$")


def plain_legend(
    drawn: Axes | Figure | SubFigure, *handles_and_labels: Any, **options: Any
) -> Legend:
    """Add a legend without a frame, whose names are not read as mathematics."""
    legend = drawn.legend(*handles_and_labels, frameon=False, **options)
    # `legend` takes no `parse_math`: it is set on each text.
    for text in legend.get_texts():
        text.set_text(plain(text.get_text()))
        text.set_parse_math(False)
    return legend


def legend_below(figure: Figure, *panels: Axes, ncols: int = 2) -> None:
    """Add one legend below all Axes of a figure, for what these panels name."""
    handles, names = [], []
    for ax in panels:
        more_handles, more_names = ax.get_legend_handles_labels()
        handles += more_handles
        names += more_names
    plain_legend(
        figure,
        handles,
        names,
        loc="outside lower center",
        ncols=ncols,
        fontsize="small",
    )


def finish_lines(ax: Axes, title: str, **legend: Any) -> None:
    """Set whole numbers below, a title above, and a legend."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    entitle(ax, title)
    plain_legend(ax, **legend)
