"""All comparisons of one traced prompt at once: what a report is measured from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import checked
from tl_coupling.comparisons import CouplingMap, context_coupling, depth_coupling, neighbours, self_coupling
from tl_coupling.coupling import Orientation
from tl_coupling.influence import Influence, cross_token_influence
from tl_coupling.jacobians import Progress
from tl_coupling.trajectories import entropy_by_depth


@dataclass(frozen=True, eq=False)
class Portrait:
    """What a traced prompt shows: coupling across depth and tokens, influence, entropy.

    Attributes:
        trace: the traced prompt.
        ks: numbers of top singular vectors, smallest first; `depth` holds the largest, the token maps the smallest.
        position: the token measured across depth, the output of the influences, and the fixed output.
        input_position: the fixed input.
        depth: coupling across depth.
        tokens: coupling across tokens at one pair of layers, by name: "self", "fixed input" and "fixed output"; without
            those where fewer than two tokens vary.
        influence: of every token on the measured one, at every layer.
        entropy: of the logit lens in nats, `[n_layers+1 n_pos]`.
    """

    trace: Trace
    ks: tuple[int, ...]
    position: int
    input_position: int
    depth: CouplingMap
    tokens: dict[str, CouplingMap]
    influence: Influence
    entropy: Float[Tensor, "n_layers_plus_1 n_pos"]


@checked
def portrait(
    trace: Trace,
    *,
    k: Sequence[int] = (10, 30, 50),
    position: int = -1,
    layer: int | None = None,
    other_layer: int | None = None,
    input_position: int = 0,
    orientation: Orientation = "ujv",
    progress: Progress | None = None,
) -> Portrait:
    """Coupling across depth and across tokens, influence and logit-lens entropy of one traced prompt.

    It is what `html_report` draws.

    Args:
        trace: a traced prompt.
        k: how many top singular vectors; the token maps are made at the smallest of them, where coupling stands out
            most against random subspaces and a long prompt's pairs fit into memory.
        position: the token whose coupling across depth and whose influences are measured, and the fixed output.
        layer, other_layer: of J_1 and of the singular vectors in the token maps. By default neighbours: the two layers
            in the middle, or the one given and the one after (before) it.
        input_position: the fixed input.
        orientation: `"ujv"` (the paper's) or `"vju"`.
        progress: wraps every loop over layers or positions.

    Raises:
        ValueError: no k, k outside `[1, d_model]`, a layer or position out of range, a model without unembedding.

    Cost: `depth_coupling`, one `self_coupling`, two `context_coupling` and `cross_token_influence`: for n tokens and L
    layers about `L + 6 n + L n` Jacobians.

    Example:
        >>> measured = tlc.portrait(trace, k=(4, 8))
        >>> measured.depth.k, measured.tokens["self"].k
        (8, 4)
    """
    ks = tuple(sorted(set(k)))
    if not ks:
        raise ValueError("`k` is empty: wanted at least one number of singular vectors")
    held_output, held_input = trace.position_index(position), trace.position_index(input_position, "input_position")
    pair = neighbours(trace, layer, other_layer)
    given: dict[str, Any] = {"orientation": orientation, "progress": progress}
    depth = depth_coupling(trace, ks[-1], position, **given)
    given |= {"k": ks[0]}
    tokens = {}
    if trace.n_pos > 1:
        tokens["self"] = self_coupling(trace, *pair, **given)
    if trace.n_pos - held_input > 1:
        tokens["fixed input"] = context_coupling(trace, *pair, fixed="input", position=held_input, **given)
    if held_output > 0:
        tokens["fixed output"] = context_coupling(trace, *pair, fixed="output", position=held_output, **given)
    return Portrait(
        trace=trace,
        ks=ks,
        position=held_output,
        input_position=held_input,
        depth=depth,
        tokens=tokens,
        influence=cross_token_influence(trace, position, progress=progress),
        entropy=entropy_by_depth(trace),
    )
