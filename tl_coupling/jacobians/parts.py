"""What a block's Jacobian is the sum of: its heads, its MLP, and the MLP acting on
attention.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from tl_coupling.arguments import checked, made_by
from tl_coupling.blocks import (
    BlockFunction,
    Components,
    Path,
    Trace,
)
from tl_coupling.jacobians.connections import Connection, Function
from tl_coupling.jacobians.jacobians import measured
from tl_coupling.results import Saved, tidy_table

if TYPE_CHECKING:
    import pandas


@made_by("block_parts(trace, layer)")
@checked
@dataclass(frozen=True, eq=False, repr=False)
class BlockParts(Saved):
    """The components of one block's Jacobian at one token.

    Attributes:
        matrices: J of each component, `[component d_model d_model]`; their sum is that
            of the block.
        labels: of each component, as TransformerLens has them: "L9H3" a head,
            "9_mlp_out" the MLP, and "9_mlp∘attn" the MLP acting on attention.
        layer, position: the block and the token.
        provenance: how it was made; JSON-able.

    Example:
        >>> parts = tlc.block_parts(trace, layer=1)
        >>> parts["L1H2"].shape
        torch.Size([32, 32])
        >>> tlc.jacobians.BlockParts.load(parts.save("parts.nc")).labels == parts.labels
        True
    """

    matrices: Float[Tensor, "component d_model d_model"]
    labels: tuple[str, ...]
    layer: int
    position: int
    provenance: dict[str, Any]
    DIMS: ClassVar = {"matrices": "component output input", "labels": "component"}

    def __getitem__(self, label: str) -> Float[Tensor, "d_model d_model"]:
        """Return the component of a label. Raises KeyError where there is none."""
        if label not in self.labels:
            raise KeyError(f"{label!r} is not one of {', '.join(self.labels)}")
        return self.matrices[self.labels.index(label)]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a tidy table: one row for each component, with the Frobenius norm of
        its Jacobian and its share `⟨J_c, J⟩ / ‖J‖²` of that of the block.

        Shares sum to 1; what works against the others has a negative one.

        Example:
            >>> table = tlc.block_parts(trace, layer=1).to_dataframe()
            >>> list(table)[:3], round(float(table["share"].sum()), 3)
            (['component', 'frobenius_norm', 'share'], 1.0)
        """
        J = self.matrices.double().sum(0)
        products = (self.matrices.double() * J).sum((1, 2))
        columns = {
            "frobenius_norm": ("component", self.matrices.norm(dim=(1, 2))),
            "share": ("component", products / J.square().sum()),
        }
        return tidy_table(columns, {"component": self.labels}, self.provenance)

    def _summary(self) -> str:
        labels = ", ".join(self.labels)
        return f"layer {self.layer}, token {self.position}; {labels}"


@checked
def block_parts(
    trace: Trace,
    layer: int,
    position: int = -1,
    *,
    function: Function = "block",
) -> BlockParts:
    r"""Split the Jacobian of one block into its heads, its MLP, and what both make.

    .. math:: J = \sum_h J_h + M + M \sum_h J_h

    of a block that adds attention, `H = x + attn(x)`, and then its MLP, `Y = H +
    mlp(H)`. `J_h` is the derivative of what head h adds, of its pattern, its values and
    the norm before it; M that of the MLP and its norm, at H. The last term is the
    MLP acting on attention, on what it adds; a block whose attention and MLP stand side by side
    has none. Norms behind a branch, and multipliers, belong to the parts that they act
    on. A mixture of experts is one MLP, its router included. All are matrices `[d_model
    d_model]`, rows index outputs, an entry is a dimensionless gain, and they sum to
    `block_jacobian`.

    Heads are told apart where `P V` leaves attention, in the order that they have there:
    a norm of all of them before the output projection (BitNet) is part of what they
    write. What is not split is one component: attention without heads that could be told
    apart is "9_attn_out". A block that changes the stream itself, by a norm (`function`) or a
    multiplier, has a component "9_skip", which holds what it takes away.

    Args:
        trace: a traced prompt.
        layer: the block.
        position: the token, as in `block_jacobian`; the last by default.
        function: as there.

    Raises:
        ValueError: a layer or position out of range, or a block whose attention and MLP
            cannot be told apart: one without attention (Mamba), or with several, or
            whose Jacobian is zero.

    Cost: `block_jacobian`, and about as much again; memory for a matrix for each
    component.

    Example:
        >>> parts = tlc.block_parts(trace, layer=1)
        >>> parts.labels
        ('L1H0', 'L1H1', 'L1H2', 'L1H3', '1_mlp_out', '1_mlp∘attn')
        >>> J = tlc.block_jacobian(trace, layer=1)
        >>> torch.allclose(parts.matrices.sum(0), J, atol=1e-5)
        True
    """
    t = trace.position_index(position)
    index = trace.layer_index(layer)
    block = measured(trace.blocks[index], function)
    components, path = components_and_path(block, t)
    paths = {str(Connection(index, t, t, t)): path}
    return BlockParts(
        matrices=components.matrices(),
        labels=tuple(label(name, index) for name in components.names),
        layer=index,
        position=t,
        provenance=trace.provenance | {"paths": paths},
    )


def label(name: str, layer: int) -> str:
    """Return TransformerLens' label of a component: "L9H3", "9_mlp_out"."""
    if name.startswith("H"):
        return f"L{layer}{name}"
    return f"{layer}_{name}"


def components_and_path(block: BlockFunction, position: int) -> tuple[Components, Path]:
    """Return the components of `J_{tt}`, and the way in which they were evaluated.

    Their sum agrees with the full sequence.

    Raises:
        ValueError: the block's attention and MLP cannot be told apart.
    """
    expected = block.reference(position)

    def products(components: Components) -> list[Tensor]:
        return [components.left_product(expected.u)]

    ways = block.ways_to_components(position)
    refusal = partial(_refusal, block, position)
    return block.cheapest(ways, [position], position, products, refusal)


def _refusal(block: BlockFunction, position: int) -> ValueError:
    """Return what to say of a block without components, and why it has none."""
    # A zero Jacobian agrees with any split of zeros; it has none of its own.
    if not bool(block.reference(position).rows[position].any()):
        return ValueError(
            f"layer {block.layer}: the block's Jacobian at token {position} is zero, so "
            "that there is nothing to divide among attention and MLP: leave the layer out"
        )
    return ValueError(
        f"layer {block.layer}: the block has no attention and MLP that can be told apart "
        "(one attention that writes to the stream, as two products q Kᵀ and P V, and an "
        "MLP beside or after it): take its whole Jacobian from `block_jacobian`"
    )
