"""Eigenvalues of symmetric matrices: in float64 where float32 is not exact."""

from pathlib import Path

import pytest
import torch

import tl_coupling as tlc
from random_matrices import gaussian
from tl_coupling.measures.moments import _mean_absolute_form
from tl_coupling.spectra import eigh, eigvalsh
from tl_coupling.spectra.iteration import _descending_eigh

PACKAGE = Path(tlc.__file__).parent


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def seen(monkeypatch):
    """The dtypes that torch's functions are given."""
    dtypes = []

    def spy(decompose):
        def decompose_and_note(T):
            dtypes.append(T.dtype)
            return decompose(T)

        return decompose_and_note

    for name in ("eigh", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, spy(getattr(torch.linalg, name)))
    return dtypes


def symmetric(*batch: int) -> torch.Tensor:
    """Float32, with eigenvalues 1 to 6."""
    Q = torch.linalg.qr(gaussian(*batch, 6, 6, seed=0)).Q
    return ((Q * torch.arange(1.0, 7.0).double()) @ Q.mT).float()


CALLS = {
    "eigh": eigh,
    "eigvalsh": lambda T: (eigvalsh(T),),
    "in an iteration": _descending_eigh,
    "directions that blocks share": lambda T: (
        tlc.measures.without_shared(torch.stack([T, 2 * T.flip(0)]), 2),
    ),
    "a mean over random directions": lambda T: (_mean_absolute_form(T[None]),),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_sees_float64_on_a_gpu_and_callers_their_own_dtype(name, seen):
    T = symmetric()
    on_cpu = CALLS[name](T)
    assert set(seen) == {torch.float32}
    seen.clear()
    on_gpu = CALLS[name](T.as_subclass(OnCuda))
    assert set(seen) == {torch.float64}
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert found.dtype == expected.dtype
        # Signs of eigenvectors are arbitrary.
        difference = found.as_subclass(torch.Tensor).abs() - expected.abs()
        assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvalues_ascend_and_vectors_reconstruct(batch, dtype):
    T = symmetric(*batch).to(dtype)
    values, vectors = eigh(T)
    expected = torch.arange(1.0, 7.0).to(dtype).expand(*batch, 6)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(eigvalsh(T), expected, rtol=1e-5, atol=0)
    rebuilt = (vectors * values[..., None, :]) @ vectors.mT
    torch.testing.assert_close(rebuilt, T, rtol=0, atol=1e-5)


def test_no_other_file_asks_torch_itself():
    asking = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "torch.linalg.eigh" in (source := path.read_text())
        or "torch.linalg.eigvalsh" in source
    }
    assert asking == {"symmetric.py"}
