"""Jacobians of some connections: computed once, decomposed once, read by all.

Every map, and everything else that is read off Jacobians and their singular vectors,
takes them from here: from `jacobians_in_turns`, which keeps none, or from a
`Decomposed`, which holds what is needed again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Path, Trace
from tl_coupling.jacobians.budget import (
    DEFAULT_OPTIONS,
    MOST_PROMPTS,
    Batch,
    Budget,
    JacobianOptions,
    MapSizes,
)
from tl_coupling.jacobians.connections import AnyFunction, Connection
from tl_coupling.jacobians.jacobian_cache import StoredMatrices
from tl_coupling.jacobians.jacobians import (
    MOST_SHARING,
    Jacobian,
    jacobians_of,
    jacobians_together_of,
)
from tl_coupling.jacobians.matrix_free import matrix_free
from tl_coupling.jacobians.plan import plan
from tl_coupling.progress import with_progress
from tl_coupling.spectra import (
    Matrix,
    Spectrum,
    check_cut,
    fitting_k,
    parallel_map,
    singular_values,
    svd,
)

# Entries of the images of rows' Jacobians that are in memory at once (float32: 1 GiB).
_MOST_IMAGES = 2**28

# A traced prompt, and those of its connections whose Jacobians are wanted.
Wanted = tuple[Trace, Sequence[Connection]]


class Rows(NamedTuple):
    """Neighbouring rows of a map: their Jacobians, and what is known of them alone.

    `paths`, the ways to the Jacobians by connection, may name others as well.
    """

    J: Float[Tensor, "n d d"] | Sequence[Matrix]
    singular_values: Float[Tensor, "n n_singular"]
    frobenius_norms: Float[Tensor, " n"]
    paths: dict[str, str]


@dataclass(frozen=True, eq=False)
class Decomposed:
    """The Jacobians of some connections, with their leading singular triplets.

    Each was computed once and decomposed once. The Jacobians themselves are kept where
    they are needed again: in memory, or in a temporary file where they do not fit.

    Attributes:
        connections: what the Jacobians are of, in order.
        k: how many leading triplets were asked for. `spectra` may hold one more, whose
            singular value says whether the cut at k falls inside a repeated one.
        spectra: of each Jacobian, `[n …]`.
        frobenius_norms: of each Jacobian, `[n]`.
        paths: the way in which each Jacobian was evaluated, by connection.
        trace: the traced prompt, unless the Jacobians came from elsewhere.
        jacobians: in order, where they are kept.
        products: of each Jacobian with vectors, where none was formed.
    """

    connections: Sequence[Connection]
    k: int
    spectra: Spectrum
    frobenius_norms: Float[Tensor, " n"]
    paths: dict[str, str]
    trace: Trace | None = None
    jacobians: Float[Tensor, "n d d"] | StoredMatrices | None = None
    products: Sequence[Matrix] | None = None

    @classmethod
    def from_jacobians(
        cls,
        J: Float[Tensor, "n d d"],
        connections: Sequence[Connection],
        k: int,
        n_triplets: int | None = None,
    ) -> "Decomposed":
        """Decompose given Jacobians, all together.

        Args:
            J: a stack of Jacobians.
            connections: what they are of.
            k: how many leading triplets are asked for.
            n_triplets: how many to compute; one more than k by default, if there is.
        """
        if n_triplets is None:
            # The one beyond k says whether the cut falls inside a repeated value.
            n_triplets = min(k + 1, J.shape[-1])
        spectra = svd(J, n_triplets)
        norms = torch.linalg.matrix_norm(J)
        return cls(connections, k, spectra, norms, {}, None, J)

    def __len__(self) -> int:
        return len(self.frobenius_norms)

    @property
    def leading(self) -> Spectrum:
        """The k leading triplets of each Jacobian."""
        return self.spectra.top(self.k)

    def jacobian(self, i: int) -> Float[Tensor, "d d"]:
        """Return the Jacobian at an index. Raises ValueError where none are kept."""
        if self.jacobians is None:
            raise ValueError("these Jacobians were not kept")
        return self.jacobians[i]

    def rows(self) -> Iterator[Rows]:
        """Yield the Jacobians one at a time; several on a GPU."""
        n = len(self)
        n_together = 1
        if self.products is None and self.spectra.S.device.type != "cpu":
            # All columns' vectors go through each row's Jacobian.
            n_images = n * self.k * self.spectra.U.shape[-2]
            n_together = max(1, _MOST_IMAGES // n_images)
        for start in range(0, n, n_together):
            end = min(n, start + n_together)
            S = self.spectra.S[start:end]
            norms = self.frobenius_norms[start:end]
            if self.products is not None:
                yield Rows(self.products[start:end], S, norms, self.paths)
            else:
                J = torch.stack([self.jacobian(i) for i in range(start, end)])
                yield Rows(J, S, norms, self.paths)
                # Not kept while the next are read.
                del J

    def check_cut(self) -> None:
        """Warn where σ_k and σ_{k+1} are equal to rounding."""
        check_cut(self.spectra.S, self.k, [str(c) for c in self.connections])


def decompose(
    trace: Trace,
    connections: Sequence[Connection],
    k: int,
    options: JacobianOptions = DEFAULT_OPTIONS,
) -> Decomposed:
    """Decompose the Jacobians of some connections, and keep none of them.

    Args:
        trace: a traced prompt.
        connections: whose Jacobians are decomposed.
        k: how many leading triplets are asked for.
        options: how Jacobians are computed.
    """
    sizes = MapSizes.from_trace(trace, 1, len(connections), k, rows_are_columns=False)
    budget = Budget.from_block(trace.blocks[0].call.module, sizes, options)
    wanted = [(trace, connections)]
    jacobians = jacobians_in_turns(wanted, options, budget=budget)
    (decomposed,) = _decomposed(wanted, jacobians, k, budget)
    return decomposed


def decompose_each(
    wanted: Iterable[Wanted],
    k: int | None,
    options: JacobianOptions,
    n_maps: int = 1,
    function: AnyFunction = "branches",
) -> Iterator[Decomposed]:
    """Decompose and keep each prompt's Jacobians, which are both rows and columns.

    Prompts of a model that is read from disk share its readings, and those that are
    computed together are held together; of any others, one at a time is.

    Args:
        wanted: for each prompt as many connections. An iterator is read as far as
            prompts share a reading.
        k: how many singular vectors are compared: 50, or all of a narrower model, by
            default.
        options: how Jacobians are computed.
        n_maps: how many maps are made of each prompt, which count for `max_memory`.
        function: as in `jacobians_of`.
    """
    for group in taken_together(wanted, options):
        trace, connections = group[0]
        n = len(connections)
        k_of_group = fitting_k(k, trace.d_model)
        by_products = _is_by_products(trace, k_of_group, options)
        sizes = MapSizes.from_trace(
            trace,
            n,
            n,
            k_of_group,
            n_maps=n_maps,
            n_prompts=1 if by_products else len(group),
            # By products no Jacobian is kept.
            rows_are_columns=not by_products,
        )
        budget = Budget.from_block(trace.blocks[0].call.module, sizes, options)
        if by_products:
            for own_trace, own in group:
                yield from _by_products(own_trace, [own], k_of_group, options, budget)
            continue
        matrix = trace.blocks[0].X.new_empty(trace.d_model, trace.d_model)
        stored = [StoredMatrices(n, matrix, budget.keeps_in_memory) for _ in group]
        jacobians = jacobians_in_turns(group, options, function, budget, stored)
        yield from _decomposed(group, jacobians, k_of_group, budget, stored)


def decompose_sides(
    trace: Trace,
    rows: Sequence[Connection],
    columns: Sequence[Connection],
    k: int | None,
    options: JacobianOptions,
) -> tuple[Iterator[Rows], Decomposed]:
    """Return the rows and the columns of a map: columns decomposed, rows to be read.

    Of rows that are the columns Jacobians are kept, and decomposed once. Others are
    computed as they are read, with the columns' in one loop of `progress`.
    """
    if rows == columns:
        (decomposed,) = decompose_each([(trace, columns)], k, options)
        return decomposed.rows(), decomposed
    k = fitting_k(k, trace.d_model)
    sizes = MapSizes.from_trace(
        trace, len(rows), len(columns), k, rows_are_columns=False
    )
    budget = Budget.from_block(trace.blocks[0].call.module, sizes, options)
    if _is_by_products(trace, k, options):
        sides = [columns, rows]
        decomposed, row_side = _by_products(trace, sides, k, options, budget)
        return row_side.rows(), decomposed
    jacobians = jacobians_in_turns([(trace, [*columns, *rows])], options, budget=budget)
    column_jacobians = islice(jacobians, len(columns))
    (decomposed,) = _decomposed([(trace, columns)], column_jacobians, k, budget)
    return _rows_in_passing(jacobians), decomposed


def _rows_in_passing(jacobians: Iterator[Jacobian]) -> Iterator[Rows]:
    """Yield Jacobians one at a time with all their singular values, and keep none."""
    for connection, J, path in jacobians:
        J = J[None]
        S = singular_values(J)
        norm = torch.linalg.matrix_norm(J)
        yield Rows(J, S, norm, {str(connection): path})
        # Not kept while the next is computed.
        del J


def _is_by_products(trace: Trace, k: int, options: JacobianOptions) -> bool:
    """Say whether Jacobians of a trace are known by their products with vectors."""
    if options.method == "auto" and not options.changes_jacobians:
        return plan(trace, k).cheaper == "products"
    return options.method == "products"


def taken_together(
    wanted: Iterable[Wanted], options: JacobianOptions = DEFAULT_OPTIONS
) -> Iterator[list[Wanted]]:
    """Yield prompts in groups: several of one model that is read from disk, or whose
    Jacobians are computed together, else one.

    One reading of the weights serves a group that is read. It has as many prompts as
    have Jacobians no larger than the weights that are read.
    """
    group: list[Wanted] = []
    for prompt in wanted:
        if group and not _goes_with(prompt, group, options):
            yield group
            group = []
        group.append(prompt)
    if group:
        yield group


def _goes_with(
    prompt: Wanted, group: Sequence[Wanted], options: JacobianOptions
) -> bool:
    """Say whether a prompt is taken together with others."""
    other_trace, other_connections = prompt
    trace, connections = group[0]
    if trace.is_streamed:
        if other_trace.model is not trace.model:
            return False
        weights = sum(p.numel() * p.element_size() for p in trace.model.parameters())
        # In float32, in which streamed models are linearised.
        jacobians = 4 * trace.n_layers * trace.d_model**2
        return len(group) < min(MOST_PROMPTS, weights // jacobians)
    # Each call of `trace` on a HuggingFace model makes a model around its blocks.
    has_same_blocks = other_trace.blocks[0].call.module is trace.blocks[0].call.module
    has_same_length = other_trace.n_pos == trace.n_pos
    if not has_same_blocks or not has_same_length or other_connections != connections:
        return False
    return len(group) < Batch.that_fits(trace, len(connections), options).n_prompts


def jacobians_in_turns(
    wanted: Sequence[Wanted],
    options: JacobianOptions,
    function: AnyFunction = "branches",
    budget: Budget | None = None,
    stored: Sequence[StoredMatrices] | None = None,
) -> Iterator[Jacobian]:
    """Yield the Jacobians of several prompts, which take turns at each connection.

    First comes the first connection of every prompt, then the second of every prompt. A
    block of a model that is read from disk is read once for all of them. Jacobians are
    computed when they are asked for, as many together as are computed at a time, and
    lie where the first block lives.

    Args:
        wanted: the prompts, each with as many connections.
        options: how Jacobians are computed.
        function: as in `jacobians_of`.
        budget: how many rows are computed at a time, and how many Jacobians may share
            work; by default the rows are those of `options`. How many blocks and prompts
            are computed together is in `options`.
        stored: where those of each prompt are kept; nowhere by default.
    """
    chunk_size = options.chunk_size
    n_sharing = MOST_SHARING
    if budget is not None:
        chunk_size = budget.chunk_size
        n_sharing = budget.n_sharing or MOST_SHARING
    trace, connections = wanted[0]
    batch = Batch.that_fits(trace, len(connections), options)
    streams: list[Iterator[Jacobian]]
    if not batch.is_one and function != "frozen" and _can_be_together(wanted):
        together = jacobians_together_of(
            [trace for trace, _ in wanted],
            connections,
            batch.n_connections,
            chunk_size=chunk_size,
            function=function,
        )
        # One gives those of all prompts in turns.
        streams = [together] * len(wanted)
    else:
        streams = [
            jacobians_of(
                trace,
                connections,
                chunk_size=chunk_size,
                n_sharing=n_sharing,
                function=function,
            )
            for trace, connections in wanted
        ]
    device = trace.blocks[0].X.device
    for turn in with_progress(range(len(connections)), options.progress, "Jacobians"):
        for prompt, stream in enumerate(streams):
            connection, J, path = next(stream)
            # In one layout, because sums round by the order of their terms in memory.
            J = J.to(device).contiguous()
            if options.change is not None:
                J = options.change(J)
            if stored is not None:
                stored[prompt].put(turn, J)
            yield Jacobian(connection, J, path)
            # Not kept while the next is computed.
            del J


def _can_be_together(wanted: Sequence[Wanted]) -> bool:
    """Say whether all prompts have the same connections, of one token to itself, and
    nobody keeps their Jacobians.
    """
    _, connections = wanted[0]
    position = connections[0].output_position
    return all(
        own == connections and trace.jacobian_cache is None for trace, own in wanted
    ) and all(c.input_position == c.output_position == position for c in connections)


def _by_products(
    trace: Trace,
    sides: Sequence[Sequence[Connection]],
    k: int,
    options: JacobianOptions,
    budget: Budget,
) -> list[Decomposed]:
    """Decompose Jacobians that are never formed, one after the other.

    A connection that is in several of the lists is decomposed once.
    """
    n_triplets = min(k + 1, trace.d_model)
    connections = list(dict.fromkeys(chain(*sides)))
    found = {
        connection: matrix_free(trace, connection, n_triplets, budget.chunk_size)
        for connection in with_progress(connections, options.progress, "products")
    }
    return [
        Decomposed(
            side,
            k,
            Spectrum.cat([found[connection].spectrum for connection in side]),
            torch.cat([found[connection].frobenius_norm for connection in side]),
            {str(connection): found[connection].path for connection in side},
            trace,
            products=[found[connection].J for connection in side],
        )
        for side in sides
    ]


def _decomposed(
    wanted: Sequence[Wanted],
    jacobians: Iterator[Jacobian],
    k: int,
    budget: Budget,
    stored: Sequence[StoredMatrices] | None = None,
) -> list[Decomposed]:
    """Decompose the Jacobians of several prompts that took turns.

    Args:
        wanted: the prompts, with the connections that are decomposed.
        jacobians: from `jacobians_in_turns`.
        k: how many leading triplets are asked for.
        budget: how many are decomposed at a time.
        stored: those that `jacobians_in_turns` fills, which are handed on with the
            results; without them no Jacobian is kept.
    """
    trace, _ = wanted[0]
    # The one beyond k says whether the cut falls inside a repeated value.
    n_triplets = min(k + 1, trace.d_model)

    def triplets(*batch: Jacobian) -> list[tuple[Spectrum, Tensor, Path]]:
        """Return spectrum, Frobenius norm and path of each of a batch, decomposed
        together.
        """
        J = batch[0].J[None]
        if len(batch) > 1:
            J = torch.stack([jacobian.J for jacobian in batch])
        spectra = svd(J, n_triplets)
        norms = torch.linalg.matrix_norm(J)
        return [
            (spectra[i : i + 1], norms[i : i + 1], jacobian.path)
            for i, jacobian in enumerate(batch)
        ]

    device = trace.blocks[0].X.device
    if device.type == "cpu":
        batches = parallel_map(triplets, jacobians, device, budget.n_svds)
    else:
        batches = []
        while batch := list(islice(jacobians, budget.n_svds)):
            batches.append(triplets(*batch))
            # Not kept while the next are computed.
            del batch
    results = list(chain(*batches))
    decomposed: list[Decomposed] = []
    for prompt, (trace, connections) in enumerate(wanted):
        # Prompts took turns, so that each has every n-th.
        spectra, norms, paths = zip(*results[prompt :: len(wanted)], strict=True)
        decomposed.append(
            Decomposed(
                connections,
                k,
                Spectrum.cat(spectra),
                torch.cat(norms),
                dict(zip(map(str, connections), paths, strict=True)),
                trace,
                None if stored is None else stored[prompt],
            )
        )
    return decomposed
