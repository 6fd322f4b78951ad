"""Every connection of one list against every connection of another: Jacobians, SVDs, and the matrices A.

Whatever a comparison is called, it is a list of connections that give J_1 (rows) and a list that gives singular vectors
(columns).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.comparisons.maps import CouplingMap
from tl_coupling.coupling import Orientation
from tl_coupling.jacobians import BATCH_BUDGET, Connection, Progress, jacobians_of
from tl_coupling.spectra import Spectrum, check_cut, check_k, singular_values, svd


def compare(
    trace: Trace,
    rows: Sequence[Connection],
    cols: Sequence[Connection],
    *,
    kind: str,
    k: int,
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
    check_k(k, d)
    same = list(rows) == list(cols)
    wanted = [*cols] if same else [*cols, *rows]
    paths: dict[str, str] = {}
    computed = jacobians_of(trace, wanted, chunk_size, progress, paths)
    batch = len(cols) if same else max(1, BATCH_BUDGET // d**2)

    def batches(n: int) -> Iterator[Tensor]:
        for start in range(0, n, batch):
            J = trace.residual.new_empty(min(batch, n - start), d, d)
            for J_1 in J:
                J_1.copy_(next(computed))
            yield J

    held, spectra = [], []
    for J in batches(len(cols)):
        # One singular value more than is asked for: it tells whether the cut falls inside a near-repeated one.
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


def fill_pairs(
    A: Float[Tensor, "n_rows n_cols k k"],
    J: Float[Tensor, "n_rows d d"],
    spectra: Spectrum,
    orientation: Orientation,
) -> None:
    """Write `A` of every pair. All columns' right vectors go through J_1 in one product; no layout is copied."""
    left, right = spectra.U.mT.contiguous(), spectra.Vh.contiguous()
    if orientation == "vju":
        left, right = right, left
    n_cols, k, d = right.shape
    for row, J_1 in enumerate(J):
        images = (right.reshape(n_cols * k, d) @ J_1.mT).reshape(n_cols, k, d)
        A[row] = left @ images.mT
