"""All comparisons of one traced prompt at once: what a report is made from, and the
part across tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.comparisons import (
    CouplingMap,
    context_coupling,
    depth_coupling,
    free_end,
    neighbours,
    self_coupling,
)
from tl_coupling.influence import Influence, cross_token_influence
from tl_coupling.measures import Orientation
from tl_coupling.progress import Progress
from tl_coupling.spectra import DEFAULT_K, fitting_k
from tl_coupling.traces import Trace
from tl_coupling.trajectories import TrajectoryResult, measure_trajectory

__all__ = ["Portrait", "TokenPortrait", "portrait", "token_portrait"]

TokenMap = Literal["self", "fixed input", "fixed output"]
TOKEN_MAPS: tuple[TokenMap, ...] = get_args(TokenMap)


@dataclass(frozen=True, eq=False)
class TokenPortrait:
    """What a traced prompt shows across its tokens: coupling at one pair of layers,
    influence on one token at each.

    `maps` are named "self", "fixed input" and "fixed output".

    Example:
        >>> measured = tlc.portraits.token_portrait(trace, k=4, maps=["self"])
        >>> measured.maps["self"].coupling().shape, measured.influence.frobenius_norm.shape
        (torch.Size([8, 8]), torch.Size([2, 8]))
    """

    maps: dict[TokenMap, CouplingMap]
    influence: Influence

    def __repr__(self) -> str:
        maps = ", ".join(f"{name} (k≤{result.k})" for name, result in self.maps.items())
        return f"TokenPortrait({self.influence.provenance['model']!r}, maps: {maps}, {self.influence!r})"


@made_by("portrait(trace)")
@dataclass(frozen=True, eq=False)
class Portrait:
    """Hold what a traced prompt shows: coupling, influence and trajectories.

    Attributes:
        ks: numbers of top singular vectors, smallest first; `depth` holds the largest,
            `tokens` the smallest.
        position: the token measured across depth, the output of the influences, and the
            fixed output.
        input_position: the fixed input.
        tokens: as `TokenPortrait.maps`, without those where fewer than two tokens vary.
        trajectory: the shapes of all tokens' paths and the entropy of the logit lens,
            as `measure_trajectory` gives them without predictions and noise. Plots and
            the report read them from here, so that neither runs the model.

    Example:
        >>> measured = tlc.portrait(trace, k=(4, 8))
        >>> measured.ks, measured.depth.coupling(8).shape, list(measured.tokens)
        ((4, 8), torch.Size([2, 2]), ['self', 'fixed input', 'fixed output'])
    """

    trace: Trace
    ks: tuple[int, ...]
    position: int
    input_position: int
    depth: CouplingMap
    tokens: dict[TokenMap, CouplingMap]
    influence: Influence
    trajectory: TrajectoryResult

    @property
    def entropy(self) -> Float[Tensor, "n_layers_plus_1 n_pos"] | None:
        """Entropy of the logit lens in nats; `None` for a model without logits."""
        return self.trajectory.logit_lens_entropy

    def __repr__(self) -> str:
        of, maps = (
            f"{self.trace.provenance['model']!r}, {self.trace.n_pos} tokens",
            ", ".join(["depth", *self.tokens]),
        )
        where = f"position={self.position}, input_position={self.input_position}"
        return f"Portrait({of}, k={list(self.ks)}, {where}, maps: {maps})"


@checked
def token_portrait(
    trace: Trace,
    layer: int | None = None,
    other_layer: int | None = None,
    *,
    k: int | None = None,
    position: int = -1,
    input_position: int = 0,
    positions: Sequence[int] | None = None,
    maps: Sequence[TokenMap] = TOKEN_MAPS,
    orientation: Orientation = "ujv",
    progress: Progress | None = None,
) -> TokenPortrait:
    """Coupling across the tokens of a prompt at one pair of layers, and their influence
    on one token at every layer.

    Args:
        layer, other_layer: of J_1 and of the singular vectors. Neighbours by default:
            the one given and the next, or the two in the middle.
        position: the fixed output, and the token whose influences are measured.
        input_position: the fixed input.
        positions: which tokens, in this order, all by default; context maps compare
            those that causality allows.
        maps: which maps to make.
        k, orientation, progress: as in `depth_coupling`.

    Raises as `self_coupling` and `context_coupling`. Cost: with all maps about `6 n + L
    n` Jacobians for n tokens and L layers.

    Example:
        >>> measured = tlc.portraits.token_portrait(trace, k=4, position=3)
        >>> {name: len(result.row_positions) for name, result in measured.maps.items()}
        {'self': 8, 'fixed input': 8, 'fixed output': 4}
    """
    ends = {
        "input": trace.position_index(input_position, "input_position"),
        "output": trace.position_index(position),
    }
    allowed = {
        "input": free_end(trace, "input", ends["input"]),
        "output": free_end(trace, "output", ends["output"]),
    }
    pair = neighbours(trace, layer, other_layer)
    chosen = (
        None
        if positions is None
        else [trace.position_index(t, "positions") for t in positions]
    )
    given: dict[str, Any] = {
        "k": fitting_k(k, trace.d_model),
        "orientation": orientation,
        "progress": progress,
    }
    found: dict[TokenMap, CouplingMap] = {}
    # The cheap ones first, so that wrong arguments are reported before the long work.
    for name in sorted(set(maps), key=TOKEN_MAPS.index, reverse=True):
        end: Any = name.removeprefix("fixed ")
        if end == "self":
            found[name] = self_coupling(trace, *pair, positions=chosen, **given)
        else:
            free = None if chosen is None else [t for t in chosen if t in allowed[end]]
            found[name] = context_coupling(
                trace, *pair, fixed=end, position=ends[end], positions=free, **given
            )
    influence = cross_token_influence(trace, position, progress=progress)
    return TokenPortrait(dict(reversed(found.items())), influence)


@checked
def portrait(
    trace: Trace,
    *,
    k: Sequence[int] | None = None,
    position: int = -1,
    layer: int | None = None,
    other_layer: int | None = None,
    input_position: int = 0,
    orientation: Orientation = "ujv",
    progress: Progress | None = None,
) -> Portrait:
    """What `write_report` draws of a prompt: coupling across depth and tokens,
    influence and logit-lens entropy.

    Args:
        k: how many top singular vectors: 10, 30 and 50 by default, or what fits a
            narrower model. Token maps are made at the smallest, where coupling stands
            out most and the pairs of a long prompt fit into memory.
        position: the token whose coupling across depth and whose influences are
            measured, and the fixed output.
        layer, other_layer, input_position, orientation, progress: as in
            `token_portrait`.

    Raises ValueError for no k, k outside `[1, d_model]`, a layer or position out of
    range. Warns where the model has no logits. Cost: `depth_coupling` and
    `token_portrait`.

    Example:
        >>> measured = tlc.portrait(trace, k=(4, 8))
        >>> measured.depth.k, measured.tokens["self"].k
        (8, 4)
    """
    if k is None:
        largest = fitting_k(None, trace.d_model)
        k = [min(one, largest) for one in (10, 30, DEFAULT_K)]
    if not (ks := tuple(sorted(set(k)))):
        raise ValueError("`k` is empty: wanted at least one number of singular vectors")
    output, fixed = (
        trace.position_index(position),
        trace.position_index(input_position, "input_position"),
    )
    n_varying = {
        "fixed input": len(free_end(trace, "input", fixed)),
        "fixed output": len(free_end(trace, "output", output)),
    }
    maps = [name for name in TOKEN_MAPS if n_varying.get(name, trace.n_pos) > 1]
    given: dict[str, Any] = {
        "position": position,
        "orientation": orientation,
        "progress": progress,
    }
    pair = neighbours(trace, layer, other_layer)
    depth = depth_coupling(trace, ks[-1], **given)
    tokens = token_portrait(
        trace, *pair, k=ks[0], input_position=input_position, maps=maps, **given
    )
    return Portrait(
        trace,
        ks,
        output,
        fixed,
        depth,
        tokens.maps,
        tokens.influence,
        measure_trajectory(trace, position=output, linear=False, noise=False),
    )
