"""What a comparison needs in memory, and how it keeps within a limit."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tl_coupling.blocks import Trace, chunk_that_fits
from tl_coupling.jacobians.options import JacobianOptions
from tl_coupling.jacobians.sizes import format_bytes, n_bytes
from tl_coupling.models import facts_of

# Copies of the widest activation of a chunk, and of a matrix in its SVD, that are in
# memory at once: measured.
_ACTIVATIONS = 4
_OF_SVD = 12
# Of the memory that is free, what Jacobians may take unless a limit is given.
_SHARE = 0.5


@dataclass(frozen=True)
class MapSizes:
    """How many matrices, and how large, the maps of some prompts are made of.

    Attributes:
        d_model: rows, and columns, of a Jacobian.
        itemsize: bytes of an entry.
        n_rows: Jacobians J_1 of one prompt.
        n_columns: Jacobians of one prompt that give singular vectors.
        k: singular vectors that are compared.
        n_maps: maps of one prompt, one for each orientation.
        n_prompts: prompts whose Jacobians are computed together.
        rows_are_columns: whether each Jacobian is needed in both roles, and so kept.
    """

    d_model: int
    itemsize: int
    n_rows: int
    n_columns: int
    k: int
    n_maps: int = 1
    n_prompts: int = 1
    rows_are_columns: bool = True

    @classmethod
    def from_trace(
        cls, trace: Trace, n_rows: int, n_columns: int, k: int
    ) -> "MapSizes":
        """Return the sizes of one map of a traced prompt."""
        itemsize = trace.blocks[0].X.element_size()
        return cls(trace.d_model, itemsize, n_rows, n_columns, k)


@dataclass(frozen=True)
class Needs:
    """What a comparison needs beside the model and the traced prompts, in bytes.

    Attributes:
        result: the matrices A of one prompt.
        spectra: the columns' singular vectors, twice, because they are laid out anew,
            and their images.
        jacobians: those that are needed twice, as rows and as columns.
        matrix: one Jacobian.
        seed_bytes: what computing one row of a Jacobian takes.
        chunk_size: rows that are computed at a time.
        n_svds: Jacobians whose SVDs are taken at a time, each by a thread.
    """

    result: int
    spectra: int
    jacobians: int
    matrix: int
    seed_bytes: int
    chunk_size: int
    n_svds: int

    @classmethod
    def from_block(cls, block: nn.Module, sizes: MapSizes) -> "Needs":
        """Return what maps of these sizes need, of a model with such blocks."""
        d, itemsize = sizes.d_model, sizes.itemsize
        n_columns = sizes.n_prompts * sizes.n_columns
        n_kept = sizes.n_prompts * sizes.n_rows if sizes.rows_are_columns else 0
        # The longest row or column of the block's matrices is the widest activation; at
        # least 4 d, as is usual.
        # A narrow MLP still leaves attention's queries, keys and values side by side.
        widths = [max(p.shape[-2:]) for p in block.parameters() if p.ndim > 1]
        width = max(4, -(-max(widths, default=0) // d))
        n_workers = max(1, torch.get_num_threads() // 2)
        n_pairs = sizes.n_rows * sizes.n_columns
        return cls(
            # A of every pair, `k²` numbers each, in as many orientations as there are maps.
            result=sizes.n_maps * n_pairs * sizes.k**2 * itemsize,
            spectra=5 * n_columns * sizes.k * d * itemsize,
            jacobians=n_kept * d * d * itemsize,
            matrix=d * d * itemsize,
            seed_bytes=_ACTIVATIONS * width * d * itemsize,
            # There are only d rows.
            chunk_size=min(d, chunk_that_fits(width, d)),
            n_svds=min(n_columns, n_workers),
        )

    @property
    def working(self) -> int:
        """What a Jacobian takes while it is computed, beside the SVDs of others."""
        jacobian = self.chunk_size * self.seed_bytes + self.matrix
        svds = self.n_svds * _OF_SVD * self.matrix
        # The SVDs' own matrices, and the one that waits for a thread.
        waiting = (self.n_svds + 1) * self.matrix
        return jacobian + svds + waiting

    @property
    def working_and_result(self) -> int:
        """All but the Jacobians that are kept."""
        return self.result + self.spectra + self.working

    def limited(self, limit: int) -> "Needs":
        """Return the needs with fewer rows and matrices at a time, where they must be.

        Raises ValueError where that is not enough.
        """
        # Halved together: neither alone is always what takes most.
        needs = self
        while needs.working_and_result > limit and (
            needs.chunk_size > 1 or needs.n_svds > 1
        ):
            needs = replace(
                needs,
                chunk_size=max(1, needs.chunk_size // 2),
                n_svds=max(1, needs.n_svds // 2),
            )
        if (least := needs.working_and_result) > limit:
            wanted = f"at least {format_bytes(least)} for this comparison"
            raise ValueError(
                f"`max_memory` must be {wanted}, got {format_bytes(limit)}"
            )
        return needs

    def kept_in_memory(self, limit: int | None, block: nn.Module) -> bool:
        """Say whether the Jacobians that are needed twice are kept in memory."""
        if limit is not None:
            return self.jacobians <= limit - self.working_and_result
        return fits_in_memory(self.jacobians, block)


@dataclass(frozen=True)
class Budget:
    """How many are computed at a time, so that a comparison keeps within its limit.

    Attributes:
        n_svds: Jacobians that are decomposed together.
        chunk_size: rows of a Jacobian that are computed at a time, if limited.
        n_sharing: Jacobians that may share work, if limited.
        keeps_in_memory: whether those that are kept are kept in memory, or in a file.
    """

    n_svds: int
    chunk_size: int | None
    n_sharing: int | None
    keeps_in_memory: bool

    @classmethod
    def from_block(
        cls, block: nn.Module, sizes: MapSizes, options: JacobianOptions
    ) -> "Budget":
        """Return what maps of these sizes may take, of a model with such blocks."""
        needs = Needs.from_block(block, sizes)
        if options.max_memory is None:
            keeps_in_memory = needs.kept_in_memory(None, block)
            free = _SHARE * _free_memory(torch.device("cpu"))
            n_that_fit = free / (_OF_SVD * needs.matrix)
            n_svds = max(1, int(min(needs.n_svds, n_that_fit)))
            return cls(n_svds, options.chunk_size, None, keeps_in_memory)
        limit = n_bytes(options.max_memory)
        needs = needs.limited(limit)
        keeps_in_memory = needs.kept_in_memory(limit, block)
        free_bytes = limit - needs.working_and_result
        if keeps_in_memory:
            free_bytes -= needs.jacobians
        return cls(
            n_svds=needs.n_svds,
            chunk_size=options.chunk_size or needs.chunk_size,
            # One is part of the working memory; those that share work are held together.
            n_sharing=1 + free_bytes // needs.matrix,
            keeps_in_memory=keeps_in_memory,
        )


def fits_in_memory(size: int, block: nn.Module) -> bool:
    """Say whether Jacobians of so many bytes are kept in memory if no limit is given.

    They are if they take no more than half of what is free; of a model that is read
    from disk, no more than a block's weights.
    """
    weights = list(block.parameters())
    # Its user chose to hold one block: Jacobians get no more room than that.
    if facts_of(block).is_streamed:
        return size <= 4 * sum(p.numel() for p in weights)
    device = weights[0].device if weights else torch.device("cpu")
    return size <= _SHARE * _free_memory(device)


def _free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device; infinity where that is not known."""
    if device.type == "cuda":
        # The other number is the total.
        return float(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        # Elsewhere than on Linux there is no such file.
        with suppress(OSError, IndexError, ValueError):
            report = Path("/proc/meminfo").read_text()
            kibibytes = report.split("MemAvailable:")[1].split()[0]
            return float(kibibytes) * 1024
    return float("inf")
