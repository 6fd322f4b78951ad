"""Which connections are compared: layers, tokens, and how many singular vectors of
each.
"""

from collections.abc import Sequence
from typing import Literal

from tl_coupling.arguments import checked
from tl_coupling.jacobians import Connection
from tl_coupling.traces import Trace


def free_end(trace: Trace, fixed: Literal["input", "output"], position: int) -> range:
    """The tokens on which a fixed input acts, or which act on a fixed output."""
    if not trace.is_causal:
        return range(trace.n_pos)
    return range(position, trace.n_pos) if fixed == "input" else range(position + 1)


@checked
def neighbours(
    trace: Trace, layer: int | None = None, other_layer: int | None = None
) -> tuple[int, int]:
    """Two layers to compare tokens at: those given, or neighbours of the one given, or
    the two in the middle.

    Example:
        >>> tlc.comparisons.neighbours(trace), tlc.comparisons.neighbours(trace, layer=1)
        ((0, 1), (1, 1))
    """
    other = (
        None if other_layer is None else trace.layer_index(other_layer, "other_layer")
    )
    second = trace.n_layers // 2 if other is None else other
    first = max(0, second - 1) if layer is None else trace.layer_index(layer)
    return first, min(first + 1, trace.n_layers - 1) if other is None else other


def chosen_layers(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    """The chosen layers, counted from 0, or all."""
    chosen = [
        trace.layer_index(layer)
        for layer in (range(trace.n_layers) if layers is None else layers)
    ]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer")
    return chosen


def at_both_layers(
    trace: Trace, layer: int, other_layer: int | None, ends: list[tuple[int, int, int]]
) -> list[list[Connection]]:
    """The same tokens' connections at both layers; `ends` are input, output, and the
    one that names the connection.
    """
    layers = (
        trace.layer_index(layer),
        trace.layer_index(layer if other_layer is None else other_layer, "other_layer"),
    )
    return [[Connection(one, *tokens) for tokens in ends] for one in layers]


def chosen_positions(
    trace: Trace, positions: Sequence[int] | None, allowed: range, what: str
) -> list[int]:
    """The chosen tokens, counted from 0, or all; each once, at least two, and none that
    is not allowed.
    """
    chosen = (
        list(allowed)
        if positions is None
        else [trace.position_index(t, "positions") for t in positions]
    )
    if forbidden := [t for t in chosen if t not in allowed]:
        raise ValueError(
            f"`positions` of {what} must lie in [{allowed[0]}, {allowed[-1]}], where causality lets tokens act on each "
            f"other; got {forbidden}"
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"`positions` must name each token once, got {chosen}")
    if len(chosen) < 2:
        raise ValueError(
            f"{what} compares at least two tokens, here there is {len(chosen)}: use a longer prompt"
            if positions is None
            else f"`positions` of {what} must name at least two tokens, got {chosen}"
        )
    return chosen
