"""The one patch for TransformerLens: it installs a package that nobody asked for.

Where the processor of a multimodal model fails, and torchvision cannot be imported, it
runs `pip install torchvision` (where `boot_transformers` loads the processor; seen in
3.9 to 4.3). No option keeps it from doing so, and the function that it calls,
`subprocess.check_call`, is everybody's. `tests/models/test_patched_transformer_lens.py`
fails once the patch can go.
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from tl_coupling.arguments import fork_safe_lock, shared_changes, warn_caller

_installing = fork_safe_lock()


@contextmanager
def nothing_installed(name: str) -> Iterator[None]:
    """Keep TransformerLens from installing torchvision for a multimodal model's images,
    which text does not need.
    """
    refused = []

    def check_call(
        command: str | Sequence[str], *args: object, **options: object
    ) -> int:
        # Other calls go through: this is everybody's subprocess.
        if isinstance(command, list) and {"pip", "install"} <= set(command):
            refused.append(command)
            raise PermissionError("tl_coupling installs nothing")
        return original(command, *args, **options)

    # Without the lock, of two loads at once the one that ends later would put back the
    # substitute of the other.
    with _installing:
        original: Callable[..., int] = subprocess.check_call
        with shared_changes(patch.object(subprocess, "check_call", check_call)):
            yield
    if refused:
        warn_caller(
            f"{name!r} is loaded without its image processor, which text does not "
            "need; nothing was installed. If it needs torchvision: `pip install "
            "torchvision`, from the index that your torch "
            f"{torch.__version__} came from"
        )
