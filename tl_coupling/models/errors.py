"""What goes wrong while a model is loaded, as one line that says what to do."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LONGEST = 200


class ModelError(ValueError):
    """A model could not be loaded; the message says what to do."""


@contextmanager
def one_line_errors(name: str, checkpoint: int | str | None) -> Iterator[None]:
    """Whatever TransformerLens and HuggingFace raise while loading, as one line. Out of memory stays what it is."""
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "can't allocate memory" in text:
            raise
        what = repr(name) + (f" at checkpoint {checkpoint!r}" if checkpoint is not None else "")
        cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        reason = f"({type(error).__name__}: {cut})"
        raise ModelError(f"could not load {what}: {_advice(text) or f'{_elsewhere(text)} {reason}'}") from error


def custom_code(name: str) -> ModelError:
    """The refusal of a model whose folder or repository holds Python code of its own."""
    return ModelError(f"could not load {name!r}: {_CUSTOM_CODE}")


_CUSTOM_CODE = (
    "it comes with Python code of its own, which is run only if asked for: read that code, then "
    "`load_model(…, trust_remote_code=True)`"
)


def _advice(text: str) -> str | None:
    """What a known message means, where the message itself adds nothing."""
    if "trust_remote_code=True" in text:
        return _CUSTOM_CODE
    if "Weights only load failed" in text:
        return "its weights are a pickle that holds more than tensors and would run code; wanted safetensors"
    if "Valid official model names" in text:
        return (
            "HookedTransformer takes hub models that TransformerLens lists "
            '(`transformer_lens.loading.OFFICIAL_MODEL_NAMES`); use backend="bridge"'
        )
    if "Could not determine supported architecture" in text:
        named = re.search(r"Config architectures: \[([^]]*)\]", text)
        version = importlib.metadata.version("transformer-lens")
        return (
            f"transformer-lens {version} has no adapter for its architecture"
            f"{f', {named[1]}' if named and named[1] else ''}; "
            "`TransformerBridge.list_supported_models()` names what it has"
        )
    return None


def _elsewhere(text: str) -> str:
    """What to do about a message that is quoted as well."""
    if any(word in text for word in ("Consistency check failed", "Server Error", "Server error", "Too Many")):
        return "the hub failed, or broke off; what came is kept, try again"
    if any(word in text for word in ("connect", "offline", "Offline", "LocalEntryNotFound", "resolve host")):
        return "no network and not in the local cache; go online once, or give a local folder or 'smollm2-135m'"
    return "wanted a HuggingFace hub name, a local folder in HuggingFace format, or 'smollm2-135m'"
