"""All that is measured of one traced prompt: what a report is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.blocks import Trace
from tl_coupling.comparisons import (
    Carriers,
    CouplingMap,
    carriers,
    context_coupling,
    depth_coupling,
    free_end,
    layer_pair,
    self_coupling,
)
from tl_coupling.directions import Decoded, decode
from tl_coupling.dynamics import Products, products
from tl_coupling.influence import Influence, cross_token_influence
from tl_coupling.jacobians import Connection, caching_trace
from tl_coupling.measures import Orientation
from tl_coupling.progress import JoinedLoops, Progress
from tl_coupling.spectra import DEFAULT_K, fitting_k
from tl_coupling.trajectories import TrajectoryResult, measure_trajectory

__all__ = ["Portrait", "TokenPortrait", "portrait", "token_portrait"]
__dir__ = __all__.copy

End = Literal["input", "output"]
TokenMap = Literal["self", "fixed input", "fixed output"]
TOKEN_MAPS: tuple[TokenMap, ...] = get_args(TokenMap)
# As many directions as a page has room for.
_N_DECODED = 6
# What bars go by: the time that each part takes, in that of one Jacobian of an influence
# with its singular values. Measured with SmolLM2-135M on one core, at 11 and at 67
# tokens, where such a Jacobian takes 20 ms. For a token:
_TOKEN_STEPS: dict[TokenMap, int] = {"self": 5, "fixed input": 7, "fixed output": 3}
# For a block: its Jacobian and the SVD; the Jacobians of its components, coupled with
# those of all blocks; the Jacobian alone; the SVDs of products; a draw of all of these.
_DEPTH_STEPS = 3
_COMPONENT_STEPS = 6
_JACOBIAN_STEPS = 2
_PRODUCT_STEPS = 5
_DRAW_STEPS = 12
# Of decoding, most of whose time goes into logits: at most, and the width from which on
# they take less than that. A Jacobian takes d³, the logits d times the vocabulary.
_DECODING_STEPS = 250
_DECODING_WIDTH = 576
# Tokens at a layer, of which the lens and the shapes of paths take one step.
_TOKENS_PER_STEP = 10


@dataclass(frozen=True, eq=False)
class TokenPortrait:
    """Hold what a traced prompt shows across its tokens.

    Attributes:
        maps: coupling at one pair of layers, by name: "self", "fixed input" and "fixed
            output".
        influence: of all tokens on one token, at each layer.

    Example:
        >>> measured = tlc.portraits.token_portrait(trace, k=4, maps=["self"])
        >>> measured.maps["self"].coupling().shape
        torch.Size([8, 8])
        >>> measured.influence.frobenius_norm.shape
        torch.Size([2, 8])
    """

    maps: dict[TokenMap, CouplingMap]
    influence: Influence

    def __repr__(self) -> str:
        maps = ", ".join(f"{name} (k≤{result.k})" for name, result in self.maps.items())
        return (
            f"TokenPortrait({self.influence.provenance['model']!r}, "
            f"maps: {maps}, {self.influence!r})"
        )


@made_by("portrait(trace)")
@dataclass(frozen=True, eq=False)
class Portrait:
    """Hold what a traced prompt shows: coupling, influence and trajectories.

    Attributes:
        trace: the traced prompt.
        ks: numbers of top singular vectors, smallest first; `depth` holds the largest,
            `tokens` the smallest.
        position: the token measured across depth, the output of the influences, and the
            fixed output.
        input_position: the fixed input.
        depth: coupling across depth, at the largest k.
        tokens: as `TokenPortrait.maps`, without those where fewer than two tokens vary.
        influence: of all tokens on the one at `position`, at each layer.
        trajectory: the shapes of all tokens' paths and the entropy of the logit lens,
            as `measure_trajectory` gives them without predictions and noise. Plots and
            the report read them from here, so that neither runs the model.
        carriers, products, decoded: what carries coupling, what the blocks do together,
            and the tokens of a block's directions; `None` unless asked for.

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
    carriers: Carriers | None = None
    products: Products | None = None
    decoded: Decoded | None = None

    @property
    def entropy(self) -> Float[Tensor, "n_layers_plus_1 n_pos"] | None:
        """Entropy of the logit lens in nats; `None` for a model without logits."""
        return self.trajectory.logit_lens_entropy

    def __repr__(self) -> str:
        maps = ", ".join(["depth", *self.tokens])
        return (
            f"Portrait({self.trace.provenance['model']!r}, {self.trace.n_pos} tokens, "
            f"k={list(self.ks)}, position={self.position}, "
            f"input_position={self.input_position}, maps: {maps})"
        )


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
    """Measure a prompt across its tokens: coupling at two layers, influence at all.

    Args:
        trace: a traced prompt.
        layer: of J_1. Neighbours are compared by default: the layer that is given and
            the next, or the two in the middle.
        other_layer: of the singular vectors.
        k: how many top singular vectors, as in `depth_coupling`.
        position: the fixed output, and the token whose influences are measured.
        input_position: the fixed input.
        positions: which tokens, in this order, all by default; context maps compare
            those that causality allows.
        maps: which maps to make.
        orientation: as in `depth_coupling`.
        progress: as in `depth_coupling`; one loop over all the work, in steps of about
            the same time.

    Raises:
        ValueError: as `self_coupling` and `context_coupling`.

    Cost: with all maps about `6 n + L n` Jacobians for n tokens and L layers.

    Example:
        >>> measured = tlc.portraits.token_portrait(trace, k=4, position=3)
        >>> {name: len(result.row_positions) for name, result in measured.maps.items()}
        {'self': 8, 'fixed input': 8, 'fixed output': 4}
    """
    t = trace.position_index(position)
    ends: dict[End, int] = {
        "input": trace.position_index(input_position, "input_position"),
        "output": t,
    }
    # Which tokens may vary where an end is fixed: in a causal model an output does not
    # depend on later inputs.
    allowed = {end: free_end(trace, end, fixed) for end, fixed in ends.items()}
    layer, other_layer = layer_pair(trace, layer, other_layer)
    selected: list[int] | None = None
    if positions is not None:
        selected = [trace.position_index(t, "positions") for t in positions]
    k = fitting_k(k, trace.d_model)
    # Only Jacobians that are read again are kept: those of all tokens would not fit
    # into memory.
    trace = caching_trace(trace, _read_again(trace, maps, (layer, other_layer), ends))

    # The cheap ones first, so that wrong arguments are reported before the long work.
    names = [name for name in reversed(TOKEN_MAPS) if name in maps]
    work = _token_work(trace, names, t)

    def map_of(name: TokenMap, progress: Progress) -> CouplingMap:
        """Return one map."""
        if name == "self":
            return self_coupling(
                trace,
                layer,
                other_layer,
                positions=selected,
                k=k,
                orientation=orientation,
                progress=progress,
            )
        end: End = "input" if name == "fixed input" else "output"
        free = selected
        if selected is not None:
            free = [t for t in selected if t in allowed[end]]
        return context_coupling(
            trace,
            layer,
            other_layer,
            fixed=end,
            position=ends[end],
            positions=free,
            k=k,
            orientation=orientation,
            progress=progress,
        )

    with JoinedLoops(work, progress, "across tokens") as loops:
        measured = {name: map_of(name, loops.part(name)) for name in names}
        influence = cross_token_influence(trace, t, progress=loops.part("influence"))
    ordered_maps = {name: measured[name] for name in TOKEN_MAPS if name in measured}
    return TokenPortrait(ordered_maps, influence)


def _token_work(
    trace: Trace, maps: Sequence[TokenMap], output_position: int
) -> dict[str, list[int]]:
    """Return the steps of each loop of a portrait of tokens, for `JoinedLoops`."""
    work = {str(name): [_TOKEN_STEPS[name] * trace.n_pos] for name in maps}
    n_sources = len(free_end(trace, "output", output_position))
    work["influence"] = [trace.n_layers * n_sources]
    return work


def _read_again(
    trace: Trace,
    maps: Sequence[TokenMap],
    layers: tuple[int, int],
    ends: Mapping[End, int],
) -> set[Connection]:
    """Return the connections whose Jacobians more than one part of a portrait reads.

    The influences read all that the map of a fixed output reads; the three maps share
    what the fixed tokens do to themselves, and the map across depth what the measured
    token does to itself.
    """
    # The fixed input and the fixed output.
    t1 = ends["input"]
    t2 = ends["output"]
    shared: set[Connection] = set()
    for layer in layers:
        shared.add(Connection(layer, t1, t1, t1))
        shared.add(Connection(layer, t2, t2, t2))
        if "fixed output" in maps:
            sources = free_end(trace, "output", t2)
            # From every source to the output: the influences read them at each layer.
            shared.update(Connection(layer, t, t2, t) for t in sources)
    return shared


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
    with_carriers: bool = False,
    with_products: bool = False,
    decoded_layer: int | None = None,
    progress: Progress | None = None,
) -> Portrait:
    """Measure what `write_report` draws of a prompt: coupling, influence, trajectories.

    Args:
        trace: a traced prompt.
        k: how many top singular vectors: 10, 30 and 50 by default, or what fits a
            narrower model. Token maps are made at the smallest, where coupling stands
            out most and the pairs of a long prompt fit into memory.
        position: the token whose coupling across depth and whose influences are
            measured, and the fixed output.
        layer: of J_1 in the maps across tokens, as in `token_portrait`.
        other_layer: of their singular vectors.
        input_position: the fixed input.
        orientation: as in `depth_coupling`.
        with_carriers: also which heads and MLPs carry coupling, at the smallest k.
        with_products: also the products of blocks.
        decoded_layer: the block whose top singular vectors are decoded; none by
            default.
        progress: as in `token_portrait`: one loop over all the work.

    Raises:
        ValueError: no k, k outside `[1, d_model]`, a layer or position out of range; as
            `carriers`, `dynamics.products` and `directions.decode`.

    Warns where the model has no logits, and where a measure is undefined (NaN).

    Cost: `depth_coupling` and `token_portrait`, and those that are asked for.

    Example:
        >>> measured = tlc.portrait(trace, k=(4, 8))
        >>> measured.depth.k, measured.tokens["self"].k
        (8, 4)
    """
    if k is None:
        largest = fitting_k(None, trace.d_model)
        # The defaults of surveys, or what a narrower model has.
        k = [min(n_vectors, largest) for n_vectors in (10, 30, DEFAULT_K)]
    # Several of the defaults may be cut to the same number.
    ks = tuple(sorted(set(k)))
    if not ks:
        raise ValueError("`k` is empty: wanted at least one number of singular vectors")
    output = trace.position_index(position)
    fixed_input = trace.position_index(input_position, "input_position")
    layer, other_layer = layer_pair(trace, layer, other_layer)
    ends: dict[End, int] = {"input": fixed_input, "output": output}
    maps = _maps_that_vary(trace, ends)
    work = _portrait_work(
        trace, maps, output, with_carriers, with_products, decoded_layer
    )
    # The cheapest first: wrong arguments are reported before the long work.
    decoded = None
    carrying = None
    block_products = None
    with JoinedLoops(work, progress, "portrait") as loops:
        if decoded_layer is not None:
            n_decoded = min(_N_DECODED, trace.d_model)
            decoded = decode(trace, decoded_layer, n_decoded, position=output)
        if with_carriers:
            carrying = carriers(
                trace, ks[0], output, orientation, progress=loops.part("carriers")
            )
        if with_products:
            block_products = products(
                trace, position=output, progress=loops.part("products")
            )
        read_again = _read_again(trace, maps, (layer, other_layer), ends)
        cached = caching_trace(trace, read_again)
        depth = depth_coupling(
            cached,
            ks[-1],
            output,
            orientation=orientation,
            progress=loops.part("depth"),
        )
        token_maps = token_portrait(
            cached,
            layer,
            other_layer,
            k=ks[0],
            position=output,
            input_position=fixed_input,
            maps=maps,
            orientation=orientation,
            progress=loops.part("tokens"),
        )
        # Without predictions and noise, which a page does not show.
        trajectory = measure_trajectory(
            trace, position=output, linear=False, noise=False
        )
    return Portrait(
        trace=trace,
        ks=ks,
        position=output,
        input_position=fixed_input,
        depth=depth,
        tokens=token_maps.maps,
        influence=token_maps.influence,
        trajectory=trajectory,
        carriers=carrying,
        products=block_products,
        decoded=decoded,
    )


def _portrait_work(
    trace: Trace,
    maps: Sequence[TokenMap],
    output_position: int,
    with_carriers: bool,
    with_products: bool,
    decoded_layer: int | None,
) -> dict[str, list[int]]:
    """Return the steps of each loop of a portrait, for `JoinedLoops`."""
    n_layers = trace.n_layers
    work: dict[str, list[int]] = {}
    if decoded_layer is not None:
        n_later = n_layers - decoded_layer % n_layers
        narrowness = min(1.0, _DECODING_WIDTH / trace.d_model)
        logits = round(_DECODING_STEPS * narrowness**2)
        work["decoded"] = [logits + _JACOBIAN_STEPS * n_later]
    if with_carriers:
        work["carriers"] = [_DEPTH_STEPS * n_layers, _COMPONENT_STEPS * n_layers]
    if with_products:
        steps = (_JACOBIAN_STEPS, _PRODUCT_STEPS, _DRAW_STEPS)
        work["products"] = [n_steps * n_layers for n_steps in steps]
    work["depth"] = [_DEPTH_STEPS * n_layers]
    token_work = _token_work(trace, maps, output_position)
    work["tokens"] = [sum(sum(loops) for loops in token_work.values())]
    work["trajectory"] = [-(-trace.n_pos * n_layers // _TOKENS_PER_STEP)]
    return work


def _maps_that_vary(trace: Trace, ends: Mapping[End, int]) -> list[TokenMap]:
    """Return the maps that compare at least two tokens."""
    n_varying: dict[TokenMap, int] = {
        "self": trace.n_pos,
        "fixed input": len(free_end(trace, "input", ends["input"])),
        "fixed output": len(free_end(trace, "output", ends["output"])),
    }
    # A map of one token has no pair of different ones.
    return [name for name in TOKEN_MAPS if n_varying[name] > 1]
