"""PEFT adapters beside a model's weights, or in a model. transformers applies them
where peft is installed, and measures the base model without a word where it is not.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.weights import needs_package

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_beside(
    name: str, source: str, revision: str | None, is_streamed: bool
) -> str | None:
    """Return what provenance says of the adapter that transformers applies to a model;
    None where there is none.

    Args:
        name: the model's name in error messages.
        source: a folder or a hub name.
        revision: the branch or commit on the hub.
        is_streamed: whether weights are left in their files.

    Raises:
        ModelError: there is one, and peft is not installed or weights are streamed.
    """
    config = _config_file(source, revision)
    if config is None:
        return None
    adapter = _described(config)
    if is_streamed:
        raise ModelError(
            f'`memory="stream"` reads the weights of {name!r} from their files, and its '
            f"adapter ({adapter}) changes them: merge it (`merge_and_unload` of peft), "
            'save that, and load what was saved, or leave `memory="stream"` out'
        )
    # Without peft transformers would load the base model and say nothing.
    needs_package(f"the adapter of {name!r} ({adapter})", "peft")
    return adapter


def refuse_lone_adapter(name: str, source: str) -> None:
    """Raise ModelError on a folder that holds an adapter without its base model."""
    folder = Path(source)
    if (folder / _CONFIG).is_file() and not (folder / "config.json").is_file():
        base = _fields(folder / _CONFIG).get("base_model_name_or_path")
        base_name = f" of {base!r}" if base else ""
        raise ModelError(
            f"{name!r} is an adapter{base_name} alone ({_described(folder / _CONFIG)}): "
            "merge it into its base model (`merge_and_unload` of peft), save that, and "
            "load what was saved"
        )


def layers_with_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that an adapter changes, by name.

    Where the adapter is off, or merged already, a layer computes what its base layer
    does, and does not count.
    """
    return {
        name: module
        for name, module in model.named_modules()
        # The name that peft gives to what it wraps.
        if isinstance(getattr(module, "base_layer", None), nn.Module)
        and getattr(module, "merged", False) is not True
        and getattr(module, "disable_adapters", False) is not True
    }


def merge_adapters(model: nn.Module) -> None:
    """Merge the adapters of peft into their base layers, in place, as its
    `merge_and_unload` does, and take them out.

    TransformerLens splits fused projections, and would take their base weights alone.
    """
    for name, module in layers_with_adapters(model).items():
        layer: Any = module
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())


def _config_file(source: str, revision: str | None) -> Path | None:
    if Path(source).is_dir():
        local = Path(source) / _CONFIG
        return local if local.is_file() else None
    from transformers.utils.hub import cached_file

    # A repository without one, or no network.
    with suppress(OSError):
        file = cached_file(
            source,
            _CONFIG,
            revision=revision,
            # Most models have no adapter: its absence is an answer and no error.
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if file is None else Path(file)
    return None


def _fields(config: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        fields = json.loads(config.read_text())
        if isinstance(fields, dict):
            return fields
    return {}


def _described(config: Path) -> str:
    """Return the adapter's kind, and a checksum of its weights where they are known."""
    kind = str(_fields(config).get("peft_type", "of an unknown kind"))
    for file in _WEIGHTS:
        weights = config.with_name(file)
        if weights.is_file():
            digest = hashlib.sha256(weights.read_bytes()).hexdigest()
            return f"{kind}, {file}, SHA-256 {digest[:16]}"
    return f"{kind}, {_CONFIG}"
