"""The one patch of transformers: it reads weights that are only to be located.

A model that is left on disk (`device_map={"": "disk"}`) is materialised all the same:
each weight is read, cast to the dtype of the model, and let go again
(`core_model_loading.spawn_materialize`, seen in transformers 5.23; no option keeps it
from doing so). Of a model of 0.8 billion weights in bfloat16, loading takes twice as
long, and 1 GB more. `tests/models/test_patched_transformers.py` fails once the patch
can go.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tl_coupling.arguments import shared_changes


@contextmanager
def skip_reading_weights() -> Iterator[None]:
    """Keep transformers from reading, in this thread, what it would only cast to
    another dtype and let go again. What it merges into other weights it does read.
    """
    from transformers import core_model_loading

    # Versions without it need the time and the memory, and locate the same weights.
    read = getattr(core_model_loading, "spawn_materialize", None)
    if read is None:
        yield
        return
    thread = threading.get_ident()

    def locate(
        pool: object,
        tensor: Any,
        device: object = None,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> object:
        is_one_tensor = options.get("tensor_idx") is None
        is_whole = options.get("sharding_op") is None
        is_plain = is_one_tensor and is_whole and hasattr(tensor, "get_shape")
        if is_plain and dtype is not None and threading.get_ident() == thread:
            return torch.empty(tensor.get_shape(), dtype=dtype, device="meta")
        return read(pool, tensor, device, dtype, **options)

    with shared_changes(patch.object(core_model_loading, "spawn_materialize", locate)):
        yield
