"""The state in which a model is traced and its blocks are evaluated; afterwards everything is as it was.

Matmul precision, attention kernels and hooks belong to the process, weights to the model: one measurement at a time has
them, whatever thread it runs in, and Ctrl-C is heard between its steps, where every change is undone on the way out.
"""

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_measuring = threading.RLock()
# What was entered and not yet left, by the thread that measures: device, dtype and modules.
_entered: list[tuple[Any, ...]] = []

# How HuggingFace's mixtures compute their experts; the public property next to it also sets every other part's.
_EXPERTS = "_experts_implementation_internal"

# What one attribute of what object is to be.
Change = tuple[Any, str, Any]


class _Interrupts:
    """Ctrl-C, held back until `hear`; a second one is not."""

    def __init__(self) -> None:
        self.came, self.holding = False, False
        self.previous: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts back while the context lasts; on the way out, deliver one that came."""
        previous = signal.getsignal(signal.SIGINT)
        if self.holding or not callable(previous) or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.came, self.holding, self.previous = False, True, previous
        signal.signal(signal.SIGINT, self._hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            self.holding = False
            self._deliver()

    def hear(self) -> None:
        """Deliver an interrupt that came."""
        if self.holding and threading.current_thread() is threading.main_thread():
            self._deliver()

    def _hold(self, number: int, frame: Any) -> None:
        if self.came:
            self.previous(number, frame)
        self.came = True

    def _deliver(self) -> None:
        if self.came:
            self.came = False
            self.previous(signal.SIGINT, None)


_interrupts = _Interrupts()
hear_interrupts = _interrupts.hear


@contextmanager
def attributes_set(changes: Iterable[Change]) -> Iterator[None]:
    """Attributes of objects changed for as long as the context lasts."""
    undo: list[Change] = []
    try:
        for owner, name, value in changes:
            before = getattr(owner, name)
            setattr(owner, name, value)
            undo.append((owner, name, before))
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


@contextmanager
def exact_arithmetic(
    device: torch.device, modules: Sequence[nn.Module] = (), dtype: torch.dtype | None = None
) -> Iterator[None]:
    """No gradients into parameters, no autocast, no TF32, attention in plain operations that AD can follow.

    The modules compute in `dtype`. One thread at a time; Ctrl-C is heard on entering, on leaving, by `hear_interrupts`.
    """
    with _measuring:
        if (what := (device, dtype, *map(id, modules))) in _entered:
            hear_interrupts()
            yield
            return
        with _interrupts.held(), ExitStack() as stack:
            hear_interrupts()
            for kind in {"cpu", device.type} - {"meta"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(attributes_set(_full_precision()))
            # An inference tensor could not be differentiated later.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if dtype is not None:
                stack.enter_context(attributes_set(change for m in modules for change in computing_in(m, dtype)))
            _entered.append(what)
            stack.callback(_entered.pop)
            yield


@contextmanager
def own_arithmetic(module: nn.Module) -> Iterator[None]:
    """Exact arithmetic, in the precision that the module's weights are in: how models are traced."""
    weight = next(module.parameters())
    with exact_arithmetic(weight.device), attributes_set(_allowing(module, weight.dtype)):
        yield


def _full_precision() -> Iterator[Change]:
    backends: Any = torch.backends
    operations = [getattr(backends.cudnn, name, None) for name in ("conv", "rnn")]
    operations += [getattr(backends.mkldnn, name, None) for name in ("conv", "rnn", "matmul")]
    for operation in (*operations, backends.cuda.matmul):
        if hasattr(operation, "fp32_precision"):
            yield operation, "fp32_precision", "ieee"
        elif operation is backends.cuda.matmul:  # torch before 2.9
            yield operation, "allow_tf32", False
            yield backends.cudnn, "allow_tf32", False


def computing_in(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Changes that make a module compute in `dtype`: its floating-point weights, and what its configuration says.

    Weights by hand, not by `torch.func.functional_call`: a bridge reaches one module under two names, and is left with
    foreign weights. HookedTransformer's norms cast to `cfg.dtype`.
    """
    for part in module.modules():
        # Of each part its own: `parameters()` and `buffers()` would go through all of them again.
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                yield tensor, "data", tensor.data.to(dtype)
        cfg = vars(part).get("cfg")
        if isinstance(was := getattr(cfg, "dtype", None), torch.dtype) and was != dtype:
            yield cfg, "dtype", dtype
    yield from _allowing(module, dtype)


def _allowing(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Changes without which a module fails in `dtype`: HuggingFace's grouped experts know no float64."""
    if dtype == torch.float64:
        for part in module.modules():
            config = vars(part).get("config")
            if getattr(config, _EXPERTS, None) not in (None, "eager"):
                yield config, _EXPERTS, "eager"
