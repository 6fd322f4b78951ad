"""The state in which blocks are traced and evaluated, undone afterwards; and reverse
mode in chunks that fit in memory.

Matmul precision, attention kernels and hooks belong to the process, weights to the
model: one measurement has them at a time, in whichever thread it runs. Ctrl-C takes
effect between its steps, where every change is undone on the way out.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_coupling.interrupts import hear_interrupts, interrupts_held
from tl_coupling.models import (
    Change,
    dequantising,
    facts_of,
    filled,
    has_packed_parts,
    holds_stored_weights,
    looked_up,
    looks_up,
)

_measuring = threading.RLock()
# What the measuring thread has entered and not yet left: device, dtype and modules.
_entered: list[tuple[Any, ...]] = []
# How HuggingFace's mixtures compute their experts; the public property beside it also
# sets that of every other part.
_EXPERTS = "_experts_implementation_internal"
# torch's messages on the CPU, where it raises a plain RuntimeError; CUDA and MPS have a
# class of their own.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
)


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
def forwards_replaced(
    forwards: Mapping[nn.Module, Callable[..., Any]],
) -> Iterator[None]:
    """Context in which modules have other `forward`s, and no hooks: those of the blocks
    have acted on the stream.
    """
    own = {"forward", "_forward_hooks", "_forward_pre_hooks"}
    before = {
        module: {name: vars(module)[name] for name in own & vars(module).keys()}
        for module in forwards
    }
    try:
        for module, forward in forwards.items():
            vars(module).update(
                forward=forward,
                _forward_hooks=OrderedDict(),
                _forward_pre_hooks=OrderedDict(),
            )
        yield
    finally:
        for module, attributes in before.items():
            # An instance has a `forward` of its own where accelerate put one.
            vars(module).pop("forward", None)
            vars(module).update(attributes)


@contextmanager
def mean_weights(first: nn.Module, second: nn.Module) -> Iterator[None]:
    """Context in which each parameter of `first` is the mean of its own and `second`'s.
    Costs a copy of the weights.
    """
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    with attributes_set((p, "data", (p.data + q.data) / 2) for p, q in pairs):
        yield


@contextmanager
def exact_arithmetic(
    device: torch.device,
    modules: Sequence[nn.Module] = (),
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """No gradients for parameters, no autocast, no TF32, attention in plain operations;
    the modules compute in `dtype`.

    One thread at a time; Ctrl-C takes effect on entering, on leaving, and in
    `hear_interrupts`.
    """
    with _measuring:
        if (what := (device, dtype, *map(id, modules))) in _entered:
            hear_interrupts()
            yield
            return
        with interrupts_held(), ExitStack() as stack:
            hear_interrupts()
            for kind in {"cpu", device.type} - {"meta"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            # An inference tensor could not be differentiated later.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            changes = () if dtype is None else _computing_in(modules, dtype)
            stack.enter_context(attributes_set(chain(_full_precision(), changes)))
            _entered.append(what)
            stack.callback(_entered.pop)
            yield


@contextmanager
def own_arithmetic(
    module: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Exact arithmetic in the precision of the module's weights: how models are traced.

    A model whose weights are elsewhere, or packed, computes in `dtype` (by default
    float32, or float64 if that is its own), one part after the other: each has its
    weights while it is called.
    """
    weight = next(module.parameters(), torch.empty(0))
    with exact_arithmetic(weight.device), ExitStack() as stack:
        # Within its own arithmetic a model has its weights already.
        facts = facts_of(module)
        if not facts.is_filled_when_called and (
            facts.is_streamed or has_packed_parts(module)
        ):
            stack.enter_context(
                attributes_set([(facts, "is_filled_when_called", True)])
            )
            dtype = dtype or (
                torch.float64 if weight.dtype == torch.float64 else torch.float32
            )
            stack.enter_context(_filled_when_called(module, dtype))
        stack.enter_context(
            attributes_set(_eager_experts(module, dtype or weight.dtype))
        )
        yield


@contextmanager
def _filled_when_called(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Context in which each part of a model has its weights, in `dtype`, while it is
    called.

    Parts are the blocks, tables of embeddings, of which only the rows that are looked
    up are read, and the largest modules that contain neither; where weights are
    elsewhere, those that lack some.
    """
    blocks, weight = set(getattr(model, "blocks", [model])), next(model.parameters())
    called: list[ExitStack] = []

    def enter(part: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hear_interrupts()
        called.append(ExitStack())
        if looks_up(part) and given:
            changes, places = looked_up(part, given[0], dtype)
            called[-1].enter_context(attributes_set(changes))
            return (places, *given[1:])
        called[-1].enter_context(exact_arithmetic(weight.device, [part], dtype))
        return None

    def leave(*_: Any) -> None:
        # torch calls it as well where a hook before ours raised.
        if called:
            called.pop().close()

    with ExitStack() as hooks:
        # A bridge does not list every part of the model that it wraps.
        unread, read = [model, getattr(model, "original_model", model)], set()
        while unread:
            part = unread.pop()
            if (
                part in blocks
                or looks_up(part)
                or not any(one in blocks or looks_up(one) for one in part.modules())
            ):
                if part not in read and (
                    holds_stored_weights(part) or not facts_of(model).is_streamed
                ):
                    read.add(part)
                    hooks.enter_context(part.register_forward_pre_hook(enter))
                    hooks.enter_context(
                        part.register_forward_hook(leave, always_call=True)
                    )
                continue
            unread += part.children()
        try:
            yield
        finally:
            while called:
                leave()


def _full_precision() -> list[Change]:
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    if not hasattr(cuda.matmul, "fp32_precision"):  # torch before 2.9
        return [(cuda.matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    operations = (
        cudnn.conv,
        cudnn.rnn,
        mkldnn.conv,
        mkldnn.rnn,
        mkldnn.matmul,
        cuda.matmul,
    )
    return [(operation, "fp32_precision", "ieee") for operation in operations]


def _computing_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[Change]:
    """Changes that make modules compute in `dtype`; HookedTransformer's norms cast to
    `cfg.dtype`.

    Not by `torch.func.functional_call`: a bridge reaches one module under two names,
    and would keep foreign weights.
    """
    yield from filled(modules, dtype)
    for part in (part for module in modules for part in module.modules()):
        yield from dequantising(part, dtype)
        # `parameters()` and `buffers()` would search all parts of each part again.
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if (
                tensor is not None
                and tensor.is_floating_point()
                and tensor.dtype != dtype
            ):
                yield tensor, "data", tensor.data.to(dtype)
        cfg = vars(part).get("cfg")
        if isinstance(was := getattr(cfg, "dtype", None), torch.dtype) and was != dtype:
            yield cfg, "dtype", dtype
    for module in modules:
        yield from _eager_experts(module, dtype)


def _eager_experts(module: nn.Module, dtype: torch.dtype) -> Iterator[Change]:
    """Changes for float64, in which HuggingFace's grouped experts fail."""
    for part in module.modules() if dtype == torch.float64 else ():
        config = vars(part).get("config")
        if getattr(config, _EXPERTS, None) not in (None, "eager"):
            yield config, _EXPERTS, "eager"


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with its floating-point tensors changed, also those inside tuples, lists
    and dicts.
    """
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        changed = [map_tensors(v, change) for v in value]
        return (
            type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
        )
    return (
        {k: map_tensors(v, change) for k, v in value.items()}
        if isinstance(value, dict)
        else value
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out."""
    said = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in said for text in _OUT_OF_MEMORY
    )
