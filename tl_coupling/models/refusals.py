"""What is refused before a model loads: too many layers, and code that nobody asked to
run.
"""

from contextlib import suppress
from pathlib import Path

from tl_coupling.models.advice import CUSTOM_CODE
from tl_coupling.models.completeness import check_depth
from tl_coupling.models.errors import ModelError


def refuse_no_folder(source: str) -> None:
    """Raise ModelError on a folder that is not there, before the hub is asked for a
    model of that name: what cannot be a name on it must be a folder.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if Path(source).is_dir():
        return
    try:
        validate_repo_id(source)
    except HFValidationError:
        problem = "there is no such folder"
        if Path(source).exists():
            problem = "it is a file"
        raise ModelError(
            f"could not load '{source}': {problem}; wanted a local folder in HuggingFace "
            "format, a GGUF file, a hub name (`owner/name`), or 'smollm2-135m'"
        ) from None


def refuse_depth(name: str, source: str, revision: str | None) -> None:
    """Raise ModelError on a configuration of too many layers, before it is made: some
    list the kind of each layer.
    """
    from transformers import PretrainedConfig

    # Without one, loading says what is wrong. Some hub names have an alias, which is
    # resolved later.
    with suppress(OSError):
        fields, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        check_depth(name, fields)


def refuse_custom_code(name: str, source: str, revision: str | None) -> None:
    """Raise ModelError on a model with code of its own: HookedTransformer runs it
    unasked for names like "Qwen/Qwen-".
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    # A model in another format than HuggingFace's names no code.
    with suppress(OSError):
        fields, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        has_code = "auto_map" in fields
        if not has_code:
            has_code = "auto_map" in get_tokenizer_config(source, revision=revision)
        if has_code:
            raise ModelError(f"could not load {name!r}: {CUSTOM_CODE}")
