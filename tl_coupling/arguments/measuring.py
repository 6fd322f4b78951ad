"""The state in which every public call computes, whatever its caller's contexts.

Autocast, TF32, torch's default dtype and default device would change numbers without a
word. Some of these belong to the process, as do the levels of forward differentiation
and, in `blocks`, weights, hooks and attention kernels. So one thread measures at a
time. A child that is forked meanwhile finds the turn free, and all of it as it was
(`forks`).
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch

from tl_coupling.arguments.forks import call_in_children, fork_safe_lock, shared_changes
from tl_coupling.interrupts import interrupts_held

_Function = TypeVar("_Function", bound=Callable[..., object])

_turn = fork_safe_lock()
# Those whose autocast torch knows by name, beside devices that others add.
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Names of reduced precision, and that of float32 as it is.
_REDUCED = ("tf32", "bf16")
_FULL = "ieee"
_CPU = torch.device("cpu")


class _ThreadState(threading.local):
    """Whether the thread is measuring, and what new tensors are elsewhere in it.

    `lost_threads` is of a child: with how many threads of torch's this one has measured
    in the parent. They are not in the child.
    """

    is_measuring = False
    has_measured = False
    default_device = _CPU
    default_dtype = torch.float32
    lost_threads: int | None = None


_own = _ThreadState()


@contextmanager
def measuring() -> Iterator[None]:
    """Compute as torch does where nothing was set, one thread at a time.

    Autocast, TF32 and inference mode are off; new tensors are float32 and on the CPU.
    Whether gradients are recorded is left to the caller. In a thread that is measuring
    already, nothing changes.
    """
    if _own.is_measuring:
        yield
        return
    with _turn, ExitStack() as undo, shared_changes() as undo_shared:
        with interrupts_held():
            # First in, so last undone: the thread counts as measuring until all is as
            # it was.
            undo.callback(setattr, _own, "is_measuring", False)
            _own.is_measuring = True
            _switch_autocast_off(undo)
            _leave_lost_threads_out(undo)
            _switch_reduced_precision_off(undo_shared)
            _reset_defaults(undo, undo_shared)
        try:
            yield
        finally:
            with interrupts_held():
                undo_shared.close()
                undo.close()


@contextmanager
def others_measuring() -> Iterator[None]:
    """Give up this thread's turn in this context: it waits for other threads."""
    if not _own.is_measuring:
        yield
        return
    # Other threads of this process may be the workers that it waits for.
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()


def join_measuring() -> None:
    """Count this thread, for as long as it lives, to the one that waits for it."""
    _own.is_measuring = True


@contextmanager
def defaults_of_model(
    device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[None]:
    """Restore the user's default device or dtype in this context if it is this one.

    A model's own code may count on it.
    """
    with ExitStack() as undo, shared_changes() as undo_shared:
        if _own.default_dtype == dtype:
            _set_default_dtype(dtype, undo_shared)
        if _own.default_device == device:
            _set_default_device(device, undo)
        yield


def is_measured(function: _Function) -> _Function:
    """Record that a function does all that it does `measuring`."""
    vars(function)["is_measured"] = True
    return function


def measure_members(cls: type) -> None:
    """Let public methods and properties of a class compute `measuring`."""
    for name, member in list(vars(cls).items()):
        # Private ones are called by public ones, which measure already.
        if name.startswith("_"):
            continue
        match member:
            case property():
                setattr(cls, name, property(_measured(member.fget), doc=member.__doc__))
            case functools.cached_property():
                member.func = _measured(member.func)
            case classmethod() | staticmethod():
                setattr(cls, name, type(member)(_measured(member.__func__)))
            case FunctionType():
                setattr(cls, name, _measured(member))


def _measured(function: Any) -> Any:
    """Return a function that computes `measuring`."""
    if getattr(function, "is_measured", False):
        return function

    @is_measured
    @functools.wraps(function)
    def measured_call(*args: object, **kwargs: object) -> object:
        with measuring():
            return function(*args, **kwargs)

    return measured_call


def _switch_autocast_off(undo: ExitStack) -> None:
    """Leave autocast of every device, and inference mode: its tensors could not be
    differentiated later.
    """
    added = torch._C._get_privateuse1_backend_name()
    for device in (*_AUTOCAST_DEVICES, added):
        if torch.is_autocast_enabled(device):
            undo.enter_context(torch.autocast(device, enabled=False))
    if torch.is_inference_mode_enabled():
        undo.enter_context(torch.inference_mode(False))
        # Inference mode records no gradients, and leaving it must not begin to.
        undo.enter_context(torch.no_grad())


def _leave_lost_threads_out(undo: ExitStack) -> None:
    """Compute with one thread in a child whose parent has others of torch's.

    GNU's OpenMP would wait for them for ever. Where the child has set how many there are,
    it knows.
    """
    n_threads = torch.get_num_threads()
    if n_threads > 1 and n_threads == _own.lost_threads:
        undo.callback(torch.set_num_threads, n_threads)
        torch.set_num_threads(1)
    _own.has_measured = True


def _note_lost_threads() -> None:
    """Remember, in a child, with how many threads its own one has measured before."""
    if _own.has_measured:
        _own.lost_threads = torch.get_num_threads()


call_in_children(_note_lost_threads)


def _switch_reduced_precision_off(undo: ExitStack) -> None:
    """Compute products and convolutions of float32 in float32."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    if not hasattr(cuda.matmul, "fp32_precision"):  # torch before 2.9
        for switch in (cuda.matmul, cudnn):
            undo.callback(setattr, switch, "allow_tf32", switch.allow_tf32)
            switch.allow_tf32 = False
        return
    for operation in (
        cudnn.conv,
        cudnn.rnn,
        mkldnn.conv,
        mkldnn.rnn,
        mkldnn.matmul,
        cuda.matmul,
    ):
        precision = operation.fp32_precision
        if precision in _REDUCED:
            undo.callback(_restore_precision, operation, precision)
            operation.fp32_precision = _FULL


def _restore_precision(operation: Any, precision: str) -> None:
    """Let an operation have the precision that it had, of its own if it must be.

    One that follows `torch.backends.fp32_precision` should do so afterwards.
    """
    operation.fp32_precision = "none"
    if operation.fp32_precision != precision:
        operation.fp32_precision = precision


def _reset_defaults(undo: ExitStack, undo_shared: ExitStack) -> None:
    """Make new tensors float32 and on the CPU; remember what they were."""
    for name, value in (
        ("default_dtype", torch.get_default_dtype()),
        ("default_device", torch.get_default_device()),
    ):
        undo.callback(setattr, _own, name, getattr(_own, name))
        setattr(_own, name, value)
    # The dtype is the process's, the device the thread's.
    _set_default_dtype(torch.float32, undo_shared)
    _set_default_device(_CPU, undo)


def _set_default_dtype(dtype: torch.dtype, undo: ExitStack) -> None:
    """Make new tensors have a dtype until `undo`."""
    default_dtype = torch.get_default_dtype()
    if default_dtype != dtype:
        undo.callback(torch.set_default_dtype, default_dtype)
        torch.set_default_dtype(dtype)


def _set_default_device(device: torch.device, undo: ExitStack) -> None:
    """Put new tensors on a device until `undo`.

    Not where they are there already: every call of torch would cost more.
    """
    if torch.get_default_device() != device:
        undo.enter_context(device)
