"""Tangents with structure: the derivative of one value by others, as blocks along a
diagonal and terms of rank one.

The residual stream goes through a block by sums, and a norm is a diagonal and one or two
terms of rank one: neither needs a product of matrices. Attention's heads do not meet
before their output: what they do is a block for each head. A matrix that a value is
multiplied with makes that value a base: what comes out is written relative to it, and
one product, at the end, makes it relative to the base's own bases.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd

import torch
from jaxtyping import Inexact, Shaped
from torch import Tensor

from tl_coupling.blocks.contexts import BlockError

# The most entries of one tangent (1 GiB in float32): the MLP of a model of 70 billion
# parameters fits.
_MOST_ENTRIES = 2**28


class Base:
    """A value of `n` entries relative to which tangents are written.

    `tangent` is its own, relative to earlier bases; None for an input. `depth` counts the
    bases before it.
    """

    def __init__(self, n: int, tangent: "Tangent | None" = None) -> None:
        self.n = n
        self.tangent = tangent
        earlier = [] if tangent is None else list(tangent.terms)
        self.depth: int = 1 + max((base.depth for base in earlier), default=-1)

    def comes_from(self, bases: Collection["Base"]) -> bool:
        """Say whether its value depends on any of these bases."""
        if self.tangent is None:
            return False
        return any(
            base in bases or base.comes_from(bases) for base in self.tangent.terms
        )


@dataclass
class Term:
    """`d value / d base`, `[n m]`, of the n flattened entries of the base by the m of
    the value: the transpose of a Jacobian.

    It is the sum of matrices of B equal blocks along the diagonal, `blocks[B]` `[B n/B
    m/B]`, one for each B (1: a dense matrix; n = m: a diagonal one), and of `u vᵀ`.
    """

    blocks: dict[int, Tensor] = field(default_factory=dict)
    rank_one: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def filled(self) -> Inexact[Tensor, "n m"]:
        """Return all of it as one matrix."""
        parts = [coarsened(blocks, 1)[0] for blocks in self.blocks.values()]
        parts += [torch.outer(u, v) for u, v in self.rank_one]
        return _sum(parts)

    def condensed(self) -> "Term":
        """Return it without terms of rank one, if one of its matrices is dense."""
        if 1 not in self.blocks:
            return self
        dense = self.blocks[1][0]
        for u, v in self.rank_one:
            dense = torch.addr(dense, u, v)
        return Term(self.blocks | {1: dense[None]})

    def to(self, dtype: torch.dtype) -> "Term":
        """Return it in another precision."""
        return Term(
            {n_blocks: blocks.to(dtype) for n_blocks, blocks in self.blocks.items()},
            [(u.to(dtype), v.to(dtype)) for u, v in self.rank_one],
        )

    def scaled(self, factor: Shaped[Tensor, " m"] | float) -> "Term":
        """Return that of a value each entry of which changes by so many times."""
        if isinstance(factor, float) and factor == 1:
            return self
        result = Term({}, [(u, factor * v) for u, v in self.rank_one])
        for n_blocks, blocks in self.blocks.items():
            of_each = factor
            if isinstance(factor, Tensor):
                of_each = factor.reshape(n_blocks, 1, -1)
            result.blocks[n_blocks] = of_each * blocks
        return result

    def __add__(self, other: "Term") -> "Term":
        blocks = dict(self.blocks)
        for n_blocks, more in other.blocks.items():
            blocks[n_blocks] = blocks[n_blocks] + more if n_blocks in blocks else more
        return Term(blocks, self.rank_one + other.rank_one)

    def after(self, own: "Term") -> "Term":
        """Return `d value / d C` from `d value / d B`, which this is, and `d B / d C`,
        which is `own`: the chain rule.
        """
        total = Term()
        for blocks in self.blocks.values():
            for own_blocks in own.blocks.values():
                product = _product_of_blocks(own_blocks, blocks)
                total += Term({len(product): product})
            for u, v in own.rank_one:
                total.rank_one.append((u, _times_blocks(v, blocks)))
        for u, v in self.rank_one:
            total.rank_one.append((own.times(u), v))
        return total

    def times(self, u: Inexact[Tensor, " m"]) -> Inexact[Tensor, " n"]:
        """Return this matrix times a vector."""
        parts = [_times_blocks(u, blocks.mT) for blocks in self.blocks.values()]
        parts += [own_u * _product(v, u) for own_u, v in self.rank_one]
        return _sum(parts)


@dataclass
class Tangent:
    """The derivatives of a value by all bases on which it depends directly."""

    terms: dict[Base, Term]

    @classmethod
    def of_base(cls, base: Base, value: Tensor) -> "Tangent":
        """Return the tangent of a value relative to itself, which is a base."""
        return cls({base: Term({base.n: value.new_ones(base.n, 1, 1)})})

    def __add__(self, other: "Tangent") -> "Tangent":
        terms = dict(self.terms)
        for base, term in other.terms.items():
            terms[base] = terms[base] + term if base in terms else term
        return Tangent(terms)

    def mapped(self, function: Callable[[Term], Term]) -> "Tangent":
        """Return that of a value that is linear in this one."""
        return Tangent({base: function(term) for base, term in self.terms.items()})

    def scaled(
        self, factor: Tensor | float, shape: torch.Size, new_shape: torch.Size
    ) -> "Tangent":
        """Return that of a value of another shape, each entry of which changes by
        `factor` times what an entry of this one, spread over that shape, changes by.
        """
        if shape.numel() == new_shape.numel():
            if isinstance(factor, Tensor) and factor.shape != new_shape:
                factor = factor.expand(new_shape)
            if isinstance(factor, Tensor):
                factor = factor.reshape(-1)
            flat = factor
            return self.mapped(lambda term: term.scaled(flat))
        return self.mapped(lambda term: _spread(term, factor, shape, new_shape))

    def moved(
        self,
        shape: torch.Size,
        move: Callable[[Tensor, int], Tensor],
        n_kept: int = 0,
    ) -> "Tangent":
        """Return that of a value whose entries are moved or left out.

        `move` gets a tensor and how many axes stand before those of the value. The
        first `n_kept` of these it leaves as they are: blocks along them stay apart.
        """
        n_rows = shape[:n_kept].numel()

        def moved(term: Term) -> Term:
            result = Term()
            for n_blocks, blocks in term.blocks.items():
                kept = gcd(n_blocks, n_rows)
                of_blocks = coarsened(blocks, kept)
                # Within a block, all kept axes have length 1 but the last, which is as
                # long as the block.
                rows = (*[1] * (n_kept - 1), n_rows // kept) if n_kept else ()
                entries = of_blocks.reshape(-1, *rows, *shape[n_kept:])
                left = move(entries, 1).reshape(kept, of_blocks.shape[1], -1)
                result += Term({kept: left})
            for u, v in term.rank_one:
                result.rank_one.append((u, move(v.reshape(shape), 0).reshape(-1)))
            return result

        return self.mapped(moved)

    def relative_to_inputs(self, stop: Base | None = None) -> dict[Base, Term]:
        """Return the derivatives with respect to the inputs, and to `stop` if it is given:
        what comes to the value by way of that base is in its term alone.
        """
        terms = dict(self.terms)
        while True:
            left = [b for b in terms if b.tangent is not None and b is not stop]
            if not left:
                return terms
            deepest = max(left, key=lambda base: base.depth)
            term = terms.pop(deepest).condensed()
            assert deepest.tangent is not None
            through = deepest.tangent.mapped(term.after)
            terms = (Tangent(terms) + through).terms


def dense_term(matrix: Inexact[Tensor, " n *shape"]) -> Term:
    """Return a term that is one dense matrix."""
    n = len(matrix)
    # For an empty value, −1 could be any size.
    return Term({1: matrix.reshape(1, n, matrix.numel() // n)})


def coarsened(
    blocks: Inexact[Tensor, "B n m"], n_blocks: int
) -> Inexact[Tensor, "B_new n_new m_new"]:
    """Return blocks along a diagonal as fewer and larger ones."""
    n_finer, n, m = blocks.shape
    if n_finer == n_blocks:
        return blocks
    ratio = n_finer // n_blocks
    check_size(n_blocks * ratio * n * ratio * m)
    if n_blocks == n == m == 1:
        return torch.diag(blocks.reshape(-1))[None]
    identity = torch.eye(ratio, dtype=blocks.dtype, device=blocks.device)
    spread = identity[:, None, :, None] * blocks.reshape(n_blocks, ratio, n, 1, m)
    return spread.reshape(n_blocks, ratio * n, ratio * m)


def check_size(n_entries: int) -> None:
    """Raise BlockError where a tangent takes more memory than another way would."""
    if n_entries > _MOST_ENTRIES:
        raise BlockError("the tangents of a value do not fit in the memory for them")


def _spread(
    term: Term, factor: Tensor | float, shape: torch.Size, new_shape: torch.Size
) -> Term:
    """Return the term of a value that is spread over a larger shape, and scaled."""
    if shape.numel() == 1:
        # All entries move as the one does.
        u = term.filled()[:, 0]
        spread = torch.as_tensor(factor, dtype=u.dtype, device=u.device)
        return Term({}, [(u, spread.expand(new_shape).reshape(-1))])
    aligned = (*[1] * (len(new_shape) - len(shape)), *shape)
    dense = term.filled()
    check_size(len(dense) * new_shape.numel())
    dense = factor * dense.reshape(len(dense), *aligned)
    return dense_term(dense.expand(len(dense), *new_shape))


def _product_of_blocks(
    left: Inexact[Tensor, "B1 n k1"], right: Inexact[Tensor, "B2 k2 m"]
) -> Inexact[Tensor, "B n_B m_B"]:
    """Return the product of two matrices of blocks along the diagonal."""
    n_left, n_right = len(left), len(right)
    n_blocks = gcd(n_left, n_right)
    if n_blocks not in (n_left, n_right):
        left, n_left = coarsened(left, n_blocks), n_blocks
    if n_left > n_right:
        # Several blocks of the left meet one of the right.
        right = right.reshape(n_left, left.shape[2], -1)
        product = _matrices(left, right)
        return product.reshape(n_blocks, -1, product.shape[2])
    if n_left < n_right:
        ratio = n_right // n_left
        of_columns = left.reshape(n_left, left.shape[1], ratio, -1)
        of_blocks = right.reshape(n_left, ratio, *right.shape[1:])
        product = _matrices(of_columns.transpose(1, 2), of_blocks).transpose(1, 2)
        return product.reshape(n_left, left.shape[1], -1)
    return _matrices(left, right)


def _times_blocks(
    v: Inexact[Tensor, " n"], blocks: Inexact[Tensor, "B n_B m_B"]
) -> Inexact[Tensor, " m"]:
    """Return `vᵀ M` of a matrix of blocks."""
    if len(blocks) == 1:
        return _product(v, blocks[0])
    return _matrices(v.reshape(len(blocks), 1, -1), blocks).reshape(-1)


def _matrices(left: Tensor, right: Tensor) -> Tensor:
    """Return products of matrices; where they are numbers, without one."""
    left, right = _in_one_dtype(left, right)
    if left.shape[-1] == 1:
        return left * right
    return torch.bmm(left, right) if left.ndim == 3 else left @ right


def _product(left: Tensor, right: Tensor) -> Tensor:
    left, right = _in_one_dtype(left, right)
    return left @ right


def _in_one_dtype(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return two factors; a block may compute parts of itself in another precision."""
    if left.dtype == right.dtype:
        return left, right
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype), right.to(dtype)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def bases_of(tangents: Iterable[Tangent]) -> list[Base]:
    """Return the bases of several tangents, each once."""
    return list(dict.fromkeys(base for tangent in tangents for base in tangent.terms))
