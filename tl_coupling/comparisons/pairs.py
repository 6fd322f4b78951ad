"""Every connection of one list against every connection of another: Jacobians, SVDs, and the matrices A.

Every comparison is a list of connections that give J_1 (rows) and a list that gives singular vectors (columns).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.border import warn_caller
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import BATCH_BUDGET, Connection, jacobians_of
from tl_coupling.progress import Progress
from tl_coupling.spectra import Spectrum, check_cut, check_k, singular_values, svd

DEFAULT_K = 50


def compare(
    trace: Trace,
    rows: Sequence[Connection],
    cols: Sequence[Connection],
    *,
    kind: str,
    k: int | None,
    orientations: Sequence[Orientation],
    chunk_size: int | None,
    progress: Progress | None,
    provenance: dict[str, Any],
) -> dict[Orientation, CouplingMap]:
    """Every row's J_1 against every column's singular vectors, for each orientation.

    Memory: `2 k d_model` numbers for each column, `k²` for each pair, and a batch of Jacobians; where rows and columns
    are the same connections all their Jacobians, because each is needed in both roles.
    """
    d = trace.d_model
    k = fitting_k(k, d)
    same = list(rows) == list(cols)
    paths: dict[str, str] = {}
    computed = jacobians_of(trace, [*cols] if same else [*cols, *rows], chunk_size, progress, paths)
    batch = len(cols) if same else max(1, BATCH_BUDGET // d**2)

    def batches(n: int) -> Iterator[Tensor]:
        for start in range(0, n, batch):
            J = trace.residual.new_empty(min(batch, n - start), d, d)
            for J_1 in J:
                J_1.copy_(next(computed))
            yield J

    held, spectra = [], []
    for J in batches(len(cols)):
        # One more singular value than asked for: it tells whether the cut falls inside a near-repeated one.
        spectra.append(svd(J, min(k + 1, d)))
        held += [J] if same else []
    spectrum = Spectrum(*(torch.cat([getattr(s, part) for s in spectra]) for part in ("U", "S", "Vh")))
    check_cut(spectrum.S, k, [str(connection) for connection in cols])
    spectrum = spectrum.top(k)

    matrices = {orientation: J.new_empty(len(rows), len(cols), k, k) for orientation in orientations}
    S_1, frobenius_norms, start = [], [], 0
    for J in held if same else batches(len(rows)):
        frobenius_norms.append(torch.linalg.matrix_norm(J))
        S_1.append(spectrum.S if same else singular_values(J)[:, :k])
        for orientation, A in matrices.items():
            fill_pairs(A[start : start + len(J)], J, spectrum, orientation)
        start += len(J)
    # A progress bar ends where its iterator does.
    next(computed, None)
    return {
        orientation: CouplingMap(
            matrices=A,
            singular_values=torch.cat(S_1),
            frobenius_norms=torch.cat(frobenius_norms),
            d_model=d,
            row_layers=tuple(row.layer for row in rows),
            col_layers=tuple(col.layer for col in cols),
            row_positions=tuple(row.position for row in rows),
            col_positions=tuple(col.position for col in cols),
            kind=kind,
            orientation=orientation,
            provenance=trace.provenance | provenance | {"paths": paths},
        )
        for orientation, A in matrices.items()
    }


def fitting_k(k: int | None, d_model: int) -> int:
    """`k`; without one 50, or all that a narrower model has, with a warning."""
    if k is not None:
        check_k(k, d_model)
        return k
    if d_model < DEFAULT_K:
        warn_caller(f"the model has width {d_model}: k = {d_model} is used in place of the default, {DEFAULT_K}")
    return min(DEFAULT_K, d_model)


def chosen_layers(trace: Trace, layers: Sequence[int] | None) -> list[int]:
    """The chosen layers, counted from 0, or all."""
    chosen = [trace.layer_index(layer) for layer in (range(trace.n_layers) if layers is None else layers)]
    if not chosen:
        raise ValueError("`layers` is empty: wanted at least one layer")
    return chosen


def fill_pairs(
    A: Float[Tensor, "n_rows n_cols k k"], J: Float[Tensor, "n_rows d d"], spectra: Spectrum, orientation: Orientation
) -> None:
    """Write `A` of every pair. All columns' right vectors go through J_1 in one product; no layout is copied."""
    left, right = spectra.U.mT.contiguous(), spectra.Vh.contiguous()
    if orientation == "vju":
        left, right = right, left
    n_cols, k, d = right.shape
    for row, J_1 in enumerate(J):
        images = (right.reshape(n_cols * k, d) @ J_1.mT).reshape(n_cols, k, d)
        A[row] = left @ images.mT
