"""What goes wrong while a model is loaded, as one line that says what to do."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ModelError(ValueError):
    """A model could not be loaded; the message says what to do."""


@contextmanager
def one_line_errors(name: str, checkpoint: int | str | None) -> Iterator[None]:
    """Whatever TransformerLens and HuggingFace raise while loading, as one line. Out of memory is raised as it is."""
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "can't allocate memory" in text:
            raise
        what = repr(name) + (f" at checkpoint {checkpoint!r}" if checkpoint is not None else "")
        raise ModelError(f"could not load {what}: {_advice(text, type(error).__name__)}") from error


CUSTOM_CODE = (
    "it comes with Python code of its own, which is run only if asked for: read that code, then "
    "`load_model(…, trust_remote_code=True)`"
)
_LISTED = (
    "HookedTransformer takes hub models that TransformerLens lists (`transformer_lens.loading.OFFICIAL_MODEL_NAMES`)"
)
# What known messages mean.
_KNOWN = {
    "trust_remote_code=True": CUSTOM_CODE,
    "Weights only load failed": "its weights are a pickle that holds more than tensors and would run code; wanted "
    "safetensors",
    "Valid official model names": f'{_LISTED}; use backend="bridge"',
}
# What to do about messages that are quoted as well.
_GENERAL = {
    "Consistency check failed|Server [Ee]rror|Too Many": "the hub failed or broke off the download; finished files are "
    "kept, try again",
    "connect|[Oo]ffline|LocalEntryNotFound|resolve host": "no network and not in the local cache; go online once, or "
    "give a local folder or 'smollm2-135m'",
    "": "wanted a HuggingFace hub name, a local folder in HuggingFace format, or 'smollm2-135m'",
}


def _advice(text: str, kind: str) -> str:
    for known, meaning in _KNOWN.items():
        if known in text:
            return meaning
    if "Could not determine supported architecture" in text:
        named = re.search(r"Config architectures: \[([^]]+)\]", text)
        lacks = f"transformer-lens {importlib.metadata.version('transformer-lens')} has no adapter for its architecture"
        listed = "`TransformerBridge.list_supported_models()` names what it has"
        return f"{lacks}{f', {named[1]}' if named else ''}; {listed}"
    what_to_do = next(advice for words, advice in _GENERAL.items() if re.search(words, text))
    return f"{what_to_do} ({kind}: {text if len(text) <= 200 else f'{text[:200]}…'})"
