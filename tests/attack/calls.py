"""Calls of public functions: none may change what it was given, nor what another call
gives that runs beside it.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tl_coupling as tlc
from attack.child import done
from attack.subject import PROMPTS, Subject

# Arguments by name: what a function is called with.
Arguments = dict[str, Any]
_DTYPES = (torch.float32, torch.float64)
# Threads that change places this often meet each other in the middle of things.
_SWITCH_SECONDS = 1e-5
_N_THREADS = 3
_N_REPEATS = 3
# A thread that takes longer hangs.
_THREAD_SECONDS = 100.0


@dataclass(frozen=True)
class Call:
    """A public function, and the arguments that it is called with."""

    function: Callable[..., object]
    arguments: Arguments

    def __call__(self) -> object:
        return self.function(**self.arguments)


def changed_arguments(
    subject: Subject, rng: random.Random, n: int
) -> Iterator[list[str]]:
    """Of every function that takes tensors or a trace, called twice with the same: what
    it was given must stay as it was, and so must what it returns.
    """
    names: list[str] = []
    for _ in range(n):
        if not names:
            names = sorted(_OF_TENSORS) + sorted(_OF_TRACES)
            rng.shuffle(names)
        name, dtype = names.pop(), rng.choice(_DTYPES)
        call = _call(subject, name, dtype, rng.randrange(2**32))
        yield done(lambda call=call: _check_arguments(call), f"{name} in {dtype}")


def threads(subject: Subject, rng: random.Random, n: int) -> Iterator[list[str]]:
    """Of several functions of one model at a time: each must give what it gives alone."""
    for _ in range(n):
        dtype, seed = rng.choice(_DTYPES), rng.randrange(2**32)
        names = rng.choices(sorted(_OF_TRACES), k=_N_THREADS)
        calls = [_call(subject, name, dtype, seed) for name in names]
        yield done(
            lambda calls=calls: _check_threads(calls),
            f"{', '.join(names)} beside each other in {dtype}",
        )


def _check_arguments(call: Call) -> None:
    """Call twice, and compare arguments and results."""
    before = _content(call.arguments)
    first = _content(call())
    _check_equal(_content(call.arguments), before, "an argument was changed")
    _check_equal(_content(call()), first, "the second call gives something else")


def _check_threads(calls: list[Call]) -> None:
    """Run each alone, then all at once, and compare the results."""
    alone = [_content(call()) for call in calls]
    together: list[list[dict[str, bytes]]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(i: int) -> None:
        start.wait()
        try:
            for _ in range(_N_REPEATS):
                together[i].append(_content(calls[i]()))
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(_SWITCH_SECONDS)
    running = [
        threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(_THREAD_SECONDS)
        if thread.is_alive():
            raise RuntimeError("a thread hangs")
    if errors:
        # Alone each had a result: whatever it says now, it is a bug.
        raise RuntimeError(f"beside others: {errors[0]!r}") from errors[0]
    for expected, results in zip(alone, together, strict=True):
        for result in results:
            _check_equal(result, expected, "a result is not that of the call alone")


def _check_equal(
    found: dict[str, bytes], expected: dict[str, bytes], what: str
) -> None:
    differing = [
        name for name, content in expected.items() if found.get(name) != content
    ]
    if differing or len(found) != len(expected):
        raise AssertionError(f"wrong value: {what}: {', '.join(differing[:3])}")


def _content(value: object, name: str = "") -> dict[str, bytes]:
    """Return the bits of all numbers and texts in a value, by where they are in it.

    Provenances are left out: they say how long things took.
    """
    if isinstance(value, Tensor):
        return {name: _bits(value.detach().cpu().contiguous().view(-1).numpy())}
    if isinstance(value, np.ndarray | np.generic):
        return {name: _bits(np.asarray(value))}
    if isinstance(value, nn.Module):
        value = value.state_dict()
    elif isinstance(value, tlc.Trace):
        value = {name: getattr(value, name) for name in ("residual", "tokens", "model")}
    elif is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        parts = {str(key): part for key, part in value.items() if key != "provenance"}
    elif isinstance(value, list | tuple):
        parts = {str(i): part for i, part in enumerate(value)}
    else:
        is_plain = isinstance(value, str | int | float | bool | None)
        return {name: repr(value).encode()} if is_plain else {}
    content = {}
    for key, part in parts.items():
        content |= _content(part, f"{name}.{key}")
    return content


def _bits(values: np.ndarray) -> bytes:
    return f"{values.dtype} {values.shape} ".encode() + values.tobytes()


_MODELS: dict[tuple[str, torch.dtype], nn.Module] = {}


def _trace(subject: Subject, rng: random.Random, dtype: torch.dtype) -> tlc.Trace:
    """Return a prompt traced with one of the subject's models."""
    name = rng.choice("ab")
    if (name, dtype) not in _MODELS:
        _MODELS[name, dtype] = tlc.load_model(str(subject.root / name), dtype=dtype)
    return tlc.trace(_MODELS[name, dtype], rng.choice(PROMPTS))


def _call(subject: Subject, name: str, dtype: torch.dtype, seed: int) -> Call:
    if name in _OF_TENSORS:
        function, arguments = _OF_TENSORS[name]
        return Call(function, arguments(_Tensors(seed, dtype)))
    function, arguments = _OF_TRACES[name]
    trace = _trace(subject, random.Random(seed), dtype)
    return Call(function, arguments(trace))


class _Tensors:
    """Random tensors."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self._dtype)

    def sizes(self, *shape: int) -> Tensor:
        """Return what may be singular values: above 0, the largest first."""
        return self(*shape).abs().sort(descending=True).values + 0.1

    def map(self) -> tlc.CouplingMap:
        """Return a map of random Jacobians."""
        return tlc.comparisons.jacobian_coupling(self(3, 8, 8), k=4)


_D, _K = 8, 4
_OF_TENSORS: dict[
    str, tuple[Callable[..., object], Callable[[_Tensors], Arguments]]
] = {
    "svd": (tlc.svd, lambda t: {"J": t(3, _D, _D)}),
    "svd of k": (tlc.svd, lambda t: {"J": t(3, _D, _D), "k": _K}),
    "singular_values": (tlc.spectra.singular_values, lambda t: {"J": t(3, _D, _D)}),
    "non_normality": (tlc.spectra.non_normality, lambda t: {"J": t(3, _D, _D)}),
    "asymmetry": (tlc.spectra.asymmetry, lambda t: {"J": t(3, _D, _D)}),
    "participation_ratio": (
        tlc.spectra.participation_ratio,
        lambda t: {"S": t.sizes(3, _D)},
    ),
    "effective_rank": (tlc.spectra.effective_rank, lambda t: {"S": t.sizes(3, _D)}),
    "tail_energy": (
        tlc.spectra.tail_energy,
        lambda t: {"S": t.sizes(3, _D), "rank": 2},
    ),
    "coupling_matrix": (
        tlc.coupling_matrix,
        lambda t: {"J_1": t(_D, _D), "spectrum_2": tlc.svd(t(_D, _D)), "k": _K},
    ),
    "miscoupling": (tlc.miscoupling, lambda t: {"A": t(2, _K, _K)}),
    "normalized_miscoupling": (
        tlc.normalized_miscoupling,
        lambda t: {"A": t(2, _K, _K)},
    ),
    "spectral_miscoupling": (
        tlc.spectral_miscoupling,
        lambda t: {"A": t(2, _K, _K), "S_1": t.sizes(2, _K), "absolute": True},
    ),
    "captured_energy": (
        tlc.captured_energy,
        lambda t: {"A": t(2, _K, _K), "S_1": t.sizes(2, _D)},
    ),
    "without_top": (tlc.measures.without_top, lambda t: {"J": t(3, _D, _D), "r": 1}),
    "without_shared": (
        tlc.measures.without_shared,
        lambda t: {"J": t(3, _D, _D), "r": 1},
    ),
    "jacobian_coupling": (
        tlc.comparisons.jacobian_coupling,
        lambda t: {"J": t(3, _D, _D), "k": _K},
    ),
    "jacobian_products": (
        tlc.dynamics.jacobian_products,
        lambda t: {"J": t(3, _D, _D), "n_draws": 2},
    ),
    "jacobian_eigenvalues": (
        tlc.dynamics.jacobian_eigenvalues,
        lambda t: {"J": t(3, _D, _D), "n_draws": 2},
    ),
    "FactoredProduct.then": (
        lambda M: tlc.dynamics.FactoredProduct.identity(_D).then(M),
        lambda t: {"M": t(_D, _D)},
    ),
    "line_shape_score": (tlc.line_shape_score, lambda t: {"x": t(6, 2, _D)}),
    "line_shape_score of windows": (
        tlc.line_shape_score,
        lambda t: {"x": t(6, 2, _D), "window": 3},
    ),
    "expodistance": (tlc.expodistance, lambda t: {"x": t(6, 2, _D)}),
    "equidistance": (tlc.equidistance, lambda t: {"x": t(6, 2, _D)}),
    "step_lengths": (tlc.step_lengths, lambda t: {"x": t(6, 2, _D)}),
    "Directions": (
        lambda vectors: tlc.directions.Directions(vectors, 0, "read", {}),
        lambda t: {"vectors": t(2, _D)},
    ),
    "bootstrap": (
        tlc.generalization.bootstrap,
        lambda t: {"x": t(6, 3).numpy(), "y": t(6).numpy(), "n_resamples": 20},
    ),
    "mean_of a map": (lambda result: result.mean(), lambda t: {"result": t.map()}),
    "every measure of a map": (
        lambda result: result.to_dataframe(),
        lambda t: {"result": t.map()},
    ),
}


def _steered(trace: tlc.Trace) -> object:
    directions = tlc.directions.directions_of(trace, 0, k=1)
    return tlc.directions.steer(
        trace.model, ["w1 w2"], directions, [0.1], n_draws=1, progress=False
    )


def _ablated(trace: tlc.Trace) -> object:
    subspace = tlc.directions.shared_subspace([trace], rank=1, k=2, progress=False)
    return tlc.directions.ablate(
        trace.model, ["w1 w2"], subspace, n_draws=1, progress=False
    )


def _rotated(trace: tlc.Trace) -> object:
    return tlc.directions.rotate(trace.model, ["w1 w2"], n_draws=1, progress=False)


def _of_trace(trace: tlc.Trace) -> Arguments:
    return {"trace": trace}


_OF_TRACES: dict[
    str, tuple[Callable[..., object], Callable[[tlc.Trace], Arguments]]
] = {
    "trace": (
        lambda model, tokens: tlc.trace(model, tokens),
        lambda trace: {"model": trace.model, "tokens": trace.tokens},
    ),
    "block_jacobian": (tlc.block_jacobian, lambda t: {"trace": t, "layer": 0}),
    "block_jacobians": (tlc.block_jacobians, _of_trace),
    "block_jvp": (
        tlc.block_jvp,
        lambda t: {"trace": t, "layer": 0, "vector": t.residual[0, 0].clone()},
    ),
    "block_vjp": (
        tlc.block_vjp,
        lambda t: {"trace": t, "layer": 0, "vector": t.residual[0, 0].clone()},
    ),
    "block_parts": (tlc.block_parts, lambda t: {"trace": t, "layer": 0}),
    "depth_coupling": (tlc.depth_coupling, lambda t: {"trace": t, "k": 2}),
    "mean_depth_coupling": (
        tlc.mean_depth_coupling,
        lambda t: {"traces": [t, tlc.trace(t.model, t.tokens[:-1])], "k": 2},
    ),
    "self_coupling": (
        tlc.self_coupling,
        lambda t: {"trace": t, "layer": 0, "other_layer": 1, "k": 2},
    ),
    "context_coupling": (
        tlc.context_coupling,
        lambda t: {"trace": t, "layer": 0, "other_layer": 1, "fixed": "output", "k": 2},
    ),
    "carriers": (tlc.carriers, lambda t: {"trace": t, "k": 3}),
    "head_coupling": (
        tlc.comparisons.head_coupling,
        lambda t: {"trace": t, "k": 2},
    ),
    "frozen_coupling": (
        tlc.comparisons.frozen_coupling,
        lambda t: {"trace": t, "k": 2},
    ),
    "cross_token_influence": (tlc.cross_token_influence, _of_trace),
    "products": (tlc.dynamics.products, lambda t: {"trace": t, "n_draws": 2}),
    "product_map": (tlc.dynamics.product_map, _of_trace),
    "block_product": (tlc.dynamics.block_product, _of_trace),
    "model_jacobian": (tlc.dynamics.model_jacobian, _of_trace),
    "eigenvalues": (tlc.dynamics.eigenvalues, lambda t: {"trace": t, "n_draws": 1}),
    "leading_eigenvalues": (
        tlc.dynamics.leading_eigenvalues,
        lambda t: {"trace": t, "layer": 0, "n": 2},
    ),
    "frozen_jacobian": (
        tlc.dynamics.frozen_jacobian,
        lambda t: {"trace": t, "layer": 0},
    ),
    "decode": (
        tlc.directions.decode,
        lambda t: {"trace": t, "layer": 0, "k": 2},
    ),
    "steer": (_steered, _of_trace),
    "ablate": (_ablated, _of_trace),
    "rotate": (_rotated, _of_trace),
    "measure_trajectory": (
        tlc.trajectories.measure_trajectory,
        lambda t: {"trace": t, "progress": False},
    ),
    "entropy_by_depth": (tlc.trajectories.entropy_by_depth, _of_trace),
    "perturbation": (
        tlc.trajectories.perturbation,
        lambda t: {"trace": t, "n_samples": 2},
    ),
    "linearisation": (tlc.trajectories.linearisation, _of_trace),
    "residual_alignment": (
        tlc.trajectories.residual_alignment,
        lambda t: {"trace": t, "n_classes": 2},
    ),
}
