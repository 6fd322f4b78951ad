"""Tangents with structure: the derivative of one value by another, as a diagonal, terms
of rank one, and what is dense.

The residual stream goes through a block by sums, and a norm is a diagonal and one or two
terms of rank one: neither needs a product of matrices. A dense derivative is written
relative to the narrowest value that it comes from, and one product gives it relative to
that value's own origin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Base:
    """A value of `n` entries relative to which tangents are written.

    `tangent` is its own, relative to an earlier base; None for the input. `depth` counts
    the bases before it.
    """

    n: int
    tangent: "Tangent | None" = None
    depth: int = 0


@dataclass
class Tangent:
    """`d value / d base = diag(diagonal) + Σ u vᵀ + dense`.

    `diagonal` and each v have the value's shape, each u is `[n]`, and `dense` is
    `[n *shape]`: the base's entries come first.
    """

    base: Base
    shape: torch.Size
    diagonal: Tensor | None = None
    rank_one: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dense: Tensor | None = None

    @classmethod
    def of_base(cls, value: Tensor, tangent: "Tangent | None" = None) -> "Tangent":
        """Return the tangent of a value relative to itself, as a new base."""
        depth = 0 if tangent is None else tangent.base.depth + 1
        base = Base(value.numel(), tangent, depth)
        return cls(base, value.shape, diagonal=torch.ones_like(value))

    def filled(self) -> Tensor:
        """Return all of it as one tensor `[n *shape]`."""
        n = self.base.n
        width = self.shape.numel()
        parts = [None if self.dense is None else self.dense.reshape(n, width)]
        for u, v in self.rank_one:
            parts.append(torch.outer(u, v.reshape(-1)))
        if self.diagonal is not None:
            parts.append(torch.diag(self.diagonal.reshape(-1)))
        total = _sum(parts)
        assert total is not None
        return total.reshape(n, *self.shape)

    def moved(
        self, shape: torch.Size, move: Callable[[Tensor, int], Tensor]
    ) -> "Tangent":
        """Return that of a value whose entries are moved or left out.

        `move` gets a tensor and how many axes stand before those of the value.
        """
        tangent = Tangent(self.base, shape)
        dense = self.dense
        if self.diagonal is not None:
            dense = Tangent(self.base, self.shape, self.diagonal, [], dense).filled()
        if dense is not None:
            tangent.dense = move(dense, 1)
        tangent.rank_one = [(u, move(v, 0)) for u, v in self.rank_one]
        return tangent

    def reshaped(self, value: Tensor) -> "Tangent":
        """Return that of a value with the same entries in the same order."""
        tangent = Tangent(self.base, value.shape)
        if self.diagonal is not None:
            tangent.diagonal = self.diagonal.reshape(value.shape).to(value.dtype)
        if self.dense is not None:
            tangent.dense = self.dense.reshape(-1, *value.shape).to(value.dtype)
        for u, v in self.rank_one:
            of_value = v.reshape(value.shape).to(value.dtype)
            tangent.rank_one.append((u.to(value.dtype), of_value))
        return tangent

    def scaled(self, factor: Tensor | float, shape: torch.Size) -> "Tangent":
        """Return that of a value of another shape, each entry of which changes by
        `factor` times what an entry of this one, spread over that shape, changes by.
        """
        tangent = Tangent(self.base, shape)
        if self.shape.numel() == 1 and shape.numel() > 1:
            # All entries move as the one does.
            u = self.filled().reshape(-1)
            spread = torch.as_tensor(factor, dtype=u.dtype, device=u.device)
            tangent.rank_one = [(u, spread.expand(shape))]
            return tangent
        if self.shape.numel() != shape.numel():
            dense = self.filled()
            missing = [1] * (len(shape) - len(self.shape))
            dense = dense.reshape(self.base.n, *missing, *self.shape)
            tangent.dense = (factor * dense).expand(self.base.n, *shape)
            return tangent
        if self.diagonal is not None:
            tangent.diagonal = (factor * self.diagonal.reshape(shape)).expand(shape)
        if self.dense is not None:
            dense = self.dense.reshape(self.base.n, *shape)
            is_one = isinstance(factor, float) and factor == 1
            tangent.dense = dense if is_one else factor * dense
        for u, v in self.rank_one:
            tangent.rank_one.append((u, (factor * v.reshape(shape)).expand(shape)))
        return tangent

    def __add__(self, other: "Tangent") -> "Tangent":
        return Tangent(
            self.base,
            self.shape,
            _sum([self.diagonal, other.diagonal]),
            self.rank_one + other.rank_one,
            _sum([self.dense, other.dense]),
        )

    def relative_to_origin(self) -> "Tangent":
        """Return it relative to the base of its base's own tangent: the chain rule."""
        own = self.base.tangent
        assert own is not None
        tangent = Tangent(own.base, self.shape)
        dense: list[Tensor | None] = []
        # diag, u vᵀ and dense of the base's tangent, each by those of this one.
        if self.diagonal is not None:
            through = own.scaled(self.diagonal.reshape(own.shape), own.shape)
            through = through.reshaped(self.diagonal)
            tangent.diagonal = through.diagonal
            tangent.rank_one += through.rank_one
            dense.append(_flat(through.dense))
        if self.dense is not None:
            matrix = self.dense.reshape(self.base.n, -1)
            if own.diagonal is not None:
                dense.append(own.diagonal.reshape(-1, 1) * matrix)
            for u, v in own.rank_one:
                tangent.rank_one.append(
                    (u, _product(v.reshape(-1), matrix).reshape(self.shape))
                )
            if own.dense is not None:
                dense.append(_product(own.dense.reshape(own.base.n, -1), matrix))
        for u, v in self.rank_one:
            tangent.rank_one.append((own.pulled_back(u), v))
        total = _sum(dense)
        if total is not None:
            tangent.dense = total.reshape(own.base.n, *self.shape)
        return tangent

    def pulled_back(self, u: Tensor) -> Tensor:
        """Return `d value / d base · u`, of a vector with the value's entries."""
        parts: list[Tensor | None] = []
        if self.diagonal is not None:
            parts.append(self.diagonal.reshape(-1) * u)
        for own_u, v in self.rank_one:
            parts.append(own_u * _product(v.reshape(-1), u))
        if self.dense is not None:
            parts.append(_product(self.dense.reshape(self.base.n, -1), u))
        total = _sum(parts)
        return torch.zeros(self.base.n).to(u) if total is None else total


def relative_to_one_base(tangents: Sequence[Tangent]) -> list[Tangent]:
    """Return tangents relative to the nearest base from which all descend."""
    tangents = list(tangents)
    while len({id(tangent.base) for tangent in tangents}) > 1:
        deepest = max(
            (tangent.base for tangent in tangents), key=lambda base: base.depth
        )
        tangents = [
            tangent.relative_to_origin() if tangent.base is deepest else tangent
            for tangent in tangents
        ]
    return tangents


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right`; a block may compute parts of itself in another precision."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    return left.to(dtype) @ right.to(dtype)


def _flat(dense: Tensor | None) -> Tensor | None:
    return None if dense is None else dense.reshape(len(dense), -1)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of what is there; None if nothing is."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    total = given[0]
    for part in given[1:]:
        total = total + part
    return total
