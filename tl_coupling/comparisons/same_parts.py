"""How far one part of the blocks, such as their MLPs, is coupled with itself across depth."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import Text, checked
from tl_coupling.blocks import Trace
from tl_coupling.comparisons.jacobian_coupling import jacobian_coupling
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.jacobians import BlockParts, block_parts, chosen_layers
from tl_coupling.measures import Orientation
from tl_coupling.progress import Progress, with_progress


@checked
def part_coupling(
    trace: Trace,
    part: Text = "mlp_out",
    k: int | None = None,
    position: int = -1,
    orientation: Orientation = "ujv",
    *,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> CouplingMap:
    """Couple one part of every block with the same part of every other.

    `depth_coupling` of the part's own Jacobians: whether MLPs share axes with MLPs, and
    attention with attention, whatever they do to each other. The null is that of any
    `CouplingMap`; an untrained twin is measured in the same way.

    Args:
        trace: a traced prompt.
        part: "mlp_out", "attn_out" (all heads of a block together), "mlp∘attn", or a
            head of each block, "H3"; see `block_parts`.
        k: as in `depth_coupling`.
        position: as there.
        orientation: as there.
        layers: the blocks; all by default.
        progress: as there.

    Raises:
        ValueError: a part that a block does not have, k, a layer or a position out of
            range, a block without parts that can be told apart.

    Warns as `depth_coupling`, of a head also where k is above its rank.

    Cost: as `block_parts` of every layer; then as `depth_coupling`.

    Example:
        >>> mlps = tlc.comparisons.part_coupling(trace, "mlp_out", k=4)
        >>> mlps.coupling(4).shape
        torch.Size([2, 2])
    """
    t = trace.position_index(position)
    selected_layers = chosen_layers(trace, layers)
    J = [
        _part_jacobian(block_parts(trace, layer, t, function="branches"), part)
        for layer in with_progress(selected_layers, progress, f"{part} of blocks")
    ]
    return jacobian_coupling(
        torch.stack(J),
        k,
        orientation,
        layers=selected_layers,
        position=t,
        provenance=trace.provenance | {"part": part},
    )


def _part_jacobian(parts: BlockParts, part: str) -> Float[Tensor, "d_model d_model"]:
    """Return the Jacobian of one part; raise ValueError where there is none."""
    layer = parts.layer
    labels = {label: _component_name(label, layer) for label in parts.labels}
    # All heads together; a block whose heads cannot be told apart has it whole.
    if part == "attn_out":
        chosen = [
            label
            for label, name in labels.items()
            if name == "attn_out" or name.startswith("H")
        ]
    else:
        chosen = [label for label, name in labels.items() if name == part]
    if not chosen:
        names = ", ".join(dict.fromkeys(["attn_out", *labels.values()]))
        raise ValueError(
            f"`part` must be a part of every block, got {part!r}: layer {layer} has "
            f"{names}"
        )
    # Parts add up: the Jacobian of several is the sum of theirs.
    return torch.stack([parts[label] for label in chosen]).sum(0)


def _component_name(label: str, layer: int) -> str:
    """Return what a component is called in any layer: "L9H3" is "H3"."""
    return label.removeprefix(f"L{layer}").removeprefix(f"{layer}_")
