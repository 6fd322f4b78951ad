"""What a comparison needs in memory, and where its Jacobians are kept: there, or in a
file where they do not fit.
"""

import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tl_coupling.gradients.evaluation import chunk_that_fits
from tl_coupling.models import facts_of
from tl_coupling.traces import Trace

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Copies of the widest activation of a chunk, and of a matrix in its SVD, that are in
# memory at once: measured.
_ACTIVATIONS, _OF_SVD = 4, 12
# Entries of the matrices whose SVDs are taken together (float32: 4 MiB), at least one
# for each thread.
_SVD_BUDGET = 2**20
# Of the memory that is free, what Jacobians may take unless a limit is given.
_SHARE = 0.5
_MOST_PROMPTS = 32


def n_bytes(limit: int | str) -> int:
    """A number of bytes, from one or from a text such as "3GiB"."""
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]*)\s*", str(limit))
    if (
        not found
        or found[2] not in _UNITS
        or (size := int(float(found[1]) * _UNITS[found[2]])) < 1
    ):
        raise ValueError(
            f'must be a number of bytes, or a text such as "3GiB" or "500MB", got {limit!r}'
        )
    return size


def _is_size(limit: int | str) -> None:
    n_bytes(limit)


# How much memory may be taken: bytes, or "3GiB".
MemoryLimit = Annotated[int | str, _is_size]


def in_words(size: int | float) -> str:
    """A number of bytes for reading."""
    unit = next(
        unit
        for unit in ("TiB", "GiB", "MiB", "KiB", "B")
        if size >= _UNITS[unit] or unit == "B"
    )
    return f"{size / _UNITS[unit]:.3g} {unit}"


@dataclass(frozen=True)
class Needs:
    """What a comparison needs beside the model and the traced prompts, in bytes.

    Attributes:
        result: the matrices A of one prompt.
        spectra: the columns' singular vectors, twice, because they are laid out anew,
            and their images.
        jacobians: those that are needed twice, as rows and as columns.
        matrix: one Jacobian.
        of_seed: what computing one row of a Jacobian takes.
        chunk_size: rows that are computed at a time.
        at_once: Jacobians that are computed before their SVDs are taken.
    """

    result: int
    spectra: int
    jacobians: int
    matrix: int
    of_seed: int
    chunk_size: int
    at_once: int

    @classmethod
    def of(
        cls,
        block: nn.Module,
        d: int,
        itemsize: int,
        n_rows: int,
        n_cols: int,
        k: int,
        n_maps: int,
        same: bool,
    ) -> "Needs":
        """Those of `n_maps` maps of a width; `same` if rows and columns are the same
        connections.
        """
        # The longest row or column of the block's matrices is the widest activation; at
        # least 4 d, as is usual.
        longest = max(
            (max(p.shape[-2:]) for p in block.parameters() if p.ndim > 1), default=0
        )
        width, n_threads = max(4, -(-longest // d)), torch.get_num_threads()
        return cls(
            result=n_maps * n_rows * n_cols * k * k * itemsize,
            spectra=5 * n_cols * k * d * itemsize,
            jacobians=same * n_rows * d * d * itemsize,
            matrix=d * d * itemsize,
            of_seed=_ACTIVATIONS * width * d * itemsize,
            chunk_size=min(d, chunk_that_fits(width, d)),
            at_once=min(n_cols, n_threads * max(1, _SVD_BUDGET // (n_threads * d**2))),
        )

    @property
    def working(self) -> int:
        """What a Jacobian takes while it is computed, or SVDs while they are taken,
        each in a thread.
        """
        jacobian = self.chunk_size * self.of_seed + self.matrix
        svds = min(self.at_once, torch.get_num_threads()) * _OF_SVD * self.matrix
        return max(jacobian, svds) + 2 * self.at_once * self.matrix

    @property
    def beside_jacobians(self) -> int:
        """All but the Jacobians that are kept."""
        return self.result + self.spectra + self.working

    def within(self, limit: int) -> "Needs":
        """With fewer rows and matrices at a time, if need be. Raises ValueError where
        that is not enough.
        """
        needs = self
        while needs.beside_jacobians > limit and (
            needs.chunk_size > 1 or needs.at_once > 1
        ):
            needs = replace(
                needs,
                chunk_size=max(1, needs.chunk_size // 2),
                at_once=max(1, needs.at_once // 2),
            )
        if (least := needs.beside_jacobians) > limit:
            wanted = f"at least {in_words(least)} for this comparison"
            raise ValueError(f"`max_memory` must be {wanted}, got {in_words(limit)}")
        return needs

    def kept_in_memory(self, limit: int | None, block: nn.Module) -> bool:
        """Whether the Jacobians that are needed twice are kept in memory.

        Without a limit, if they take no more than half of what is free; of a model that
        is read from disk, no more than a block's weights.
        """
        weights = list(block.parameters())
        if limit is not None:
            return self.jacobians <= limit - self.beside_jacobians
        if facts_of(block).is_streamed:
            return self.jacobians <= 4 * sum(p.numel() for p in weights)
        return self.jacobians <= _SHARE * _free_memory(
            weights[0].device if weights else torch.device("cpu")
        )


def _free_memory(device: torch.device) -> float:
    """Bytes that are free on a device; infinitely many where that is not known."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, IndexError, ValueError):
        if device.type == "cpu":
            return (
                float(
                    Path("/proc/meminfo")
                    .read_text()
                    .split("MemAvailable:")[1]
                    .split()[0]
                )
                * 1024
            )
    return float("inf")


class Shelf:
    """Matrices of one shape, put down in order: in memory, or in a temporary file.

    The file has no name where the system allows that (not on Windows): nothing of it is
    left, however this ends.
    """

    def __init__(self, n: int, like: Float[Tensor, "d d"], in_memory: bool) -> None:
        self._held: Tensor | None = None
        self._file: IO[bytes] | None = None
        self._like, self._size = like.new_empty(0), like.shape
        # Where there is no room after all, in the file.
        with suppress(MemoryError, torch.OutOfMemoryError):
            self._held = like.new_empty(n, *like.shape) if in_memory else None
        if self._held is None:
            self._file = tempfile.TemporaryFile(prefix="tl_coupling_")  # noqa: SIM115 (it lives as long as the shelf)
            weakref.finalize(self, self._file.close)

    def put(self, start: int, matrices: Float[Tensor, "n d d"]) -> None:
        """Put matrices down from an index on."""
        if self._held is not None:
            self._held[start : start + len(matrices)] = matrices
        else:
            assert self._file is not None
            self._file.seek(start * matrices[0].nbytes)
            self._file.write(matrices.contiguous().cpu().numpy().data)

    def take(self, i: int) -> Float[Tensor, "d d"]:
        """The matrix at an index."""
        if self._held is not None:
            return self._held[i]
        assert self._file is not None
        matrix = torch.empty(self._size, dtype=self._like.dtype)
        self._file.seek(i * matrix.nbytes)
        self._file.readinto(matrix.numpy().data)  # type: ignore[attr-defined]
        return matrix.to(self._like.device)


def sharing_a_sweep(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Traces in groups: several of one model that is read from disk, where one reading
    serves all; else one by one.

    As many as have Jacobians no larger than the weights that are read.
    """
    group: list[Trace] = []
    for one in traces:
        if group and (one.model is not group[0].model or len(group) >= _n_sharing(one)):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _n_sharing(trace: Trace) -> int:
    if not trace.is_streamed:
        return 1
    weights = sum(p.numel() * p.element_size() for p in trace.model.parameters())
    return max(
        1, min(_MOST_PROMPTS, weights // (4 * trace.n_layers * trace.d_model**2))
    )
