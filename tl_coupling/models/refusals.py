"""What is refused while a model loads: too many layers, code that nobody asked to run,
and installing packages.
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tl_coupling.arguments import warn_caller
from tl_coupling.models.advice import CUSTOM_CODE
from tl_coupling.models.completeness import check_depth
from tl_coupling.models.errors import ModelError

_installing = threading.RLock()


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

    # What is not in HuggingFace format names no code.
    with suppress(OSError):
        fields, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        has_code = "auto_map" in fields
        if not has_code:
            has_code = "auto_map" in get_tokenizer_config(source, revision=revision)
        if has_code:
            raise ModelError(f"could not load {name!r}: {CUSTOM_CODE}")


@contextmanager
def nothing_installed(name: str) -> Iterator[None]:
    """Keep TransformerLens from installing torchvision for a multimodal model's images,
    which text does not need.
    """
    refused = []

    def check_call(command: Any, *args: Any, **kwargs: Any) -> int:
        # Other calls go through: this is everybody's subprocess.
        if isinstance(command, list) and {"pip", "install"} <= set(command):
            refused.append(command)
            raise PermissionError("tl_coupling installs nothing")
        return original(command, *args, **kwargs)

    # Without the lock, of two loads at once the one that ends later would put back the
    # substitute of the other.
    with _installing:
        original = subprocess.check_call
        with patch.object(subprocess, "check_call", check_call):
            yield
    if refused:
        warn_caller(
            f"{name!r} is loaded without its image processor, which text does not need; "
            "nothing was installed. If it needs torchvision: `pip install torchvision`, "
            f"from the index that your torch {torch.__version__} came from"
        )
