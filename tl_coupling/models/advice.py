"""What errors of TransformerLens and HuggingFace mean for whoever loads a model, on one
line.
"""

import re

from tl_coupling.models.loaded import version

CUSTOM_CODE = (
    "it comes with Python code of its own, which is run only if asked for: read that "
    "code, then `load_model(…, trust_remote_code=True)`"
)
# The meanings of messages that hold these words.
_MEANINGS = {
    "trust_remote_code=True": CUSTOM_CODE,
    "no file named model.safetensors": (
        "its weights are in no safetensors file, and `memory='stream'` reads no other: "
        "load it without, or save it again with HuggingFace's `save_pretrained`"
    ),
    "Weights only load failed": (
        "its weights are a pickle that would run code; wanted safetensors"
    ),
    "Valid official model names": (
        "HookedTransformer takes hub models that TransformerLens lists "
        '(`transformer_lens.loading.OFFICIAL_MODEL_NAMES`); use backend="bridge"'
    ),
}
# Advice on messages that match these patterns; the messages are quoted as well.
_WHAT_TO_DO = {
    "Consistency check failed|Server [Ee]rror|Too Many": (
        "the hub failed or broke off the download; finished files are kept, try again"
    ),
    "connect|[Oo]ffline|LocalEntryNotFound|resolve host": (
        "no network and not in the local cache; go online once, or give a local folder "
        "or 'smollm2-135m'"
    ),
}
_LACKS_PACKAGE = (
    "a package is missing that it needs, or is of another version: install what the "
    "message names"
)
_NAMES_NO_MODEL = "Unrecognized model|not a valid model identifier|no file named"
# The advice on a name that is unknown, or on a folder in another format.
_WANTED = (
    "wanted a HuggingFace hub name, a local folder in HuggingFace format, or "
    "'smollm2-135m'"
)
_MOST_QUOTED = 200


def advice(error: Exception) -> str:
    """Say what an error of TransformerLens or HuggingFace means, on one line."""
    message = one_line(error)
    for words, meaning in _MEANINGS.items():
        if words in message:
            return meaning
    if "Could not determine supported architecture" in message:
        return _no_adapter(message)
    what_to_do = _what_failed(error, message)
    for pattern, known_advice in _WHAT_TO_DO.items():
        if re.search(pattern, message):
            what_to_do = known_advice
            break
    if len(message) > _MOST_QUOTED:
        message = f"{message[:_MOST_QUOTED]}…"
    return f"{what_to_do} ({type(error).__name__}: {message})"


def _what_failed(error: Exception, message: str) -> str:
    """Say what to do about an error of which nothing more is known than its class."""
    if isinstance(error, ImportError):
        return _LACKS_PACKAGE
    if isinstance(error, OSError) or re.search(_NAMES_NO_MODEL, message):
        return _WANTED
    return (
        f"transformers {version('transformers')} or transformer-lens "
        f"{version('transformer-lens')} fails on its files: see whether transformers "
        "alone loads them, and whether they are whole"
    )


def one_line(error: BaseException) -> str:
    """Return an error's message without its line breaks."""
    return " ".join(str(error).split())


def _no_adapter(message: str) -> str:
    named = re.search(r"Config architectures: \[([^]]+)\]", message)
    architecture = f", {named[1]}" if named else ""
    return (
        f"transformer-lens {version('transformer-lens')} has no adapter for its "
        f"architecture{architecture}; give it one through its entry-point group "
        "`transformer_lens.architectures`, or trace the model's blocks with "
        "`tl_coupling.trace_modules`"
    )
