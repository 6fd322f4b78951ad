"""Directions in the residual stream, and interventions on them as TransformerLens hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import Count, checked, made_by, warn_caller
from tl_coupling.blocks import spliced_modules
from tl_coupling.directions.removals import Projection
from tl_coupling.jacobians import Connection, block_directions
from tl_coupling.models import weights_digest
from tl_coupling.saved import Saved
from tl_coupling.traces import Trace

Side = Literal["read", "write"]
HookFunction = Callable[..., Tensor]
# What `model.hooks(fwd_hooks=…)` takes a list of.
Hook = tuple[str, HookFunction]
Stream = Float[Tensor, "batch n_pos d_model"]
# Longer or shorter vectors are normalised, and that is said.
_LENGTH_TOLERANCE = 1e-3


def hook_point(layer: int, side: Side) -> str:
    """Return the hook point of what a block reads, or of what is there after it wrote."""
    connection = Connection(layer, 0, 0, 0)
    if side == "read":
        return connection.read_hook_point
    return connection.write_hook_point


@made_by("directions.directions_of(trace, layer)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Directions(Saved):
    """Unit directions in the residual stream of one model, with where they belong.

    Vectors of another length are normalised, with a warning.

    Attributes:
        vectors: `[direction d_model]`, of length 1.
        layer: the block that reads or writes them, from 0.
        side: "read", in the stream before the block; "write", in what it adds.
        provenance: of the model and the prompt; JSON-able. `hooks` refuses a model with
            other weights, where `weights_digest` is known.

    Raises:
        ValueError: a vector of length 0 or that is not finite.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=1, k=3)
        >>> directions
        Directions('local/tiny', 3 read directions at blocks.1.hook_resid_pre)
        >>> loaded = tlc.directions.Directions.load(directions[:1].save("v.nc"))
        >>> with model.hooks(fwd_hooks=loaded.hooks(model, scale=0.5)):
        ...     logits = model(trace.tokens[None])
    """

    vectors: Float[Tensor, "n_directions d_model"]
    layer: int
    side: Side
    provenance: dict[str, Any]
    DIMS: ClassVar = {"vectors": "direction d_model"}

    def __post_init__(self) -> None:
        """Normalise the vectors."""
        lengths = self.vectors.norm(dim=-1)
        if not bool(lengths.isfinite().all()) or not bool((lengths > 0).all()):
            raise ValueError(
                "`vectors` must be finite and not 0, got lengths from "
                f"{float(lengths.min()):g} to {float(lengths.max()):g}"
            )
        if bool(((lengths - 1).abs() > _LENGTH_TOLERANCE).any()):
            warn_caller(
                f"vectors of lengths {float(lengths.min()):.3g} to "
                f"{float(lengths.max()):.3g} were normalised: `scale` says how far they "
                "move the stream, as a share of its length"
            )
        object.__setattr__(self, "vectors", self.vectors / lengths[:, None])

    @property
    def hook_point(self) -> str:
        """TransformerLens's name of the place in the stream."""
        return hook_point(self.layer, self.side)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: slice) -> "Directions":
        """Return some of the directions, by a slice."""
        return Directions(self.vectors[index], self.layer, self.side, self.provenance)

    def hooks(
        self, model: nn.Module, scale: float, position: int | None = None
    ) -> list[Hook]:
        r"""Return hooks that add the directions to the stream.

        .. math:: h_t \leftarrow h_t + \varepsilon \|h_t\| \, v

        For `model.hooks(fwd_hooks=…)`, on a `TransformerBridge` or `HookedTransformer`,
        also around `model.generate`. One direction is added in every row of a batch; of
        several, the i-th in the i-th row of a batch of as many.

        Args:
            model: the model that the directions belong to.
            scale: ε, how far the stream is moved, as a share of its length; negative
                ones move it the other way.
            position: the token; every one by default.

        Raises:
            ValueError: a model with other weights.
        """
        check_belongs(self.provenance, model)
        return steering_hooks(self.vectors, scale, self.hook_point, position)

    def __repr__(self) -> str:
        plural = "" if len(self) == 1 else "s"
        return (
            f"Directions({self.provenance.get('model')!r}, {len(self)} {self.side} "
            f"direction{plural} at {self.hook_point})"
        )


@checked
def directions_of(
    trace: Trace,
    layer: int,
    k: Count = 10,
    side: Side = "read",
    position: int = -1,
) -> Directions:
    """Return the top k singular vectors of a block's Jacobian, to steer along.

    Args:
        trace: a traced prompt.
        layer: the block.
        k: how many, of the largest gains first.
        side: what the block reads (V) or writes (U).
        position: the token; the last by default.

    Raises:
        ValueError: a layer, position or k out of range.

    Cost: as `jacobians.block_directions`.

    Example:
        >>> tlc.directions.directions_of(trace, layer=0, k=2, side="write")
        Directions('local/tiny', 2 write directions at blocks.0.hook_resid_post)
    """
    found = block_directions(trace, layer, k, position)
    columns = found.read if side == "read" else found.write
    return Directions(columns.mT, found.layer, side, found.provenance)


def check_belongs(provenance: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError for a model whose weights are not those that were traced, or
    that lacks what was spliced into it.
    """
    present = spliced_modules(model)
    for name, module in provenance.get("spliced", {}).items():
        if present.get(name) != module:
            raise ValueError(
                f"these directions were made with a module spliced in at {name} "
                f"({module}), and this model has {present.get(name, 'none')} there: "
                "attach it again, or find the directions without it"
            )
    expected = provenance.get("weights_digest")
    if expected is None:
        return
    found = weights_digest(model)
    if found is not None and found != expected:
        raise ValueError(
            f"these directions belong to {provenance.get('model')!r}, and this model has "
            "other weights: find them again in the model that you change"
        )


def steering_hooks(
    vectors: Float[Tensor, "n_directions d_model"],
    scale: float,
    name: str,
    position: int | None,
) -> list[Hook]:
    """Return hooks that add `scale ‖h‖ v` to the stream, as `Directions.hooks` says."""

    def add(h: Stream, hook: object) -> Stream:
        at = slice(None) if position is None else [position]
        moved = h.clone()
        lengths = h[:, at].norm(dim=-1, keepdim=True)
        moved[:, at] += scale * lengths * vectors.to(h)[:, None]
        return moved

    return [(name, add)]


def removal_hooks(removal: Projection, layers: Sequence[int], side: Side) -> list[Hook]:
    """Return hooks that take something from what blocks read, or from what they write.

    On the read side the block reads `h − removal.of(h)`, and the stream keeps h. On the
    write side the stream gets `f − removal.of(f)`.
    """
    hooks: list[Hook] = []
    for layer in layers:
        hooks += _removal_hooks(removal, layer, side)
    return hooks


def _removal_hooks(removal: Projection, layer: int, side: Side) -> list[Hook]:
    # What the second hook needs of the first, in one pass of the block.
    kept: list[Tensor] = []

    def take_from_input(h: Stream, hook: object) -> Stream:
        taken = removal.of(h, layer)
        kept[:] = [taken]
        return h - taken

    def give_back(output: Stream, hook: object) -> Stream:
        return output + kept.pop()

    def keep_input(h: Stream, hook: object) -> Stream:
        # A copy: some blocks add to the stream in place.
        kept[:] = [h.clone()]
        return h

    def take_from_step(output: Stream, hook: object) -> Stream:
        return output - removal.of(output - kept.pop(), layer)

    before, after = (
        (take_from_input, give_back) if side == "read" else (keep_input, take_from_step)
    )
    return [(hook_point(layer, "read"), before), (hook_point(layer, "write"), after)]
