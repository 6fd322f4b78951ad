"""What the Jacobians of a model's blocks have in common, computed from the matrices
alone.

Throughout, `J` is `[n_layers d d]`: `J_l = ∂f_l/∂x` of each block at one token, rows
index outputs. Everything is dimensionless. With these, `early_surge.py` tests
explanations of a rise in coupling.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
import xarray
from jaxtyping import Float
from torch import Tensor

import tl_coupling as tlc


def mean_coupling(J: Float[Tensor, "n_layers d d"], k: int) -> float:
    """Mean over ordered pairs of different layers of the coupling of any matrices;
    ValueError for fewer than 2.
    """
    return tlc.comparisons.jacobian_coupling(J, k).mean()


def mean_cosine(X: Float[Tensor, "n ..."]) -> float:
    """Mean over pairs of `⟨X_a, X_b⟩ / (‖X_a‖ ‖X_b‖)`, in [-1/(n−1), 1]; about 0 for
    independent ones.
    """
    unit = torch.nn.functional.normalize(X.flatten(1), dim=1)
    n = len(unit)
    return float((unit.sum(0).square().sum() - n) / (n * (n - 1)))


def sigma_1_share(S: Float[Tensor, "n_layers d"]) -> float:
    """Mean over layers of `σ_1² / Σ σ_i²`, in [1/d, 1]: how much of J one pair of
    directions is.
    """
    return float((S[:, 0].square() / S.square().sum(1)).mean())


def coupling_without_shared_map(J: Float[Tensor, "n_layers d d"], k: int) -> float:
    """Mean coupling of each pair of layers without the map that the other layers share.

    For layers a and b it is the coupling of `J_a − ⟨J_a, M⟩ M` and `J_b − ⟨J_b, M'⟩
    M'`, where M and M' are the unit vectors along `Σ_c J_c / ‖J_c‖` over two disjoint
    halves of the other layers. With one M for both, the noise of the others would be
    subtracted from both and couple them, so that a map planted in noise would not reach
    the null.
    """
    if len(J) < 4:
        raise ValueError(
            f"two disjoint sets of other layers need at least 4 layers, got {len(J)}"
        )
    unit = J / torch.linalg.matrix_norm(J, keepdim=True)
    couplings = []
    for pair in combinations(range(len(J)), 2):
        other_layers = [c for c in range(len(J)) if c not in pair]
        M = torch.stack([unit[other_layers[half::2]].sum(0) for half in (0, 1)])
        M = M / torch.linalg.matrix_norm(M, keepdim=True)
        along = (J[list(pair)] * M).sum((-2, -1), keepdim=True)
        couplings.append(mean_coupling(J[list(pair)] - along * M, k))
    return sum(couplings) / len(couplings)


def with_random_vectors(
    J: Float[Tensor, "n_layers d d"], generator: torch.Generator
) -> Float[Tensor, "n_layers d d"]:
    """`Q_l diag(S_l) R_lᵀ`: the singular values of each layer between independent
    Haar-random bases.
    """
    Q, R = tlc.measures.random_rotations(
        2, len(J), J.shape[-1], generator=generator
    ).to(J.dtype)
    return Q @ torch.diag_embed(tlc.spectra.singular_values(J)) @ R.mT


def leading_directions(X: Float[Tensor, "n d"], m: int) -> Float[Tensor, "d m"]:
    """Return the m leading eigenvectors of `XᵀX`: principal directions of the rows,
    without centring.
    """
    return torch.linalg.eigh(X.mT @ X)[1][:, -m:]


def mean_overlap(
    bases: Float[Tensor, "n_layers d m"], vectors: Float[Tensor, "n_layers d k"]
) -> float:
    """Mean over layers of `‖Bᵀ V‖_F² / k`, in [0, 1]: how much of k orthonormal vectors
    lies in m others.

    Random subspaces have m/d.
    """
    return float((bases.mT @ vectors).square().sum((-2, -1)).mean() / vectors.shape[-1])


def frequency_direction(
    unembedding: Float[Tensor, "n_vocab d"], frequencies: Float[Tensor, " n_vocab"]
) -> Tensor:
    """`W_Uᵀ (p − 1/n)`: where the stream must go to raise frequent tokens over the
    average one, `[d]`.
    """
    return frequencies @ unembedding - unembedding.mean(0)


def dataset(
    rows: Sequence[Sequence[Mapping[str, float]]], steps: Sequence[int]
) -> xarray.Dataset:
    """Numbers by name of every step and prompt, as `[checkpoint prompt]`."""
    dims = ("checkpoint", "prompt")
    numbers = {
        name: (dims, [[of_prompt[name] for of_prompt in of_step] for of_step in rows])
        for name in rows[0][0]
    }
    return xarray.Dataset(numbers, {"checkpoint": list(steps)})
