"""The top of a spectrum: `tlc.svd(J, k)` against a full SVD, an eigendecomposition of
JᵀJ, and block Krylov spaces.

    python -m benchmarks.truncated_svd --d 576 1024 2048 4096 --out benchmarks/results

The 30 Jacobians of SmolLM2-135M-Instruct (d = 576), and for every d two matrices with its singular
values, interpolated, between random orthogonal vectors: the spectrum of the layer in
the middle, and that of the last layer, which is the flattest. All ways are run in turn
in one process. Errors are those of float64: of the Jacobians' own SVD, or of the
vectors that a matrix was made from. Times are seconds of processor time, which others
on the machine disturb least.

    OMP_NUM_THREADS=1 python -m benchmarks.truncated_svd --d 4096 --repeats 1
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tl_coupling as tlc
from benchmarks.timing import environment, write
from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.spectra.iteration import TOLERANCE, block_width
from tl_coupling.studies.surveys import PAPER_PROMPT

Triplets = tuple[Tensor, Tensor, Tensor]
CPU = torch.device("cpu")
# Beyond these the others take minutes.
LARGEST = {"eigh of JᵀJ": 2048, "full SVD": 4096}


def full(J: Tensor, k: int) -> Triplets:
    U, S, Vh = torch.linalg.svd(J, full_matrices=False)
    return U[..., :k], S[..., :k], Vh[..., :k, :]


def iterated(J: Tensor, k: int) -> Triplets:
    spectrum = tlc.svd(J, k)
    return spectrum.U, spectrum.S, spectrum.Vh


def ritz(J: Tensor, V: Tensor, k: int) -> Triplets:
    """Return the k largest triplets of J within the span of V, in float64."""
    V = torch.linalg.qr(V.double()).Q
    images = J.double() @ V
    squares, within = torch.linalg.eigh(images.mT @ images)
    S = squares[-k:].flip(-1).sqrt()
    within = within[:, -k:].flip(-1)
    return images @ within / S, S, (V @ within).mT


def gram(J: Tensor, k: int) -> Triplets:
    """Eigenvectors of JᵀJ in float32, one power step and a Rayleigh–Ritz step in
    float64 (what `svd` did before).
    """
    V = torch.linalg.eigh(J.mT @ J).eigenvectors[:, -(k + 32) :].double()
    return ritz(J, J.double().mT @ (J.double() @ V), k)


def krylov(J: Tensor, k: int) -> Triplets:
    """Block Lanczos on JᵀJ with full reorthogonalisation until its residuals reach the
    tolerance of `svd`.
    """
    width = k + 8
    generator = torch.Generator().manual_seed(0)
    block = torch.linalg.qr(J.mT @ torch.randn(len(J), width, generator=generator)).Q
    basis = J.new_empty(J.shape[1], 0)
    T = J.new_empty(0, 0)
    while True:
        basis = torch.cat([basis, block], 1)
        images = J.mT @ (J @ block)
        column = basis.mT @ images
        T = torch.cat([torch.cat([T, column[:-width]], 1), column.mT])
        block, R = torch.linalg.qr(images - basis @ column)
        block = torch.linalg.qr(block - basis @ (basis.mT @ block)).Q
        squares, vectors = torch.linalg.eigh(T)
        top = vectors[:, -k:]
        residual = (R @ top[-width:]).norm(dim=0) / squares[-k:].clamp_min(1e-12).sqrt()
        if float(residual.max()) <= TOLERANCE[J.dtype] * float(squares[-1].sqrt()):
            return ritz(J, basis @ vectors[:, -block_width(k) :], k)
        if basis.shape[1] + width > J.shape[1]:
            return full(J, k)


WAYS: dict[str, Callable[[Tensor, int], Triplets]] = {
    "full SVD": full,
    "eigh of JᵀJ": lambda J, k: one_by_one(gram, J, k),
    "block Krylov": lambda J, k: one_by_one(krylov, J, k),
    "tlc.svd": iterated,
}


def one_by_one(way: Callable[[Tensor, int], Triplets], J: Tensor, k: int) -> Triplets:
    triplets = [way(matrix, k) for matrix in (J if J.ndim == 3 else J[None])]
    U, S, Vh = (
        torch.stack([part.to(J.dtype) for part in parts])
        for parts in zip(*triplets, strict=True)
    )
    return (U, S, Vh) if J.ndim == 3 else (U[0], S[0], Vh[0])


def planted(S: Tensor, seed: int) -> tuple[Tensor, Triplets]:
    """Return a float32 matrix with these singular values and random vectors, and its
    triplets before rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    U, V = (
        torch.linalg.qr(
            torch.randn(len(S), len(S), generator=generator, dtype=S.dtype)
        ).Q
        for _ in range(2)
    )
    return ((U * S) @ V.mT).float(), (U, S, V.mT)


def stretched(S: Tensor, d: int) -> Tensor:
    """Return a spectrum of d values of the same shape: of the same quantiles."""
    return torch.nn.functional.interpolate(
        S[None, None], size=d, mode="linear", align_corners=True
    )[0, 0]


def errors(J: Tensor, truncated: Triplets, exact: Triplets) -> dict[str, float]:
    """Both residuals over σ_1; the angle of the top-k right subspace; the worst
    vector's. The largest of a batch.
    """
    U = truncated[0].double()
    S = truncated[1].double()
    V = truncated[2].double().mT
    J = J.double()
    k = S.shape[-1]
    first = S[..., :1]
    of_k = exact[2].double()[..., :k, :]
    outside = V - of_k.mT @ (of_k @ V)
    cosines = (of_k.mT * V).sum(-2).abs().clamp(max=1)
    return {
        "residual_right": float(
            ((J @ V - U * S[..., None, :]).norm(dim=-2) / first).max()
        ),
        "residual_left": float(
            ((J.mT @ U - V * S[..., None, :]).norm(dim=-2) / first).max()
        ),
        "sine_of_subspace": float(torch.linalg.matrix_norm(outside, 2).max()),
        "sine_of_worst_vector": float((1 - cosines.square()).sqrt().max()),
        "singular_values": float(
            ((S - exact[1].double()[..., :k]).abs() / first).max()
        ),
    }


def measure(
    name: str, J: Tensor, exact: Triplets, k: int, repeats: int
) -> dict[str, Any]:
    """Processor seconds (the fewest) and errors of every way."""
    ways = {
        way: run
        for way, run in WAYS.items()
        if J.shape[-1] <= LARGEST.get(way, math.inf)
    }
    seconds: dict[str, float] = dict.fromkeys(ways, math.inf)
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for way, run in ways.items():
            start = process_time()
            triplets = run(J, k)
            seconds[way] = min(seconds[way], process_time() - start)
            results[way] = {"seconds": seconds[way], **errors(J, triplets, exact)}
    spectrum = tlc.svd(J, k)
    steps = spectrum.steps.flatten().tolist()
    return {
        "matrices": name,
        "shape": list(J.shape),
        "k": k,
        "ways": results,
        "steps": steps,
        "method": spectrum.method,
    }


def table(run: dict[str, Any]) -> Table:
    """One case for reading."""
    drawn = Table(
        "",
        title=f"{run['matrices']}, {run['shape']}, k = {run['k']}",
        caption=run["method"],
    )
    columns = (
        "seconds",
        "× full SVD",
        "‖Jv − σu‖",
        "‖Jᵀu − σv‖",
        "subspace",
        "worst vector",
    )
    for header in columns:
        drawn.add_column(header, justify="right")
    for way, figures in run["ways"].items():
        keys = (
            "residual_right",
            "residual_left",
            "sine_of_subspace",
            "sine_of_worst_vector",
        )
        ratio = (
            run["ways"]["full SVD"]["seconds"] / figures["seconds"]
            if "full SVD" in run["ways"]
            else math.nan
        )
        drawn.add_row(
            way,
            f"{figures['seconds']:.3f}",
            f"{ratio:.1f}",
            *(f"{figures[key]:.0e}" for key in keys),
        )
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--d",
        type=int,
        nargs="+",
        default=[576, 1024, 2048],
        help="widths (default: 576 1024 2048)",
    )
    parser.add_argument(
        "--k",
        type=int,
        default=51,
        help="triplets; 51 is what a map of K = 50 needs (default: 51)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="runs of each; the fewest seconds count (default: 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help="(default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if min(options.d) < 2 * options.k or options.k < 1 or options.repeats < 1:
        parser.error(
            "--k and --repeats must be at least 1, and every --d at least twice --k"
        )
    console = Console(width=120)
    runs = []
    trace = tlc.trace(tlc.load_model(EMBEDDED_MODEL), PAPER_PROMPT, final_norm=True)
    J = tlc.block_jacobians(trace)
    exact = torch.linalg.svd(J.double())
    middle = exact[1][len(J) // 2]
    last = exact[1][-1]

    def add(*case: Any) -> None:
        runs.append(measure(*case, options.k, options.repeats))
        console.print(table(runs[-1]))

    add(f"{len(J)} Jacobians of {EMBEDDED_MODEL}", J, exact)
    for d in options.d:
        for name, S in (
            ("its middle layer's spectrum", middle),
            ("its last layer's spectrum", last),
        ):
            add(name, *planted(stretched(S, d), seed=d))
    results = {
        "repeats": options.repeats,
        "environment": environment(CPU),
        "runs": runs,
    }
    console.print(f"wrote {write(options.out, 'truncated_svd', results)}")


if __name__ == "__main__":
    main()
