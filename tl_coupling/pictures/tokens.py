"""Which tokens a picture of a prompt draws."""

from collections.abc import Mapping, Sequence

from tl_coupling.pictures import labels


def positions_to_draw(
    positions: Sequence[int] | None,
    n_pos: int,
    sinks: set[int],
    provenance: Mapping[str, object],
) -> tuple[list[int], str]:
    """Return the positions to draw, and what the title says of those left out.

    By default attention sinks are left out: their norms would set the scale.

    Raises:
        ValueError: a position out of range.
    """
    if positions is not None:
        if invalid_positions := [t for t in positions if not -n_pos <= t < n_pos]:
            raise ValueError(
                f"`positions` must lie in [{-n_pos}, {n_pos - 1}] for {n_pos} tokens, "
                f"got {invalid_positions[0]}"
            )
        # Sinks that were asked for are drawn.
        return [t % n_pos for t in positions], ""
    drawn = [t for t in range(n_pos) if t not in sinks]
    if not sinks:
        return drawn, ""
    names = ", ".join(labels.token_name(provenance, t) for t in sorted(sinks))
    plural = "s" if len(sinks) > 1 else ""
    return drawn, f"\nwithout attention sink{plural}: token {names}"
