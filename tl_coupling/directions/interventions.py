"""Directions in the residual stream, and interventions on them as TransformerLens hooks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.arguments import (
    Count,
    Finite,
    at_least,
    checked,
    made_by,
    warn_caller,
)
from tl_coupling.blocks import Trace, spliced_modules
from tl_coupling.directions.projections import Projection
from tl_coupling.jacobians import Connection, block_directions
from tl_coupling.models import facts_of, weights_digest
from tl_coupling.results import Saved, tidy_table

if TYPE_CHECKING:
    import pandas

Side = Literal["read", "write"]
RotatedSide = Literal["read", "write", "both"]
HookFunction = Callable[..., Tensor]
# `model.hooks(fwd_hooks=…)` takes a list of these.
Hook = tuple[str, HookFunction]
Stream = Float[Tensor, "batch n_pos d_model"]
# Longer or shorter vectors are normalised, and that is said.
_LENGTH_TOLERANCE = 1e-3
# In units of rounding, how far from 1 the length of a vector is that was normalised:
# it stays as it is, so that what is loaded is what was saved.
_ROUNDING = 8
# Provenance of directions of one's own: that they are, and their name.
_OWN = ("own", "directions")


def hook_point(layer: int, side: Side) -> str:
    """Return the hook point of what a block reads, or of what is there after it wrote."""
    # Names of hook points are the same at all tokens.
    connection = Connection(layer, 0, 0, 0)
    if side == "read":
        return connection.read_hook_point
    return connection.write_hook_point


@made_by("directions.directions_of(trace, layer)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class Directions(Saved):
    """Unit directions in the residual stream of one model, with where they belong.

    Vectors of another length are normalised, with a warning; those of 16 bits become
    float32.

    Attributes:
        vectors: `[direction d_model]`, of length 1.
        layer: the block that reads or writes them, from 0.
        side: "read", in the stream before the block; "write", in what it adds.
        provenance: of the model and the prompt; JSON-able. `hooks` refuses a model with
            other weights, where `weights_digest` is known.

    Raises:
        ValueError: no vectors, one of length 0 or that is not finite, a negative layer.

    Example:
        >>> directions = tlc.directions.directions_of(trace, layer=1, k=3)
        >>> directions
        Directions('local/tiny', 3 read directions at blocks.1.hook_resid_pre)
        >>> loaded = tlc.directions.Directions.load(directions[:1].save("v.nc"))
        >>> with model.hooks(fwd_hooks=loaded.hooks(model, scale=0.5)):
        ...     logits = model(trace.tokens[None])
    """

    vectors: Float[Tensor, "n_directions d_model"]
    layer: Annotated[int, at_least(0)]
    side: Side
    provenance: dict[str, Any]
    DIMS: ClassVar = {"vectors": "direction d_model"}

    def __post_init__(self) -> None:
        """Normalise the vectors."""
        if 0 in self.vectors.shape:
            raise ValueError(
                "`vectors` must hold at least one direction, got shape "
                f"{list(self.vectors.shape)}"
            )
        vectors = self.vectors
        # In 16 bits a length of 1 cannot be held to the tolerance.
        if vectors.element_size() < torch.float32.itemsize:
            vectors = vectors.float()
        lengths = vectors.norm(dim=-1)
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
        rounding = _ROUNDING * torch.finfo(lengths.dtype).eps
        divisors = lengths.where((lengths - 1).abs() > rounding, 1.0)
        # The dataclass is frozen for its users: here it is still being made.
        object.__setattr__(self, "vectors", vectors / divisors[:, None])

    @classmethod
    @checked
    def of(
        cls,
        vectors: Float[Tensor, "n_directions d_model"],
        layer: int,
        side: Side = "write",
        name: str | None = None,
    ) -> "Directions":
        """Return directions of one's own: rows of an SAE's decoder, probes, singular
        vectors of weights.

        They are taken by `decode` and `steer`, with the controls that these have for
        all others, and by any model of their width. `name` is what results call them.

        Raises as the class, and TypeError for vectors that are no tensor or array of
        floating-point numbers.

        Example:
            >>> probes = torch.randn(2, 32)
            >>> probes = probes / probes.norm(dim=1, keepdim=True)
            >>> tlc.directions.Directions.of(probes, layer=1, name="probes")
            Directions('probes', 2 write directions at blocks.1.hook_resid_post)
        """
        return cls(
            vectors, layer, side, {"model": name, "own": True, "directions": name}
        )

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each direction and entry of the stream.

        Example:
            >>> table = tlc.directions.directions_of(trace, 1, k=3).to_dataframe()
            >>> list(table)[:3], len(table)
            (['direction', 'd_model', 'value'], 96)
        """
        columns = {"value": ("direction d_model", self.vectors)}
        table = tidy_table(columns, {}, self.provenance)
        return table.assign(hook_point=self.hook_point)

    @property
    def hook_point(self) -> str:
        """TransformerLens's name of the place in the stream."""
        return hook_point(self.layer, self.side)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: slice) -> "Directions":
        """Return some of the directions, by a slice."""
        return Directions(self.vectors[index], self.layer, self.side, self.provenance)

    @checked
    def hooks(
        self, model: nn.Module, scale: Finite, position: int | None = None
    ) -> list[Hook]:
        r"""Return hooks that add the directions to the stream.

        .. math:: h_t \leftarrow h_t + \varepsilon \|h_t\| \, v

        For `model.hooks(fwd_hooks=…)`, on a `TransformerBridge` or `HookedTransformer`,
        also around `model.generate`. One direction is added in every row of a batch; of
        several, the i-th in the i-th row of a batch of as many. A batch of another size,
        or too short for the position, is refused when the model is run.

        Args:
            model: the model that the directions belong to.
            scale: ε, how far the stream is moved, as a share of its length; negative
                ones move it the other way.
            position: the token; every one by default.

        Raises:
            ValueError: a model with other weights, of another width, without this layer
                or without hooks.
        """
        self.check_fits(model)
        return steering_hooks(self.vectors, scale, self.hook_point, position)

    def check_fits(self, model: nn.Module) -> None:
        """Raise ValueError for a model that these cannot be directions of."""
        check_takes_hooks(model)
        check_belongs(self.provenance, model)
        check_dimensions(model, self.vectors.shape[1], [self.layer])

    def _summary(self) -> str:
        plural = "" if len(self) == 1 else "s"
        return f"{len(self)} {self.side} direction{plural} at {self.hook_point}"


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


def own_facts(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return what results say of directions of one's own, which name no model; nothing
    for those that were found in one.
    """
    return {name: provenance[name] for name in _OWN if name in provenance}


def check_takes_hooks(model: nn.Module) -> None:
    """Raise ValueError for a model without TransformerLens's hooks."""
    if not hasattr(model, "hooks"):
        raise ValueError(
            "interventions need a TransformerBridge or a HookedTransformer, got "
            f"{type(model).__name__}: `load_model` makes one"
        )


def check_dimensions(model: Any, width: int, layers: Sequence[int]) -> None:
    """Raise ValueError for a model of another width, or without one of the layers."""
    d_model = model.cfg.d_model
    if width != d_model:
        raise ValueError(
            f"these directions have width {width}, and this model has width {d_model}: "
            "find them in the model that you change"
        )
    n_layers = model.cfg.n_layers
    if missing := [layer for layer in layers if layer >= n_layers]:
        raise ValueError(
            f"these directions are of layer {missing[0]}, and this model has "
            f"{n_layers} blocks: find them in the model that you change"
        )


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
    # The digest is not known of streamed models, nor of results of earlier versions.
    if expected is None:
        return
    made_of = facts_of(model).made_of
    models = [model] if made_of is None else [model, made_of.own_model]
    digests = [weights_digest(candidate) for candidate in models]
    if None not in digests and expected not in digests:
        raise ValueError(
            f"these directions belong to {provenance.get('model')!r}, and this model has "
            "other weights: find them again in the model that you change"
        )


def check_layers_differ(layers: Sequence[int]) -> None:
    """Raise ValueError where a layer is there twice."""
    if len(set(layers)) < len(layers):
        raise ValueError(f"`layers` must name each layer once, got {list(layers)}")


def steering_hooks(
    vectors: Float[Tensor, "n_directions d_model"],
    scale: float,
    name: str,
    position: int | None,
) -> list[Hook]:
    """Return hooks that add `scale ‖h‖ v` to the stream, as `Directions.hooks` says."""

    def add(h: Stream, hook: object) -> Stream:
        _check_batch(h, len(vectors), position)
        tokens = slice(None) if position is None else [position]
        # h itself belongs to the model, and is not written into.
        moved = h.clone()
        lengths = h[:, tokens].norm(dim=-1, keepdim=True)
        moved[:, tokens] += scale * lengths * vectors.to(h)[:, None]
        return moved

    return [(name, add)]


def _check_batch(h: Stream, n_directions: int, position: int | None) -> None:
    """Raise ValueError where a batch has no row for a direction, or no such token."""
    n_rows, n_pos, _ = h.shape
    if n_directions not in (1, n_rows):
        raise ValueError(
            f"{n_directions} directions need a batch of {n_directions} rows, one each, "
            f"got {n_rows}: repeat the prompt, or take one direction by a slice"
        )
    if position is not None and not -n_pos <= position < n_pos:
        raise ValueError(
            f"`position` must lie in [{-n_pos}, {n_pos - 1}] for a batch of {n_pos} "
            f"tokens, got {position}"
        )


def removal_hooks(removal: Projection, layers: Sequence[int], side: Side) -> list[Hook]:
    """Return hooks that take something from what blocks read, or from what they write.

    On the read side the block reads `h − removal.project(h)`, and the stream keeps h.
    On the write side the stream gets `f − removal.project(f)`.
    """
    hooks: list[Hook] = []
    for layer in layers:
        hooks += _removal_hooks(removal, layer, side)
    return hooks


def _removal_hooks(removal: Projection, layer: int, side: Side) -> list[Hook]:
    # The tensors that the second hook needs from the first, in one pass of the block.
    kept: list[Tensor] = []

    def take_from_input(h: Stream, hook: object) -> Stream:
        taken = removal.project(h, layer)
        kept[:] = [taken]
        return h - taken

    def give_back(output: Stream, hook: object) -> Stream:
        # The stream keeps what the block did not read.
        return output + kept.pop()

    def keep_input(h: Stream, hook: object) -> Stream:
        # A copy: some blocks add to the stream in place.
        kept[:] = [h.clone()]
        return h

    def take_from_step(output: Stream, hook: object) -> Stream:
        # The block wrote the output less the input.
        return output - removal.project(output - kept.pop(), layer)

    read_hook, write_hook = (
        (take_from_input, give_back) if side == "read" else (keep_input, take_from_step)
    )
    return [
        (hook_point(layer, "read"), read_hook),
        (hook_point(layer, "write"), write_hook),
    ]


def rotation_hooks(
    rotations: Mapping[int, Float[Tensor, "batch d_model d_model"]],
    side: RotatedSide,
    first_position: int = 0,
) -> list[Hook]:
    """Return hooks that multiply what blocks read, or what they write, by matrices R.

    Write: the stream gets `R f(h)`; read: `f(R h)`; both: `R f(Rᵀ h)`. The stream keeps
    h. Each row of a batch has its own matrix.

    Args:
        rotations: R by layer.
        side: what is multiplied.
        first_position: tokens before it read and write as they did.
    """
    hooks: list[Hook] = []
    for layer, R in rotations.items():
        hooks += _rotation_hooks(R, layer, side, first_position)
    return hooks


def _rotation_hooks(
    R: Float[Tensor, "batch d_model d_model"],
    layer: int,
    side: RotatedSide,
    first_position: int,
) -> list[Hook]:
    # The tensors that the second hook needs from the first, in one pass of the block.
    kept: list[Tensor] = []

    def multiplied(x: Stream, M: Tensor) -> Stream:
        # Rows are vectors of the stream: `M x` is `x Mᵀ`.
        product = x @ M.mT.to(x)
        product[:, :first_position] = x[:, :first_position]
        return product

    def rotate_input(h: Stream, hook: object) -> Stream:
        if side == "write":
            read = h.clone()
        else:
            read = multiplied(h, R if side == "read" else R.mT)
        # Copies: some blocks add to the stream in place.
        kept[:] = [h.clone(), read.clone()]
        return read

    def rotate_step(output: Stream, hook: object) -> Stream:
        h, read = kept
        kept.clear()
        step = output - read
        written = step if side == "read" else multiplied(step, R)
        # As differences, so that R = I changes no bit.
        return output + (h - read) + (written - step)

    return [
        (hook_point(layer, "read"), rotate_input),
        (hook_point(layer, "write"), rotate_step),
    ]
