"""Which connections are compared: those of which layers and tokens."""

from collections.abc import Sequence
from typing import Literal

from tl_coupling.arguments import checked
from tl_coupling.blocks import Trace
from tl_coupling.jacobians import Connection


def free_end(trace: Trace, fixed: Literal["input", "output"], position: int) -> range:
    """Return the tokens on which a fixed input acts, or which act on a fixed output."""
    # Where attention reads both ways every token acts on every other.
    if not trace.is_causal:
        return range(trace.n_pos)
    if fixed == "input":
        return range(position, trace.n_pos)
    return range(position + 1)


@checked
def layer_pair(
    trace: Trace, layer: int | None = None, other_layer: int | None = None
) -> tuple[int, int]:
    """Return two layers to compare tokens at.

    They are those that are given, or the one that is given and the next, or the two in
    the middle.

    Args:
        trace: a traced prompt.
        layer: the first; the one before the second by default.
        other_layer: the second; the one after the first by default.

    Raises:
        ValueError: a layer out of range.

    Example:
        >>> tlc.comparisons.layer_pair(trace), tlc.comparisons.layer_pair(trace, layer=1)
        ((0, 1), (1, 1))
    """
    # The middle of the depth, unless the caller says where.
    second = trace.n_layers // 2
    if other_layer is not None:
        second = trace.layer_index(other_layer, "other_layer")
    # The first layer has none before it, and is compared with itself.
    first = max(0, second - 1)
    if layer is not None:
        first = trace.layer_index(layer)
    if other_layer is None:
        # The last layer has none behind it.
        second = min(first + 1, trace.n_layers - 1)
    return first, second


def layer_connections(
    trace: Trace, layer: int, other_layer: int | None, ends: list[tuple[int, int, int]]
) -> list[list[Connection]]:
    """Return the same tokens' connections at each of two layers.

    `ends` are the input, the output, and the token that names the connection.
    """
    first = trace.layer_index(layer)
    second = trace.layer_index(
        layer if other_layer is None else other_layer, "other_layer"
    )
    return [
        [Connection(index, *tokens) for tokens in ends] for index in (first, second)
    ]


def chosen_positions(
    trace: Trace, positions: Sequence[int] | None, allowed: range, subject: str
) -> list[int]:
    """Return the tokens that are selected, counted from 0, or all that are allowed.

    `subject` names what they are for in an error.

    Raises:
        ValueError: a token that is not allowed or comes twice, or fewer than two.
    """
    if positions is None:
        selected = list(allowed)
    else:
        # Negative positions are counted from 0 before they are compared.
        selected = [trace.position_index(t, "positions") for t in positions]
    if forbidden := [t for t in selected if t not in allowed]:
        raise ValueError(
            f"`positions` of {subject} must lie in [{allowed[0]}, {allowed[-1]}], where "
            f"causality lets tokens act on each other; got {forbidden}"
        )
    if len(set(selected)) < len(selected):
        raise ValueError(f"`positions` must name each token once, got {selected}")
    if len(selected) >= 2:
        return selected
    if positions is None:
        raise ValueError(
            f"{subject} compares at least two tokens, here there is {len(selected)}: "
            "use a longer prompt"
        )
    raise ValueError(
        f"`positions` of {subject} must name at least two tokens, got {selected}"
    )
