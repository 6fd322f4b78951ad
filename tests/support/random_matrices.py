"""Random matrices whose singular values are known."""

import numpy as np
import torch
from torch import Tensor

from tl_coupling.spectra import Spectrum


def haar(n: int, rng: np.random.Generator) -> np.ndarray:
    Q, R = np.linalg.qr(rng.standard_normal((n, n)))
    return Q * np.sign(np.diag(R))


def matrix(
    sigma: np.ndarray, shape: tuple[int, int] = (9, 9), seed: int = 0
) -> np.ndarray:
    """Return a matrix with these singular values and random singular vectors."""
    rng = np.random.default_rng(seed)
    return (
        haar(shape[0], rng)[:, : len(sigma)] * sigma @ haar(shape[1], rng)[: len(sigma)]
    )


def as_numpy(spectrum: Spectrum) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    U = spectrum.U.double().numpy()
    S = spectrum.S.double().numpy()
    Vh = spectrum.Vh.double().numpy()
    return U, S, Vh


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
