"""Jacobians of some connections: computed once, decomposed once, read by all.

Every map, and everything else that is read off Jacobians and their singular vectors,
takes them from here: from a `Decomposed`, which holds what is needed again, or from a
`Passing`, whose Jacobians are gone once they have been read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import is_out_of_memory
from tl_coupling.jacobians.connections import Connection, Function
from tl_coupling.jacobians.jacobians import MOST_SHARING, jacobians_of
from tl_coupling.jacobians.memory import Budget, MapSizes
from tl_coupling.jacobians.options import DEFAULT_OPTIONS, JacobianOptions
from tl_coupling.jacobians.shelf import Shelf
from tl_coupling.spectra import (
    SimilarRanks,
    Spectrum,
    background_map,
    check_cut,
    fitting_k,
    singular_values,
    svd,
)
from tl_coupling.traces import Trace

Result = TypeVar("Result")
# Of a model that is read from disk, the most prompts that share one reading.
MOST_PROMPTS = 32


class Request(NamedTuple):
    """Connections of one traced prompt whose Jacobians are wanted."""

    trace: Trace
    connections: Sequence[Connection]


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
    """

    connections: Sequence[Connection]
    k: int
    spectra: Spectrum
    frobenius_norms: Float[Tensor, " n"]
    paths: dict[str, str]
    trace: Trace | None = None
    taken_from: Callable[[int], Tensor] | None = None

    @classmethod
    def of(
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
            n_triplets = min(k + 1, J.shape[-1])
        spectra = svd(J, n_triplets)
        norms = torch.linalg.matrix_norm(J)
        return cls(connections, k, spectra, norms, {}, None, J.__getitem__)

    def __len__(self) -> int:
        return len(self.frobenius_norms)

    @property
    def leading(self) -> Spectrum:
        """The k leading triplets of each Jacobian."""
        return self.spectra.top(self.k)

    def jacobian(self, i: int) -> Float[Tensor, "d d"]:
        """Return the Jacobian at an index. Raises ValueError where none are kept."""
        if self.taken_from is None:
            raise ValueError("these Jacobians were not kept")
        return self.taken_from(i)

    def parts(self) -> Iterator["Part"]:
        """Yield the Jacobians, one at a time."""
        for i in range(len(self)):
            yield Part(
                self.jacobian(i)[None],
                self.spectra.S[i : i + 1],
                self.frobenius_norms[i : i + 1],
            )

    def check_cut(self) -> None:
        """Warn where σ_k and σ_{k+1} are equal to rounding."""
        check_cut(self.spectra.S, self.k, [str(c) for c in self.connections])


class Part(NamedTuple):
    """Some neighbouring Jacobians of a list, as they are read."""

    J: Float[Tensor, "n d d"]
    singular_values: Float[Tensor, "n n_singular"]
    frobenius_norms: Float[Tensor, " n"]


class Passing:
    """Jacobians that are computed when they are read, once, and are not kept.

    `paths`, the way in which each was evaluated, is complete when all have been read.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        batches: Iterator[Float[Tensor, "n d d"]],
        paths: dict[str, str],
    ) -> None:
        self.connections = connections
        self.paths = paths
        self._batches = batches

    def __len__(self) -> int:
        return len(self.connections)

    def parts(self) -> Iterator[Part]:
        """Yield the Jacobians, some at a time, with all their singular values."""
        for J in self._batches:
            norms = torch.linalg.matrix_norm(J)
            S = torch.cat(_in_halves(singular_values, J))
            yield Part(J, S, norms)
            # Not kept while the next are computed.
            del J


def decompose(
    trace: Trace,
    connections: Sequence[Connection],
    k: int,
    options: JacobianOptions = DEFAULT_OPTIONS,
    *,
    n_triplets: int | None = None,
) -> Decomposed:
    """Decompose the Jacobians of some connections, all together, and keep none of them.

    Args:
        trace: a traced prompt.
        connections: whose Jacobians are decomposed.
        k: how many leading triplets are asked for.
        options: how Jacobians are computed.
        n_triplets: how many to compute; one more than k by default, if there is.
    """
    request = Request(trace, connections)
    source = _Source([request], options)
    n = len(connections)
    (decomposed,) = _decomposed(
        [request], source, source.batches(n, n), k, n_triplets=n_triplets
    )
    return decomposed


def passing(
    trace: Trace,
    connections: Sequence[Connection],
    options: JacobianOptions = DEFAULT_OPTIONS,
    *,
    function: Function = "branches",
    dtype: torch.dtype | None = None,
) -> Passing:
    """Return Jacobians to be read one by one, each with all its singular values.

    Args:
        trace: a traced prompt.
        connections: whose Jacobians are read, in this order.
        options: how they are computed.
        function: as in `block_jacobian`.
        dtype: what they are converted to before they are decomposed.
    """
    source = _Source([Request(trace, connections)], options, function=function)
    return Passing(connections, source.singles(dtype), source.paths[0])


def all_singular_values(
    trace: Trace,
    connections: Sequence[Connection],
    options: JacobianOptions = DEFAULT_OPTIONS,
) -> tuple[Float[Tensor, "n d"], dict[str, str]]:
    """Return all singular values of some Jacobians, and the ways to these.

    The Jacobians are not kept. The values of one are computed beside the next.

    Args:
        trace: a traced prompt.
        connections: whose Jacobians are decomposed. Neighbours in the list should have
            about the same rank, such as those of one block and one output.
        options: how Jacobians are computed.
    """
    source = _Source([Request(trace, connections)], options)
    values = background_map(SimilarRanks(), source.singles(), _device(trace))
    return torch.cat(values), source.paths[0]


def decompose_each(
    requests: Iterable[Request],
    k: int | None,
    options: JacobianOptions,
    n_maps: int = 1,
) -> Iterator[Decomposed]:
    """Decompose and keep each prompt's Jacobians, which are both rows and columns.

    Prompts of a model that is read from disk share its readings; of any other, one
    prompt at a time is held.

    Args:
        requests: for each prompt as many connections. An iterator is read as far as
            prompts share a reading.
        k: how many singular vectors are compared: 50, or all of a narrower model, by
            default.
        options: how Jacobians are computed.
        n_maps: how many maps are made of each prompt, which count for `max_memory`.
    """
    for group in sharing_a_reading(requests):
        trace, connections = group[0]
        n = len(connections)
        k_of_group = fitting_k(k, trace.d_model)
        sizes = MapSizes.of(trace, n, n, k_of_group)
        sizes = replace(sizes, n_maps=n_maps, n_prompts=len(group))
        budget = Budget.of(trace.blocks[0].call.module, sizes, options)
        source = _Source(group, options, budget)
        batches = source.batches(n * len(group), budget.at_once)
        yield from _decomposed(group, source, batches, k_of_group, budget)


def decompose_sides(
    trace: Trace,
    rows: Sequence[Connection],
    columns: Sequence[Connection],
    k: int | None,
    options: JacobianOptions,
) -> tuple[Decomposed | Passing, Decomposed]:
    """Return the rows and the columns of a map: columns decomposed, rows to be read.

    Where rows and columns are the same connections, they are one object. Otherwise no
    Jacobian is kept: those of the rows are computed as they are read, with the columns'
    in one loop of `progress`.
    """
    if rows == columns:
        (decomposed,) = decompose_each([Request(trace, columns)], k, options)
        return decomposed, decomposed
    k = fitting_k(k, trace.d_model)
    sizes = MapSizes.of(trace, len(rows), len(columns), k)
    sizes = replace(sizes, rows_are_columns=False)
    budget = Budget.of(trace.blocks[0].call.module, sizes, options)
    source = _Source([Request(trace, [*columns, *rows])], options, budget)
    (decomposed,) = _decomposed(
        [Request(trace, columns)],
        source,
        source.batches(len(columns), budget.at_once),
        k,
    )
    of_rows = source.batches(len(rows), budget.at_once)
    return Passing(rows, of_rows, source.paths[0]), decomposed


def sharing_a_reading(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Yield requests in groups: several of one model that is read from disk, else one.

    One reading of the weights serves a group. It has as many prompts as have Jacobians
    no larger than the weights that are read.
    """
    group: list[Request] = []
    for request in requests:
        if group:
            is_of_another_model = request.trace.model is not group[0].trace.model
            if is_of_another_model or len(group) >= _n_sharing(request.trace):
                yield group
                group = []
        group.append(request)
    if group:
        yield group


def _n_sharing(trace: Trace) -> int:
    if not trace.is_streamed:
        return 1
    weights = sum(p.numel() * p.element_size() for p in trace.model.parameters())
    jacobians = 4 * trace.n_layers * trace.d_model**2
    return max(1, min(MOST_PROMPTS, weights // jacobians))


class _Source:
    """Jacobians of several prompts, computed when they are asked for.

    The prompts take turns at each connection: a block of a model that is read from disk
    is read once for all of them. `paths` holds, for each prompt, the way in which each
    Jacobian so far was evaluated.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        options: JacobianOptions,
        budget: Budget | None = None,
        function: Function = "branches",
    ) -> None:
        chunk_size = options.chunk_size
        n_sharing = MOST_SHARING
        if budget is not None:
            chunk_size = budget.chunk_size
            n_sharing = budget.n_sharing or MOST_SHARING
        self.paths: list[dict[str, str]] = [{} for _ in requests]
        self._n_left = sum(len(request.connections) for request in requests)
        # Blocks of a model that is split over several devices give their Jacobians
        # where they live.
        self._device = requests[0].trace.blocks[0].X.device
        computed = (
            jacobians_of(
                request.trace,
                request.connections,
                chunk_size=chunk_size,
                progress=options.progress,
                n_sharing=n_sharing,
                function=function,
            )
            for request in requests
        )
        self._streams = list(computed)
        self._turns = cycle(zip(self._streams, self.paths, strict=True))

    def batches(self, n: int, at_once: int) -> Iterator[Float[Tensor, "n_some d d"]]:
        """Yield the next n Jacobians, stacked, `at_once` or fewer at a time."""
        for start in range(0, n, at_once):
            n_in_batch = min(at_once, n - start)
            yield torch.stack([self._next() for _ in range(n_in_batch)])
        self._finish()

    def singles(
        self, dtype: torch.dtype | None = None
    ) -> Iterator[Float[Tensor, "1 d d"]]:
        """Yield all Jacobians one by one, as they were computed, or converted."""
        while self._n_left:
            J = self._next()
            yield J[None] if dtype is None else J.to(dtype)[None]
            # Not kept while the next is computed.
            del J
        self._finish()

    def _next(self) -> Float[Tensor, "d d"]:
        stream, paths = next(self._turns)
        computed = next(stream)
        paths[str(computed.connection)] = computed.path
        self._n_left -= 1
        return computed.J.to(self._device)

    def _finish(self) -> None:
        """End the loops of `progress`, if all Jacobians have been computed."""
        if not self._n_left:
            for stream in self._streams:
                next(stream, None)


def _decomposed(
    requests: Sequence[Request],
    source: _Source,
    batches: Iterator[Float[Tensor, "n d d"]],
    k: int,
    keep: Budget | None = None,
    n_triplets: int | None = None,
) -> list[Decomposed]:
    """Decompose batches of Jacobians of several prompts that took turns.

    Args:
        requests: the prompts, with the connections that are decomposed.
        source: where the batches come from.
        batches: the Jacobians.
        k: how many leading triplets are asked for.
        keep: where the Jacobians are to be kept; none are without it.
        n_triplets: how many to compute; one more than k by default, if there is.
    """
    if n_triplets is None:
        n_triplets = min(k + 1, requests[0].trace.d_model)
    trace = requests[0].trace
    n_prompts = len(requests)
    shelf = None
    if keep is not None:
        n_jacobians = sum(len(request.connections) for request in requests)
        matrix = trace.blocks[0].X.new_empty(trace.d_model, trace.d_model)
        shelf = Shelf(n_jacobians, matrix, keep.in_memory)
        batches = _shelved(batches, shelf)
    decompose_batch = partial(_spectra_and_norms, n_triplets=n_triplets)
    of_batches = background_map(decompose_batch, batches, _device(trace))
    of_all = Spectrum.cat([part for spectra, _ in of_batches for part in spectra])
    norms_of_all = torch.cat([norms for _, norms in of_batches])
    return [
        Decomposed(
            request.connections,
            k,
            of_all[i::n_prompts],
            norms_of_all[i::n_prompts],
            paths,
            request.trace,
            None if shelf is None else partial(_take_from, shelf, i, n_prompts),
        )
        for i, (request, paths) in enumerate(zip(requests, source.paths, strict=True))
    ]


def _device(trace: Trace) -> torch.device:
    """Return where the Jacobians of a trace are decomposed."""
    return trace.blocks[0].X.device


def _shelved(
    batches: Iterator[Float[Tensor, "n d d"]], shelf: Shelf
) -> Iterator[Float[Tensor, "n d d"]]:
    """Yield batches of Jacobians, each after it has been put on the shelf."""
    n_shelved = 0
    for J in batches:
        shelf.put(n_shelved, J)
        n_shelved += len(J)
        yield J
        # Not kept while the next are computed.
        del J


def _spectra_and_norms(
    J: Float[Tensor, "n d d"], n_triplets: int
) -> tuple[list[Spectrum], Float[Tensor, " n"]]:
    # One by one: rounding depends on how many are summed at once.
    norms = [torch.linalg.matrix_norm(matrix[None]) for matrix in J]
    return _in_halves(lambda some: svd(some, n_triplets), J), torch.cat(norms)


def _take_from(
    shelf: Shelf, prompt: int, n_prompts: int, i: int
) -> Float[Tensor, "d d"]:
    """Take one prompt's i-th Jacobian from a shelf on which prompts take turns."""
    return shelf.take(i * n_prompts + prompt)


def _in_halves(
    decompose_batch: Callable[[Tensor], Result], J: Float[Tensor, "n d d"]
) -> list[Result]:
    """Decompose a batch, in parts where memory runs out.

    Fewer threads then decompose at once.
    """
    try:
        return [decompose_batch(J)]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or len(J) == 1:
            raise
    # Not in the handler: what the error's frames hold is free by now.
    halves = J.tensor_split(2)
    return [part for half in halves for part in _in_halves(decompose_batch, half)]
