"""The state in which a model is traced and its blocks are evaluated; afterwards everything is as it was.

Matmul precision, attention kernels and hooks belong to the process, weights to the model: one measurement has them at a
time, in whichever thread it runs. Ctrl-C takes effect between its steps, where every change is undone on the way out.
"""

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_measuring = threading.RLock()
# What the measuring thread has entered and not yet left: device, dtype and modules.
_entered: list[tuple[Any, ...]] = []

# How HuggingFace's mixtures compute their experts; the public property beside it also sets that of every other part.
_EXPERTS = "_experts_implementation_internal"

# An object, one of its attributes, and the value that this is to have.
Change = tuple[Any, str, Any]


class _Interrupts:
    """Holds Ctrl-C back until `hear`; a second one takes effect at once."""

    def __init__(self) -> None:
        self.came = False
        # The handler that was there; None while interrupts are not held back.
        self.previous: Any = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts back while the context lasts; on exit, deliver one that came."""
        previous = signal.getsignal(signal.SIGINT)
        if self.previous or not callable(previous) or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self.previous = previous
            signal.signal(signal.SIGINT, self._hold)
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            came, self.came, self.previous = self.came, False, None
            if came:
                previous(signal.SIGINT, None)

    def hear(self) -> None:
        """Deliver an interrupt that came."""
        if self.came and threading.current_thread() is threading.main_thread():
            self.came = False
            self.previous(signal.SIGINT, None)

    def _hold(self, number: int, frame: Any) -> None:
        if self.came:
            self.previous(number, frame)
        self.came = True


_interrupts = _Interrupts()
hear_interrupts = _interrupts.hear


@contextmanager
def attributes_set(changes: Iterable[Change]) -> Iterator[None]:
    """Context in which attributes of objects are changed."""
    with ExitStack() as undo:
        for owner, name, value in changes:
            before = getattr(owner, name)
            setattr(owner, name, value)
            undo.callback(setattr, owner, name, before)
        yield


@contextmanager
def exact_arithmetic(
    device: torch.device, modules: Sequence[nn.Module] = (), dtype: torch.dtype | None = None
) -> Iterator[None]:
    """No gradients for parameters, no autocast, no TF32, attention in plain operations; the modules compute in `dtype`.

    One thread at a time; Ctrl-C takes effect on entering, on leaving, and in `hear_interrupts`.
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
            # An inference tensor could not be differentiated later.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            casts = (_computing_in(module, dtype) for module in modules if dtype is not None)
            stack.enter_context(attributes_set(chain(_full_precision(), *casts)))
            _entered.append(what)
            stack.callback(_entered.pop)
            yield


@contextmanager
def own_arithmetic(module: nn.Module) -> Iterator[None]:
    """Exact arithmetic in the precision of the module's weights: how models are traced."""
    weight = next(module.parameters())
    with exact_arithmetic(weight.device), attributes_set(_eager_experts(module, weight.dtype)):
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


def _computing_in(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Changes that make a module compute in `dtype`: its floating-point weights, and its configuration.

    Weights by hand, not by `torch.func.functional_call`: a bridge reaches one module under two names, and would be left
    with foreign weights. HookedTransformer's norms cast to `cfg.dtype`.
    """
    for part in module.modules():
        # `parameters()` and `buffers()` would search all parts of each part again.
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                yield tensor, "data", tensor.data.to(dtype)
        cfg = vars(part).get("cfg")
        if isinstance(was := getattr(cfg, "dtype", None), torch.dtype) and was != dtype:
            yield cfg, "dtype", dtype
    yield from _eager_experts(module, dtype)


def _eager_experts(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Changes for float64, in which HuggingFace's grouped experts fail."""
    if dtype == torch.float64:
        for part in module.modules():
            config = vars(part).get("config")
            if getattr(config, _EXPERTS, None) not in (None, "eager"):
                yield config, _EXPERTS, "eager"
