"""Jacobians of some connections: computed once, decomposed once, read by all.

Every map, and everything else that is read off Jacobians and their singular vectors,
takes them from here: from a `Decomposed`, which holds what is needed again, or from a
`Passing`, whose Jacobians are gone once they have been read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.blocks import Trace
from tl_coupling.jacobians.budget import (
    DEFAULT_OPTIONS,
    MOST_PROMPTS,
    Batch,
    Budget,
    JacobianOptions,
    MapSizes,
)
from tl_coupling.jacobians.connections import AnyFunction, Connection, Function
from tl_coupling.jacobians.jacobian_cache import Shelf, cache_of
from tl_coupling.jacobians.jacobians import (
    MOST_SHARING,
    Computed,
    jacobians_of,
    jacobians_together_of,
)
from tl_coupling.jacobians.matrix_free import matrix_free
from tl_coupling.jacobians.plan import plan
from tl_coupling.progress import with_progress
from tl_coupling.spectra import (
    Matrix,
    SimilarRanks,
    Spectrum,
    check_cut,
    fitting_k,
    parallel_map,
    singular_values,
    svd,
)

# Entries of the images of rows' Jacobians that are in memory at once (float32: 1 GiB).
_MOST_IMAGES = 2**28


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
        products: of each Jacobian with vectors, where none was formed.
    """

    connections: Sequence[Connection]
    k: int
    spectra: Spectrum
    frobenius_norms: Float[Tensor, " n"]
    paths: dict[str, str]
    trace: Trace | None = None
    taken_from: Callable[[int], Tensor] | None = None
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

    def some(self, connections: Sequence[Connection]) -> "Decomposed":
        """Return some connections of those whose products are known, in another order."""
        assert self.products is not None
        index = [self.connections.index(connection) for connection in connections]
        return replace(
            self,
            connections=connections,
            spectra=self.spectra[index],
            frobenius_norms=self.frobenius_norms[index],
            paths={str(c): self.paths[str(c)] for c in connections},
            products=[self.products[i] for i in index],
        )

    def parts(self) -> Iterator["Part | ProductsPart"]:
        """Yield the Jacobians, or their products, one at a time; several on a GPU."""
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
            if self.products is None:
                J = torch.stack([self.jacobian(i) for i in range(start, end)])
                yield Part(J, S, norms)
            else:
                yield ProductsPart(self.products[start:end], S, norms)

    def check_cut(self) -> None:
        """Warn where σ_k and σ_{k+1} are equal to rounding."""
        check_cut(self.spectra.S, self.k, [str(c) for c in self.connections])


class Part(NamedTuple):
    """Some neighbouring Jacobians of a list, as they are read."""

    J: Float[Tensor, "n d d"]
    singular_values: Float[Tensor, "n n_singular"]
    frobenius_norms: Float[Tensor, " n"]


class ProductsPart(NamedTuple):
    """The same of Jacobians that are known by their products with vectors."""

    J: Sequence[Matrix]
    singular_values: Float[Tensor, "n n_singular"]
    frobenius_norms: Float[Tensor, " n"]


class Passing:
    """Jacobians that are computed when they are read, once, and are not kept.

    `paths`, the way in which each was evaluated, is complete when all have been read.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        computed: Iterator[Computed],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.connections = connections
        self.paths: dict[str, str] = {}
        self._computed = computed
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self.connections)

    def parts(self) -> Iterator[Part]:
        """Yield the Jacobians, one at a time, with all their singular values."""
        for computed in self._computed:
            self.paths[str(computed.connection)] = computed.path
            J = computed.J[None]
            # Not kept while the next is computed.
            del computed
            if self._dtype is not None:
                J = J.to(self._dtype)
            yield Part(J, singular_values(J), torch.linalg.matrix_norm(J))
            del J


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
    request = Request(trace, connections)
    return Passing(connections, _computed_in_turns([request], options, function), dtype)


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
    values_of = SimilarRanks()

    def decomposed(computed: Computed) -> tuple[Tensor, str]:
        return values_of(computed.J[None]), computed.path

    computed = _computed_in_turns([Request(trace, connections)], options)
    # One after the other: the rank of one is what is tried for the next.
    results = parallel_map(decomposed, computed, _device(trace), n_workers=1)
    paths = [path for _, path in results]
    return torch.cat([values for values, _ in results]), _paths_by_name(
        connections, paths
    )


def decompose(
    trace: Trace,
    connections: Sequence[Connection],
    k: int,
    options: JacobianOptions = DEFAULT_OPTIONS,
    *,
    n_triplets: int | None = None,
) -> Decomposed:
    """Decompose the Jacobians of some connections, and keep none of them.

    Args:
        trace: a traced prompt.
        connections: whose Jacobians are decomposed.
        k: how many leading triplets are asked for.
        options: how Jacobians are computed.
        n_triplets: how many to compute; one more than k by default, if there is.
    """
    sizes = MapSizes.from_trace(trace, 1, len(connections), k, rows_are_columns=False)
    budget = Budget.from_block(trace.blocks[0].call.module, sizes, options)
    requests = [Request(trace, connections)]
    computed = _computed_in_turns(requests, options, budget=budget)
    (decomposed,) = _decomposed(requests, computed, k, budget, n_triplets)
    return decomposed


def decompose_each(
    requests: Iterable[Request],
    k: int | None,
    options: JacobianOptions,
    n_maps: int = 1,
    function: AnyFunction = "branches",
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
        function: as in `jacobians_of`.
    """
    for group in taken_together(requests, options):
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
            for request in group:
                yield _decomposed_by_products(request, k_of_group, options, budget)
            continue
        matrix = trace.blocks[0].X.new_empty(trace.d_model, trace.d_model)
        shelf = Shelf(n * len(group), matrix, budget.keeps_in_memory)
        computed = _computed_in_turns(group, options, function, budget, shelf)
        yield from _decomposed(group, computed, k_of_group, budget, shelf=shelf)


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
    # The same Jacobians in both roles are computed, and decomposed, once.
    if rows == columns:
        (decomposed,) = decompose_each([Request(trace, columns)], k, options)
        return decomposed, decomposed
    k = fitting_k(k, trace.d_model)
    sizes = MapSizes.from_trace(
        trace, len(rows), len(columns), k, rows_are_columns=False
    )
    budget = Budget.from_block(trace.blocks[0].call.module, sizes, options)
    if _is_by_products(trace, k, options):
        # What is in both is decomposed once.
        every = list(dict.fromkeys([*columns, *rows]))
        decomposed = _decomposed_by_products(Request(trace, every), k, options, budget)
        return decomposed.some(rows), decomposed.some(columns)
    computed = _computed_in_turns(
        [Request(trace, [*columns, *rows])], options, budget=budget
    )
    column_jacobians = islice(computed, len(columns))
    (decomposed,) = _decomposed([Request(trace, columns)], column_jacobians, k, budget)
    return Passing(rows, computed), decomposed


def _is_by_products(trace: Trace, k: int, options: JacobianOptions) -> bool:
    """Say whether Jacobians of a trace are known by their products with vectors."""
    if options.method == "auto" and not options.changes_jacobians:
        return plan(trace, k).cheaper == "products"
    return options.method == "products"


def taken_together(
    requests: Iterable[Request], options: JacobianOptions = DEFAULT_OPTIONS
) -> Iterator[list[Request]]:
    """Yield requests in groups: several of one model that is read from disk, or whose
    Jacobians are computed together, else one.

    One reading of the weights serves a group that is read. It has as many prompts as
    have Jacobians no larger than the weights that are read.
    """
    group: list[Request] = []
    for request in requests:
        if group and not _goes_with(request, group, options):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


def _goes_with(
    request: Request, group: Sequence[Request], options: JacobianOptions
) -> bool:
    """Say whether a request is taken together with others."""
    trace, connections = group[0]
    if request.trace.model is not trace.model:
        return False
    if trace.is_streamed:
        return len(group) < _n_sharing(trace)
    batch = Batch.that_fits(trace, len(connections), options)
    is_alike = request.trace.n_pos == trace.n_pos and request.connections == connections
    return is_alike and len(group) < batch.n_prompts


def _n_sharing(trace: Trace) -> int:
    weights = sum(p.numel() * p.element_size() for p in trace.model.parameters())
    # In float32, in which streamed models are linearised.
    jacobians = 4 * trace.n_layers * trace.d_model**2
    return max(1, min(MOST_PROMPTS, weights // jacobians))


def _computed_in_turns(
    requests: Sequence[Request],
    options: JacobianOptions,
    function: AnyFunction = "branches",
    budget: Budget | None = None,
    shelf: Shelf | None = None,
) -> Iterator[Computed]:
    """Yield the Jacobians of several prompts, which take turns at each connection.

    A block of a model that is read from disk is read once for all of them. Each
    Jacobian lies where the first block lives, and on the shelf if there is one.
    """
    chunk_size = options.chunk_size
    n_sharing = MOST_SHARING
    if budget is not None:
        chunk_size = budget.chunk_size
        n_sharing = budget.n_sharing or MOST_SHARING
    trace, connections = requests[0]
    batch = Batch.that_fits(trace, len(connections), options)
    streams: list[Iterator[Computed]]
    if not batch.is_one and function != "frozen" and _can_be_together(requests):
        traces = [request.trace for request in requests]
        together = jacobians_together_of(
            traces,
            connections,
            batch.n_connections,
            chunk_size=chunk_size,
            function=function,
        )
        # One gives those of all prompts in turns.
        streams = [together] * len(requests)
    else:
        streams = [
            jacobians_of(
                request.trace,
                request.connections,
                chunk_size=chunk_size,
                n_sharing=n_sharing,
                function=function,
            )
            for request in requests
        ]
    device = _device(trace)
    turns = range(len(connections))
    for turn in with_progress(turns, options.progress, "Jacobians"):
        for prompt, stream in enumerate(streams):
            computed = next(stream)
            # In one layout, because sums round by the order of their terms in memory.
            J = computed.J.to(device).contiguous()
            if options.change is not None:
                J = options.change(J)
            if shelf is not None:
                shelf.put(turn * len(requests) + prompt, J[None])
            yield computed._replace(J=J)
            # Not kept while the next is computed.
            del computed, J


def _can_be_together(requests: Sequence[Request]) -> bool:
    """Say whether all prompts have the same connections, of one token to itself, and
    nobody keeps their Jacobians.
    """
    _, connections = requests[0]
    position = connections[0].output_position
    return all(
        request.connections == connections and cache_of(request.trace) is None
        for request in requests
    ) and all(c.input_position == c.output_position == position for c in connections)


def _decomposed_by_products(
    request: Request, k: int, options: JacobianOptions, budget: Budget
) -> Decomposed:
    """Decompose Jacobians that are never formed, one after the other."""
    trace, connections = request
    n_triplets = min(k + 1, trace.d_model)
    found = [
        matrix_free(trace, connection, n_triplets, budget.chunk_size)
        for connection in with_progress(connections, options.progress, "products")
    ]
    return Decomposed(
        connections,
        k,
        Spectrum.cat([one.spectrum for one in found]),
        torch.cat([one.frobenius_norm for one in found]),
        _paths_by_name(connections, [one.path for one in found]),
        trace,
        products=[one.J for one in found],
    )


class _Triplets(NamedTuple):
    """What is known of one Jacobian beside itself."""

    spectrum: Spectrum
    frobenius_norm: Float[Tensor, " 1"]
    path: str


def _decomposed(
    requests: Sequence[Request],
    computed: Iterator[Computed],
    k: int,
    budget: Budget,
    n_triplets: int | None = None,
    shelf: Shelf | None = None,
) -> list[Decomposed]:
    """Decompose the Jacobians of several prompts that took turns.

    Args:
        requests: the prompts, with the connections that are decomposed.
        computed: the Jacobians.
        k: how many leading triplets are asked for.
        budget: how many are decomposed at a time.
        n_triplets: how many to compute; one more than k by default, if there is.
        shelf: where the Jacobians are kept; none are without it.
    """
    trace = requests[0].trace
    if n_triplets is None:
        n_triplets = min(k + 1, trace.d_model)
    results: list[_Triplets] = []
    if _device(trace).type == "cpu":
        results = parallel_map(
            partial(_triplets, n_triplets), computed, _device(trace), budget.n_svds
        )
    else:
        while some := list(islice(computed, budget.n_svds)):
            results += _triplets_of_all(n_triplets, some)
    n_prompts = len(requests)
    decomposed: list[Decomposed] = []
    for prompt, request in enumerate(requests):
        # Prompts took turns, so that each has every n-th.
        own = results[prompt::n_prompts]
        taken_from = None
        if shelf is not None:
            taken_from = partial(_take_from, shelf, prompt, n_prompts)
        decomposed.append(
            Decomposed(
                request.connections,
                k,
                Spectrum.cat([triplets.spectrum for triplets in own]),
                torch.cat([triplets.frobenius_norm for triplets in own]),
                _paths_by_name(
                    request.connections, [triplets.path for triplets in own]
                ),
                request.trace,
                taken_from,
            )
        )
    return decomposed


def _triplets(n_triplets: int, computed: Computed) -> _Triplets:
    J = computed.J[None]
    return _Triplets(svd(J, n_triplets), torch.linalg.matrix_norm(J), computed.path)


def _triplets_of_all(n_triplets: int, computed: Sequence[Computed]) -> list[_Triplets]:
    """Return the same of several Jacobians, together."""
    J = torch.stack([of_one.J for of_one in computed])
    spectra = svd(J, n_triplets)
    norms = torch.linalg.matrix_norm(J)
    return [
        _Triplets(spectra[i : i + 1], norms[i : i + 1], of_one.path)
        for i, of_one in enumerate(computed)
    ]


def _take_from(
    shelf: Shelf, prompt: int, n_prompts: int, i: int
) -> Float[Tensor, "d d"]:
    """Take one prompt's i-th Jacobian from a shelf on which prompts take turns."""
    return shelf.take(i * n_prompts + prompt)


def _paths_by_name(
    connections: Sequence[Connection], paths: Sequence[str]
) -> dict[str, str]:
    """Return the way to each Jacobian, by connection."""
    return {str(c): path for c, path in zip(connections, paths, strict=True)}


def _device(trace: Trace) -> torch.device:
    """Return where the Jacobians of a trace are decomposed."""
    return trace.blocks[0].X.device
