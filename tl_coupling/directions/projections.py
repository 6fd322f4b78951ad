"""What an ablation takes away: projections onto subspaces."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

# Shorter moves are not scaled to another length.
_SHORTEST = 1e-12


@dataclass(eq=False)
class Projection:
    """`(x − μ) B Bᵀ` at each layer, of one subspace or of one for each row of a batch.

    Attributes:
        bases: by layer, orthonormal `[d_model rank]`, or `[batch d_model rank]`.
        means: μ by layer; 0 where there is none.
        matched: bases by layer; rows of the batch that are true in `is_matched` are
            scaled so that as much is taken at each token as these would.
        is_matched: `[batch]`.
        first_position: tokens before it keep everything.
        taken, present: sums over layers and tokens of the squared lengths of what was
            taken and of what was there, added to by `project`, `[batch]`.
    """

    bases: Mapping[int, Tensor]
    means: Mapping[int, Float[Tensor, " d_model"]] = field(default_factory=dict)
    matched: Mapping[int, Float[Tensor, "d_model rank"]] = field(default_factory=dict)
    is_matched: Tensor | None = None
    first_position: int = 0
    taken: list[Tensor] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)

    def project(
        self, x: Float[Tensor, "batch n_pos d_model"], layer: int
    ) -> Float[Tensor, "batch n_pos d_model"]:
        """Return what is taken from x at a layer."""
        centred = x
        if layer in self.means:
            centred = x - self.means[layer].to(x)
        basis = self.bases[layer].to(x)
        move = (centred @ basis) @ basis.mT
        if self.is_matched is not None:
            move = move * self._scales(centred, move, layer)
        # Their energy does not count either, in `present`.
        move[:, : self.first_position] = 0
        self.taken.append(move.square().sum((1, 2)))
        self.present.append(centred[:, self.first_position :].square().sum((1, 2)))
        return move

    @property
    def removed(self) -> Float[Tensor, " batch"]:
        """The share of the energy that was taken, over all layers and tokens."""
        return torch.stack(self.taken).sum(0) / torch.stack(self.present).sum(0)

    def _scales(
        self, centred: Tensor, move: Tensor, layer: int
    ) -> Float[Tensor, "batch n_pos 1"]:
        assert self.is_matched is not None
        # As long as what the shared subspace would take of this very stream.
        wanted = (centred @ self.matched[layer].to(move)).norm(dim=-1, keepdim=True)
        length = move.norm(dim=-1, keepdim=True).clamp(min=_SHORTEST)
        is_matched = self.is_matched.to(move.device)[:, None, None]
        return torch.where(is_matched, wanted / length, torch.ones_like(length))
