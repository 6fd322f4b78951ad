"""Checksums of weights, by which models of one name, and modules that a user has put
into one, are told apart.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# About so many places along each dimension of a weight go into the checksum.
_N_SAMPLED = 4
# Objects within each other are looked into down to this depth.
_DEEPEST = 12


def weights_digest(model: nn.Module) -> str | None:
    """Return what tells models of one name apart: a checksum of a few weights of every
    parameter.

    It is the same on every device, and in every dtype that holds the weights exactly. A
    change of single weights may escape it. None for a streamed model, whose weights are
    in its files, and for one without parameters.
    """
    parameters = list(model.parameters())
    if not parameters or any(parameter.is_meta for parameter in parameters):
        return None
    home = parameters[0].device
    # One transfer for all: each by itself makes a GPU wait.
    sample = torch.cat([_sample(p).flatten().to(home) for p in parameters]).cpu()
    if bool(sample.isnan().any()):
        return None
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()


def module_digest(module: nn.Module) -> str | None:
    """Return a checksum of a module that a user has put into a model: of all tensors and
    settings that it holds, however it keeps them, and of the code of functions.

    Tensors are found among parameters, buffers and attributes, within containers and
    other objects, and in what functions have closed over. None where there are no
    tensors to be found: it is not known then what tells the module apart.
    """
    digest = hashlib.sha256()
    n_tensors = 0
    for part in _held(module, set(), 0):
        if isinstance(part, Tensor):
            if part.is_meta:
                return None
            n_tensors += 1
            digest.update(_sample(part).cpu().numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest() if n_tensors else None


def _sample(tensor: Tensor) -> Tensor:
    """Return some entries of a tensor, evenly spaced."""
    # So that every part of a weight has its say.
    strides = (max(1, size // _N_SAMPLED) for size in tensor.shape)
    sampled = tuple(slice(None, None, stride) for stride in strides)
    values = tensor.detach()[sampled]
    if values.is_complex():
        values = torch.view_as_real(values)
    # float32 holds float16 and bfloat16 exactly: the digest is that of the numbers.
    return values.float().contiguous()


def _held(value: Any, seen: set[int], depth: int) -> Iterator[object]:
    """Yield the tensors, settings and code that an object holds, each once."""
    match value:
        case bool() | float() | str():
            yield value
            return
        case None | int() | bytes() | type():
            # Numbers may be counts of calls.
            return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for inner in _parts(value):
        yield from _held(inner, seen, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object holds directly."""
    match value:
        case Mapping():
            return [*value.keys(), *value.values()]
        case list() | tuple() | set() | frozenset():
            return value
        case partial():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__func__, value.__self__]
        case FunctionType():
            contents = [_content(cell) for cell in value.__closure__ or ()]
            return [*_code(value.__code__), *contents, value.__defaults__]
        case nn.Module():
            # Hooks that others put on it come and go.
            attributes = {
                name: attribute
                for name, attribute in vars(value).items()
                if "hooks" not in name and name != "training"
            }
            return [attributes]
    # Objects of Python's own and of libraries hold more than themselves.
    return [getattr(value, "__dict__", {})]


def _code(code: CodeType) -> list[str]:
    """Return what tells the code of two functions apart."""
    constants = [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]
    return [code.co_code.hex(), *code.co_names, *constants]


def _content(cell: CellType) -> Any:
    """Return what a function has closed over; None of a name that has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
