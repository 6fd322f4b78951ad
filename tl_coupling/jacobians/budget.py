"""What a comparison needs in memory, and how it keeps within a limit."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import nn

from tl_coupling.blocks import Trace, chunk_that_fits
from tl_coupling.measures import Change
from tl_coupling.models import facts_of, input_device
from tl_coupling.progress import Progress

# Copies of the widest activation of a chunk, and of a matrix in its SVD, that are in
# memory at once: measured.
_ACTIVATIONS = 4
_OF_SVD = 12
# Activations as wide as the widest, for each row of a Jacobian of a batch, that are in
# memory at once.
_OF_BATCH = 6
# The most prompts of a batch.
MOST_PROMPTS = 32
# The share of the free memory that Jacobians may take unless a limit is given.
_SHARE = 0.5
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Decimal units, as disks are sold, beside binary ones, as memory is.
_UNITS |= {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def n_bytes(limit: int | str) -> int:
    """Return a number of bytes, from a number or from a text such as "3GiB"."""
    # A number alone is one of bytes.
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]*)\s*", str(limit))
    size = 0
    if match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(
            'must be a number of bytes, or a text such as "3GiB" or "500MB", '
            f"got {limit!r}"
        )
    return size


def format_bytes(size: int | float) -> str:
    """Return a number of bytes as a text for reading, such as "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.3g} {unit}"
    return f"{size:.3g} B"


# How singular triplets and coupling matrices are computed.
Method = Literal["jacobians", "products"]
# As public functions take it: "auto" is the one that takes less.
AnyMethod = Literal[Method, "auto"]


def check_method(method: AnyMethod, changes_jacobians: bool) -> None:
    """Raise ValueError where Jacobians are changed that are not formed."""
    if method == "products" and changes_jacobians:
        raise ValueError(
            "`without` and `metric` need the Jacobians: leave them out, or take "
            '`method="jacobians"`'
        )


# How much memory may be taken: bytes, or "3GiB".
MemoryLimit = Annotated[int | str, n_bytes]


@dataclass(frozen=True)
class JacobianOptions:
    """How Jacobians are computed, as the public functions take it.

    Attributes:
        chunk_size: rows of a Jacobian to compute at a time; by default what fits.
        max_memory: bytes, or a text such as "3GiB", for all that is computed.
        progress: wraps the loop over Jacobians; by default a bar in a terminal or
            notebook, `False` for none.
        change: what is done to each Jacobian before it is decomposed.
        method: whether Jacobians are formed, or known by their products with vectors;
            `"auto"` is decided for each trace.
        batch: how many Jacobians are computed by one call, of blocks and prompts; by
            default what fits on a GPU, and one elsewhere.

    Raises:
        ValueError: a change of Jacobians that are not formed.
    """

    chunk_size: int | None = None
    max_memory: int | str | None = None
    progress: Progress | None = None
    change: Change | None = None
    method: AnyMethod = "jacobians"
    batch: int | None = None

    def __post_init__(self) -> None:
        """Raise where a change needs what is not formed."""
        check_method(self.method, self.changes_jacobians)

    @property
    def changes_jacobians(self) -> bool:
        """Whether anything is done to Jacobians before they are decomposed."""
        return self.change is not None and bool(self.change.provenance)


DEFAULT_OPTIONS = JacobianOptions()


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
        cls,
        trace: Trace,
        n_rows: int,
        n_columns: int,
        k: int,
        *,
        n_maps: int = 1,
        n_prompts: int = 1,
        rows_are_columns: bool = True,
    ) -> "MapSizes":
        """Return the sizes of maps of a traced prompt, or of several like it."""
        itemsize = trace.blocks[0].X.element_size()
        return cls(
            *(trace.d_model, itemsize, n_rows, n_columns, k),
            *(n_maps, n_prompts, rows_are_columns),
        )


@dataclass(frozen=True)
class Budget:
    """What a comparison takes, and how many it computes at a time to keep to a limit.

    Bytes are those beside the model and the traced prompts.

    Attributes:
        result: bytes of the matrices A of one prompt.
        spectra: of the columns' singular vectors, twice, because they are laid out
            anew, and their images.
        jacobians: of those that are needed twice, as rows and as columns.
        matrix: of one Jacobian.
        seed_bytes: what computing one row of a Jacobian takes.
        n_seeds: rows of a Jacobian that are computed at a time, as estimated.
        n_svds: Jacobians that are decomposed at a time, on a CPU each by a thread.
        chunk_size: rows of a Jacobian that must be computed at a time, if limited.
        n_sharing: Jacobians that may share work, if limited.
        keeps_in_memory: whether those that are kept are kept in memory, or in a file.
    """

    result: int
    spectra: int
    jacobians: int
    matrix: int
    seed_bytes: int
    n_seeds: int
    n_svds: int
    chunk_size: int | None = None
    n_sharing: int | None = None
    keeps_in_memory: bool = True

    @classmethod
    def from_block(
        cls, block: nn.Module, sizes: MapSizes, options: JacobianOptions
    ) -> "Budget":
        """Return what maps of these sizes take, of a model with such blocks.

        Raises ValueError where they do not fit into `options.max_memory`.
        """
        d = sizes.d_model
        itemsize = sizes.itemsize
        n_columns = sizes.n_prompts * sizes.n_columns
        n_kept = sizes.n_prompts * sizes.n_rows if sizes.rows_are_columns else 0
        # The longest row or column of the block's matrices is the widest activation; at
        # least 4 d, as is usual.
        # A narrow MLP still leaves attention's queries, keys and values side by side.
        width = max(4, -(-_widest(block) // d))
        device = input_device(block)
        n_workers = n_columns
        if device.type == "cpu":
            n_workers = max(1, torch.get_num_threads() // 2)
        n_pairs = sizes.n_rows * sizes.n_columns
        budget = cls(
            # A of every pair, `k²` numbers each, in as many orientations as there are
            # maps.
            result=sizes.n_maps * n_pairs * sizes.k**2 * itemsize,
            spectra=5 * n_columns * sizes.k * d * itemsize,
            jacobians=n_kept * d * d * itemsize,
            matrix=d * d * itemsize,
            seed_bytes=_ACTIVATIONS * width * d * itemsize,
            # There are only d rows.
            n_seeds=min(d, chunk_that_fits(width, d)),
            n_svds=min(n_columns, n_workers),
            chunk_size=options.chunk_size,
        )
        if options.max_memory is not None:
            return budget._limited(n_bytes(options.max_memory))
        free = _SHARE * free_memory(device)
        n_that_fit = free / (_OF_SVD * budget.matrix)
        return replace(
            budget,
            n_svds=max(1, int(min(budget.n_svds, n_that_fit))),
            keeps_in_memory=fits_in_memory(budget.jacobians, block),
        )

    @property
    def working(self) -> int:
        """What a Jacobian takes while it is computed, beside the SVDs of others."""
        jacobian = self.n_seeds * self.seed_bytes + self.matrix
        svds = self.n_svds * _OF_SVD * self.matrix
        # The SVDs' own matrices, and the one that waits for a thread.
        waiting = (self.n_svds + 1) * self.matrix
        return jacobian + svds + waiting

    @property
    def working_and_result(self) -> int:
        """All but the Jacobians that are kept."""
        return self.result + self.spectra + self.working

    def _limited(self, limit: int) -> "Budget":
        """Return the budget with fewer rows and matrices at a time, where it must be.

        Raises ValueError where that is not enough.
        """
        # Halved together: neither alone is always what takes most.
        budget = self
        while budget.working_and_result > limit and (
            budget.n_seeds > 1 or budget.n_svds > 1
        ):
            budget = replace(
                budget,
                n_seeds=max(1, budget.n_seeds // 2),
                n_svds=max(1, budget.n_svds // 2),
            )
        free = limit - budget.working_and_result
        if free < 0:
            least = format_bytes(budget.working_and_result)
            raise ValueError(
                f"`max_memory` must be at least {least} for this comparison, "
                f"got {format_bytes(limit)}"
            )
        keeps_in_memory = budget.jacobians <= free
        if keeps_in_memory:
            free -= budget.jacobians
        return replace(
            budget,
            chunk_size=budget.chunk_size or budget.n_seeds,
            # One is part of the working memory; those that share work are held
            # together.
            n_sharing=1 + free // budget.matrix,
            keeps_in_memory=keeps_in_memory,
        )


class Batch(NamedTuple):
    """How many connections of how many prompts are computed together."""

    n_connections: int = 1
    n_prompts: int = 1

    @property
    def is_one(self) -> bool:
        """Whether each Jacobian is computed alone."""
        return self.n_connections * self.n_prompts == 1

    @classmethod
    def that_fits(
        cls, trace: Trace, n_connections: int, options: JacobianOptions
    ) -> "Batch":
        """Return the batch of `options.batch` Jacobians, or what fits.

        Prompts share weights, blocks do not: as many blocks as there are come first.
        """
        device = trace.blocks[0].X.device
        if trace.is_streamed or (options.batch is None and device.type == "cpu"):
            return cls()
        most = options.batch or n_connections * MOST_PROMPTS
        memory = math.inf
        if options.max_memory is not None:
            memory = n_bytes(options.max_memory)
        elif options.batch is None:
            memory = _SHARE * free_memory(device)
        d = trace.d_model
        itemsize = trace.blocks[0].X.element_size()
        block = trace.blocks[0].call.module
        # In the precision of the Jacobians, and stacked.
        of_block = 2 * itemsize * sum(p.numel() for p in block.parameters())
        width = max(4 * d, _widest(block))
        of_jacobian = itemsize * d * (_OF_SVD * d + _OF_BATCH * width)
        n_that_fit = min(most, memory / (of_block + of_jacobian))
        n_blocks = int(max(1, min(n_connections, n_that_fit)))
        if n_blocks < n_connections:
            return cls(n_blocks)
        left = memory - n_blocks * of_block
        n_more = min(most // n_blocks, left / (n_blocks * of_jacobian))
        return cls(n_blocks, int(max(1, n_more)))


def _widest(block: nn.Module) -> int:
    """Return the longest row or column of a block's matrices."""
    widths = [max(p.shape[-2:]) for p in block.parameters() if p.ndim > 1]
    return max(widths, default=0)


def fits_in_memory(size: int, block: nn.Module) -> bool:
    """Say whether Jacobians of so many bytes are kept in memory if no limit is given.

    They are if they take no more than half of what is free; of a model that is read
    from disk, no more than a block's weights.
    """
    # Its user chose to hold one block: Jacobians get no more room than that.
    if facts_of(block).is_streamed:
        return size <= 4 * sum(p.numel() for p in block.parameters())
    return size <= _SHARE * free_memory(input_device(block))


def free_memory(device: torch.device) -> float:
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
