"""Tokens' paths through the residual stream, in two dimensions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace
from tl_coupling.pictures import labels
from tl_coupling.pictures.tokens import positions_to_draw
from tl_coupling.trajectories import attention_sinks, trajectory_pca

# With more tokens, the legend would be higher than the picture: a colour bar instead.
_MAX_LEGEND_TOKENS = 16
# Small dots along a path: fewer do not show the order of layers, more hide the line.
_STEPS_BETWEEN_ENDS = 6
# Those of the first and of the last small dot, in square points; the large one at a
# path's end has 16.
_DOT_AREAS = (3.0, 11.0)

_Paths = Trace | Float[Tensor, "n_layers_plus_1 n_pos d_model"]
_View = Literal["all", "shallow", "deep"]


@checked
def plot_trajectories(
    trace: _Paths | Mapping[str, _Paths],
    *,
    views: Sequence[_View] = ("all", "shallow"),
    positions: Sequence[int] | None = None,
    black: int | None = -1,
    names: Sequence[str] | None = None,
    fig: Figure | SubFigure | None = None,
) -> Figure:
    """Draw tokens' paths in the two principal components of the last depth.

    The picture shows whether tokens leave on straight lines, and where they part. A
    ring is where a token enters the panel's layers, a dot is where it leaves them.
    Between them are small dots, at multiples of a sixth of the model's layers, rounded
    to whole ones; they grow with depth. One token is black. Both components have one
    scale in a panel. All panels show the same tokens. The components are fitted to the
    last depth alone, and the shares of variance are those of that depth.

    Paths of prompts are drawn in the same way: stack one token of each into
    `[n_layers+1 n_prompts d_model]`, and give their `names`.

    Args:
        trace: a traced prompt, or its residual stream `[n_layers+1 n_pos d_model]`, of
            a batch `stream[:, i]`; or several by name, of models or checkpoints: a
            row each.
        views: a panel for each: "all" depths, the "shallow" half of them, the "deep"
            half. Where streams grow, the deep half looks like all depths, and the
            shallow half is lost in them: these two are the default.
        positions: which tokens; by default all but the `attention_sinks` of any result,
            which the title names. With `names`, all.
        black: which token is drawn in black; the last by default; None for no token.
        names: what the legend calls the lines, a name for each of the `n_pos` positions
            of every stream; by default positions and tokens. Each named line ends in a
            shape of its own, in seven shapes, which print without colours.
        fig: the figure to draw in, or a part of one (`Figure.subfigures`); a new one by
            default.

    Returns the whole Figure; in the Axes of each view the lines are the tokens in their
    order, each followed by its marks. Of several, the Axes are by name, then by view.

    Raises:
        ValueError: an unknown view or none, a position out of range, fewer than two
            tokens, or not as many names as positions.

    Source: Aubry et al. 2025, figures 16 and 17.

    Example:
        >>> fig = tlc.plot_trajectories(trace, views=["all"])
        >>> several = {
        ...     "first": tlc.trace(model, "w1 w2 w3"),
        ...     "second": tlc.trace(model, "w4 w5 w6"),
        ... }
        >>> fig = tlc.plot_trajectories(several)

        The last token of several prompts:

        >>> prompts = ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]
        >>> paths = [tlc.trace(model, prompt).residual[:, -1] for prompt in prompts]
        >>> stream = torch.stack(paths, dim=1)
        >>> fig = tlc.plot_trajectories(stream, names=prompts, black=None)
    """
    if not views:
        raise ValueError("`views` is empty: wanted at least one")
    if isinstance(trace, Mapping) and not trace:
        raise ValueError("`trace` is empty: wanted at least one traced prompt")
    is_alone = not isinstance(trace, Mapping)
    paths_by_name = dict(trace) if isinstance(trace, Mapping) else {"": trace}

    # A row for each prompt, with its views side by side.
    n_rows = len(paths_by_name)
    fig = fig or labels.new_figure(labels.PHONE_WIDTH, 3.0 * n_rows + 1.2)
    grid = fig.subplots(n_rows, len(views), squeeze=False)

    # Several results show the same tokens: without what is a sink in one of them.
    # Named lines need not be tokens of one prompt: none of them is a sink.
    sinks = set[int]()
    if names is None:
        sinks = {
            position
            for paths in paths_by_name.values()
            for position in attention_sinks(_stream(paths))
        }
    left_out_by_name = []
    for (name, paths), panels in zip(paths_by_name.items(), grid, strict=True):
        # A position is no common token of prompts of different lengths.
        n_pos = _stream(paths).shape[1]
        own_sinks = {position for position in sinks if position < n_pos}
        # A short prompt may have too few other tokens.
        if names is None and n_pos - len(own_sinks) < 2:
            own_sinks = set(attention_sinks(_stream(paths)))
        shades, left_out = _draw_paths(
            panels, paths, views, positions, black, names, own_sinks
        )
        left_out_by_name.append(left_out)
        if not is_alone:
            title = f"{name}\n{panels[0].get_title()}"
            panels[0].set_title(title, fontsize="medium", parse_math=False)

    provenances = [_provenance(paths) for paths in paths_by_name.values()]
    if grid.size == 1:
        (panel,) = grid.flat
        # In print the caption says what the only panel shows. Its labels have room for
        # one line.
        labels.untitle_for_print(panel)
        panel.set_xlabel(panel.get_xlabel().replace("\n", " "))
        panel.set_ylabel(panel.get_ylabel().replace("\n", " "))
    _name_tokens(fig, grid, provenances, shades, black, names)
    if is_alone:
        depth = f"depth {len(_stream(paths_by_name[''])) - 1}"
        sinks_note = left_out_by_name[0]
    else:
        depth = "the last depth"
        sinks_note = "\nwithout attention sinks" * any(left_out_by_name)
    paths_title = "Paths of tokens" if names is None else "Paths"
    title = f"{paths_title}, in the principal components of {depth}{sinks_note}"
    labels.entitle(fig, labels.heading(title, provenances))
    whole = fig.get_figure(root=True)
    assert isinstance(whole, Figure)
    return whole


def _name_tokens(
    fig: Figure | SubFigure,
    grid: np.ndarray,
    provenances: Sequence[Mapping[str, Any]],
    shades: np.ndarray,
    black: int | None,
    names: Sequence[str] | None,
) -> None:
    """Add a legend of the tokens, or a colour bar of their positions.

    The legend is for few tokens that are the same in all columns: as many names as a
    long prompt has would be longer than the picture is high, and other tokenizers have
    other tokens. Names that are given are always in a legend.
    """
    token_lists = {tuple(p.get("str_tokens") or ()) for p in provenances}
    # Any panel has all tokens.
    lines, line_names = grid[-1, -1].get_legend_handles_labels()
    are_few = len(token_lists) == 1 and len(lines) <= _MAX_LEGEND_TOKENS
    if are_few or names is not None:
        labels.plain_legend(
            fig,
            lines,
            line_names,
            loc="outside lower center",
            ncols=2 * grid.shape[1],
            fontsize="small",
        )
        return
    n_pos = len(shades)
    bar_label = "token position"
    if black is not None:
        black_position = black % n_pos
        black_name = "the last" if black_position == n_pos - 1 else black_position
        bar_label += f" ({black_name}: black)"
    scale = ScalarMappable(Normalize(0, n_pos - 1), ListedColormap(shades))
    bar = fig.colorbar(scale, ax=grid, label=bar_label)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def _stream(paths: _Paths) -> Tensor:
    return paths.residual if isinstance(paths, Trace) else paths


def _provenance(paths: _Paths) -> dict[str, Any]:
    return paths.provenance if isinstance(paths, Trace) else {}


def _draw_paths(
    panels: np.ndarray,
    paths: _Paths,
    views: Sequence[_View],
    positions: Sequence[int] | None,
    black: int | None,
    names: Sequence[str] | None,
    sinks: set[int],
) -> tuple[np.ndarray, str]:
    """Draw the paths of one prompt's tokens, in a panel for each view.

    Returns the colours of all positions, and what the title says of tokens that are
    left out.
    """
    x = _stream(paths)
    provenance = _provenance(paths)
    n_layers = len(x) - 1
    n_pos = x.shape[1]
    drawn, left_out = positions_to_draw(positions, n_pos, sinks, provenance)
    if names is not None and len(names) != n_pos:
        raise ValueError(
            f"`names` must have one name for each of the {n_pos} positions, "
            f"got {len(names)}"
        )
    if black is not None and not -n_pos <= black < n_pos:
        raise ValueError(f"`black` must lie in [{-n_pos}, {n_pos - 1}], got {black}")
    if len(drawn) < 2:
        raise ValueError(
            "principal components want at least 2 tokens, "
            f"got positions {drawn}: give a longer prompt"
        )
    # Components of the drawn tokens alone: a sink's norm would decide them.
    pca = trajectory_pca(x[:, drawn])
    projected = pca.projected.detach().cpu().numpy()
    variance_shares = pca.explained_variance_ratio.tolist()
    spans = {
        "all": (0, n_layers),
        # In depths, both ends included; a model of one layer has one step to show.
        "shallow": (0, max(1, n_layers // 2)),
        "deep": (n_layers // 2, n_layers),
    }
    # The palest shades of the map are lost on white.
    shades = colormaps["viridis"](np.linspace(0, 0.9, n_pos))
    black_position = None if black is None else black % n_pos
    shapes = list(labels.MARKERS.values())
    # In layers, the same in all panels.
    step = max(1, round(n_layers / _STEPS_BETWEEN_ENDS))
    for ax, view in zip(panels, views, strict=True):
        first, last = spans[view]
        for i, position in enumerate(drawn):
            look = {"color": tuple(shades[position]), "zorder": 3}
            if position == black_position:
                look = {"color": "black", "zorder": 4}
            path = projected[first : last + 1, i]
            name = labels.token_name(provenance, position)
            end: dict[str, Any] = {"marker": "o", "markersize": 4}
            on_line: dict[str, Any] = {}
            if names is not None:
                name = names[position]
                end["marker"] = shapes[i % len(shapes)]
                # The legend has the marker of a line.
                on_line = {**end, "markevery": [len(path) - 1]}
            ax.plot(*path.T, linewidth=1.2, label=name, **on_line, **look)
            # A ring where the path begins, a dot where it ends.
            ax.plot(*path[0], "o", markerfacecolor="none", markersize=5, **look)
            ax.plot(*path[-1], linestyle="none", **end, **look)
            marked = path[step:-1:step]
            areas = np.linspace(*_DOT_AREAS, len(marked))
            ax.scatter(*marked.T, s=areas, linewidths=0, **look)
        ax.set_title(f"{view}: depth {first} to {last}", fontsize="medium")
        # Side by side, panels have no room for it in one line.
        depth = "of the last depth\n"
        first_share, second_share = variance_shares[:2]
        ax.set_xlabel(f"PC 1 {depth}({first_share:.0%} of variance)", fontsize="small")
        ax.set_ylabel(f"PC 2 {depth}({second_share:.0%})", fontsize="small")
        ax.tick_params(labelsize="small")
        ax.locator_params(nbins=4)
        # A step to the right and one upwards of the same length look the same.
        ax.set_aspect("equal", adjustable="datalim")
    return shades, left_out
