"""The Jacobians of one prompt, decomposed in spans of its layers: several at once.

Each span is computed by a fork, with one thread. Much of the work is Python, and
products too small for several threads.
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from tl_coupling.gradients import CollectedRemarks
from tl_coupling.jacobians.connections import Connection
from tl_coupling.jacobians.forks import of_each
from tl_coupling.jacobians.held import held_of
from tl_coupling.jacobians.jacobians import jacobians_of
from tl_coupling.jacobians.memory import MapSizes, spans_at_once
from tl_coupling.jacobians.options import JacobianOptions
from tl_coupling.progress import with_progress
from tl_coupling.spectra import Spectrum
from tl_coupling.traces import Trace

# Work is counted as entries of the Jacobians times their width: a core does so much in
# about half a second.
_LEAST_WORK = 2**29
_WORK_OF_SPAN = 2**31


Result = TypeVar("Result")


class Span(NamedTuple):
    """What is known of the Jacobians of some neighbouring layers, beside themselves."""

    spectra: Spectrum
    frobenius_norms: Float[Tensor, " n"]
    paths: dict[str, str]


def spans_of(
    trace: Trace,
    connections: Sequence[Connection],
    sizes: MapSizes,
    options: JacobianOptions,
    *,
    keeps_held: bool = True,
) -> list[range]:
    """Return the connections in spans of whole layers, by index.

    One where they are not worth a fork, forks are not allowed, or the Jacobians are
    held for other measurements: what a fork holds is lost.

    Args:
        trace: the traced prompt.
        connections: whose Jacobians are computed.
        sizes: of what is computed at once.
        options: how Jacobians are computed.
        keeps_held: False where no later measurement reads what would be held from here
            on. What is held already can be read by forks if it is in memory.
    """
    at_once = 1
    work = len(connections) * trace.d_model**3
    held = held_of(trace)
    is_free = held is None or (not keeps_held and held.in_memory)
    if work >= _LEAST_WORK and is_free:
        at_once = spans_at_once(trace, sizes, options)
    if at_once == 1:
        return [range(len(connections))]
    # As many for each fork at a time.
    turns = max(1, round(work / _WORK_OF_SPAN / at_once))
    return _of_whole_layers(connections, turns * at_once)


def _of_whole_layers(connections: Sequence[Connection], most: int) -> list[range]:
    """Return the connections in spans of whole layers, by index, with about as many
    layers in each.
    """
    n = len(connections)
    by_layer = groupby(range(n), lambda i: connections[i].layer)
    starts_of_layers = [next(of_layer) for _, of_layer in by_layer]
    n_layers = len(starts_of_layers)
    n_spans = min(n_layers, most)
    starts = [starts_of_layers[i * n_layers // n_spans] for i in range(n_spans)]
    ends = [*starts[1:], n]
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def decompose_spans(
    trace: Trace,
    connections: Sequence[Connection],
    spans: Sequence[range],
    decompose: Callable[[Tensor], Spectrum],
    options: JacobianOptions,
) -> tuple[Float[Tensor, "n d d"], Span]:
    """Return the Jacobians of connections, and what is known of them all.

    Args:
        trace: the traced prompt.
        connections: whose Jacobians are decomposed.
        spans: of the connections, which are computed at once.
        decompose: gives the spectra of several Jacobians.
        options: how Jacobians are computed.
    """
    J = _shared(len(connections), trace.blocks[0].X)
    of_forks = JacobianOptions(options.chunk_size, progress=False)

    def computed(span: range) -> Span:
        own = J[span.start : span.stop]
        chosen = connections[span.start : span.stop]
        paths = _fill(own, trace, chosen, of_forks)
        # One by one: rounding depends on how many are summed at once.
        norms = [torch.linalg.matrix_norm(matrix[None]) for matrix in own]
        return Span(decompose(own), torch.cat(norms), paths)

    done = of_each_span(computed, trace, spans, options)
    of_all = Span(
        Spectrum.cat([span.spectra for span in done]),
        torch.cat([span.frobenius_norms for span in done]),
        {name: path for span in done for name, path in span.paths.items()},
    )
    return J, of_all


def of_each_span(
    function: Callable[[range], Result],
    trace: Trace,
    spans: Sequence[range],
    options: JacobianOptions,
) -> list[Result]:
    """Return a function of each span, several computed at once, each by a fork.

    Args:
        function: of a span; its result is sent by the fork.
        trace: the traced prompt, whose remarks are noted here, too.
        spans: of the connections, which are counted by the bar.
        options: whose bar is shown.
    """
    remarks = trace.blocks[0].remarks

    def with_remarks(span: range) -> tuple[Result, CollectedRemarks]:
        with remarks.collected() as collected:
            value = function(span)
        return value, collected

    results = of_each(with_remarks, spans, torch.get_num_threads())
    done: list[Result] = []
    starts = {span.start for span in spans}
    n_connections = spans[-1].stop
    loop = with_progress(range(n_connections), options.progress, "Jacobians")
    for i in loop:
        if i in starts:
            value, collected = next(results)
            remarks.add_collected(collected)
            done.append(value)
    return done


def _fill(
    J: Float[Tensor, "n d d"],
    trace: Trace,
    connections: Sequence[Connection],
    options: JacobianOptions,
) -> dict[str, str]:
    """Write the Jacobians of connections into J, and return the ways to them."""
    paths: dict[str, str] = {}
    computed = jacobians_of(
        trace, connections, chunk_size=options.chunk_size, progress=False
    )
    for row, jacobian in zip(J, computed, strict=True):
        row[:] = jacobian.J
        paths[str(jacobian.connection)] = jacobian.path
    return paths


def _shared(n: int, X: Float[Tensor, "n_pos d"]) -> Float[Tensor, "n d d"]:
    """Return room for n Jacobians that forks share with this process."""
    d = X.shape[1]
    memory = mmap.mmap(-1, n * d * d * X.element_size())
    return torch.frombuffer(memory, dtype=X.dtype).reshape(n, d, d)
