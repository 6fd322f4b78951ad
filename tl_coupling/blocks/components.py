"""The components of a block's Jacobian at one token: each head, the MLP, and the MLP
acting on attention.

Of a block `H = x + attn(x)`, `Y = H + mlp(H)` with `A = Σ_h A_h` the derivative of
attention and M that of the MLP at H,

    J = Σ_h A_h + M + M Σ_h A_h.

The block's derivative is linear in what its attention and its MLP do to tangents. With
one or both held constant, what is left are its terms, whatever the block's code does
with them: norms behind its branches, multipliers, branches side by side (no last term).

Attention is where keys and values of other rows are met; the MLP is every other product
with a matrix.
"""

from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks.contexts import BlockError
from tl_coupling.blocks.records import Recorded
from tl_coupling.blocks.tangents import Tangent

# A smaller share than this is rounding.
_NOTHING = 1e-5


@dataclass(frozen=True, eq=False)
class Components:
    """The terms of `J = Σ_h W_hᵀ Z_h + M + Σ_h (M W_hᵀ) Z_h`.

    Attributes:
        read: Z_h, the derivative of each head's output z.
        write: W_h, what each entry of z adds to the stream.
        mlp_on_attention: what the MLP adds because of it; None of a block where the MLP does
            not act on attention.
        mlp: M; None of a block without one.
        skip: what becomes of the stream that enters, less the identity; None where it
            is passed on as it is.
        has_heads: whether attention is split into heads; if not, it is one.
    """

    read: Float[Tensor, "n_heads d_head d_model"]
    write: Float[Tensor, "n_heads d_head d_model"]
    mlp_on_attention: Float[Tensor, "n_heads d_head d_model"] | None
    mlp: Float[Tensor, "d_model d_model"] | None
    skip: Float[Tensor, "d_model d_model"] | None
    has_heads: bool

    @property
    def names(self) -> list[str]:
        """Names of the components, without their layer: H0, H1, …, mlp_out, mlp∘attn."""
        names = ["attn_out"]
        if self.has_heads:
            names = [f"H{head}" for head in range(len(self.read))]
        if self.mlp is not None:
            names.append("mlp_out")
        if self.mlp_on_attention is not None:
            names.append("mlp∘attn")
        if self.skip is not None:
            names.append("skip")
        return names

    def matrices(self) -> Float[Tensor, "component d_model d_model"]:
        """Return the components as matrices, in the order of their names."""
        head_terms = einsum(
            self.write, self.read, "head z d_out, head z d_in -> head d_out d_in"
        )
        matrices = list(head_terms)
        if self.mlp is not None:
            matrices.append(self.mlp)
        if self.mlp_on_attention is not None:
            matrices.append(
                einsum(
                    self.mlp_on_attention,
                    self.read,
                    "head z d_out, head z d_in -> d_out d_in",
                )
            )
        if self.skip is not None:
            matrices.append(self.skip)
        return torch.stack(matrices)

    def bilinear(
        self,
        left: Float[Tensor, "n_frames k d_model"],
        right: Float[Tensor, "n_frames k d_model"],
    ) -> Float[Tensor, "n_frames component k k"]:
        """Return `L J Rᵀ` of each component, in the order of their names.

        Heads are never built as matrices: the cost is that of two matrices for each
        matrix among the components.
        """
        right_in_z = einsum(self.read, right, "head z d, frame k d -> frame k head z")
        left_in_z = einsum(self.write, left, "head z d, frame k d -> frame k head z")
        pattern = "frame i head z, frame j head z -> frame head i j"
        terms = [einsum(left_in_z, right_in_z, pattern)]
        if self.mlp is not None:
            terms.append(left @ self.mlp @ right.mT)
        if self.mlp_on_attention is not None:
            left_in_z = einsum(
                self.mlp_on_attention, left, "head z d, frame k d -> frame k head z"
            )
            pattern = "frame i head z, frame j head z -> frame i j"
            terms.append(einsum(left_in_z, right_in_z, pattern))
        if self.skip is not None:
            terms.append(left @ self.skip @ right.mT)
        return torch.cat(
            [term if term.ndim == 4 else term[:, None] for term in terms], 1
        )

    def inner_products(
        self, J: Float[Tensor, "d_model d_model"]
    ) -> Float[Tensor, " component"]:
        """Return `⟨J_c, J⟩` of each component, in the order of their names."""
        pattern = "head z d, head z d -> head"
        terms = [einsum(self.write @ J, self.read, pattern)]
        if self.mlp is not None:
            terms.append((self.mlp * J).sum()[None])
        if self.mlp_on_attention is not None:
            head_terms = einsum(self.mlp_on_attention @ J, self.read, pattern)
            terms.append(head_terms.sum()[None])
        if self.skip is not None:
            terms.append((self.skip * J).sum()[None])
        return torch.cat(terms)

    def left_product(self, u: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        """Return `uᵀ J`, of the sum of the components."""
        write = self.write
        if self.mlp_on_attention is not None:
            write = write + self.mlp_on_attention
        product = (write @ u).flatten() @ self.read.flatten(0, 1)
        for J in (self.mlp, self.skip):
            if J is not None:
                product = product + u @ J
        return product


@torch.no_grad()
def recorded_components(recorded: Recorded) -> Components:
    """Return the components from the record of a block on one token.

    `J` is what comes to the output by the stream itself, by attention's output alone,
    and by other products of matrices: the MLP, of the stream and of attention.

    Raises:
        BlockError: attention is not two products, or does not come before the MLP.
    """
    attention = recorded.after_middle
    if attention is None or attention.tangent is None:
        raise BlockError("the block's attention is not q Kᵀ and P V by two products")
    (x,) = recorded.input_bases
    terms = dict(recorded.tangent.terms)
    of_attention = terms.pop(attention, None)
    of_stream = terms.pop(x, None)
    if of_attention is None or attention.comes_from(terms):
        raise BlockError("attention does not write to the stream before the MLP")
    of_mlp = Tangent(terms).relative_to_inputs(stop=attention)
    d_model = recorded.y.numel()
    zeros = recorded.y.new_zeros(attention.n, d_model)
    zero = recorded.y.new_zeros(d_model, d_model)
    # It may be the model's own weight.
    write = of_attention.filled().clone()
    read = attention.tangent.relative_to_inputs()[x].filled().mT
    skip = torch.eye(d_model).to(zero)
    if of_stream is not None:
        skip = skip + of_stream.filled().mT
    mlp = of_mlp[x].filled().mT if x in of_mlp else zero
    mlp_on_attention = of_mlp[attention].filled() if attention in of_mlp else zeros
    return _components(
        read, write, write + mlp_on_attention, skip, skip + mlp, recorded.n_heads
    )


def _components(
    read: Float[Tensor, "d_z d_model"],
    write: Float[Tensor, "d_z d_model"],
    write_with_mlp: Float[Tensor, "d_z d_model"],
    skip: Float[Tensor, "d_model d_model"],
    skip_with_mlp: Float[Tensor, "d_model d_model"],
    n_heads: int | None,
) -> Components:
    """Return the components, without those that are nothing.

    `skip` is the block's derivative with attention and MLP held constant,
    `skip_with_mlp` that with attention held constant.
    """
    if not bool(write.any()) or not bool(skip.any()):
        # A part that holds the skip connection, or one that is two parts.
        raise BlockError("attention and MLP are not what is added to the stream")
    identity = torch.eye(len(skip), dtype=skip.dtype, device=skip.device)
    mlp = skip_with_mlp - skip
    mlp_on_attention = write_with_mlp - write
    changed = skip - identity
    shape = (n_heads or 1, -1, read.shape[1])
    return Components(
        read=read.reshape(shape),
        write=write.reshape(shape),
        mlp_on_attention=None
        if _is_nothing(mlp_on_attention, write)
        else mlp_on_attention.reshape(shape),
        mlp=mlp if bool(mlp.any()) else None,
        skip=None if _is_nothing(changed, identity) else changed,
        has_heads=n_heads is not None,
    )


def _is_nothing(difference: Tensor, reference: Tensor) -> bool:
    return bool(difference.norm() <= _NOTHING * reference.norm())
