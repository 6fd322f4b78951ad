"""An adapter beside a model's weights is named, or refused."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
import tl_coupling as tlc


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    """A folder with a whole model and an adapter of it."""
    folder = tmp_path / "adapted"
    tiny.huggingface_model("llama").save_pretrained(folder)
    tiny.save_tokenizer(folder)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
    )
    (folder / "adapter_model.safetensors").write_bytes(b"weights of an adapter")
    return folder


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Pretend that peft is installed, or is not."""
    # transformers asks once in each process: it shall know of what is really there.
    transformers.utils.is_peft_available()
    find_spec = importlib.util.find_spec

    def pretend(is_installed: bool) -> None:
        def found(name: str, *others: Any) -> Any:
            if name == "peft":
                return find_spec("json") if is_installed else None
            return find_spec(name, *others)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return pretend


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_peft_it_is_refused(
    adapted: Path, peft: Callable[[bool], None]
) -> None:
    peft(False)
    message = refused(adapted)
    assert (
        f"the adapter of {str(adapted)!r} (LORA, adapter_model.safetensors" in message
    )
    assert "needs peft, which is not installed: pip install peft" in message
    # The base model is in the same folder.
    (adapted / "adapter_config.json").unlink()
    provenance = tlc.trace(tlc.load_model(str(adapted)), "w7 w8").provenance
    assert "adapter" not in provenance


@pytest.mark.parametrize(
    ("architecture", "targets"),
    # GPT-2's is fused: TransformerLens takes the base weights of its thirds.
    [("llama", ["q_proj", "down_proj"]), ("gpt2", ["c_attn"])],
)
def test_with_peft_it_is_applied_and_named_in_provenance(
    architecture: str, targets: list[str], tmp_path: Path
) -> None:
    """Against the blocks of peft's own model, without a bridge."""
    library = pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapted"
    for path in (base, folder):
        tiny.huggingface_model(architecture).save_pretrained(path)
        tiny.save_tokenizer(path)
    model = library.get_peft_model(
        tiny.huggingface_model(architecture),
        library.LoraConfig(r=4, target_modules=targets, init_lora_weights=False),
    ).eval()
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))

    loaded = tlc.trace(tlc.load_model(str(folder)), tiny.TOKENS)
    digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes())
    assert loaded.provenance["adapter"] == (
        f"LORA, adapter_model.safetensors, SHA-256 {digest.hexdigest()[:16]}"
    )
    ids = torch.tensor([tiny.TOKENS])
    blocks = list(tiny.layers_of(model.get_base_model()))
    own = tlc.trace_modules(blocks, lambda: model(ids))
    torch.testing.assert_close(loaded.residual, own.residual, atol=1e-4, rtol=1e-4)
    bare = tlc.trace(tlc.load_model(str(base)), tiny.TOKENS)
    assert not torch.allclose(loaded.residual, bare.residual, atol=1e-2)


@pytest.mark.parametrize("is_installed", [False, True])
def test_streaming_names_it_and_refuses(
    adapted: Path, peft: Callable[[bool], None], is_installed: bool
) -> None:
    peft(is_installed)
    message = refused(adapted, memory="stream")
    assert message.startswith('`memory="stream"` reads the weights of ')
    assert "its adapter (LORA, adapter_model.safetensors, SHA-256 " in message


@pytest.mark.parametrize("is_installed", [False, True])
def test_one_alone_is_to_be_merged(
    adapted: Path, peft: Callable[[bool], None], is_installed: bool
) -> None:
    peft(is_installed)
    (adapted / "config.json").unlink()
    (adapted / "model.safetensors").unlink()
    message = refused(adapted)
    assert "is an adapter of 'owner/base' alone (LORA, " in message
    assert "(`merge_and_unload` of peft), save that, and load what was saved" in message


def test_the_untrained_twin_has_none(
    adapted: Path, peft: Callable[[bool], None]
) -> None:
    peft(False)
    model = tlc.load_model(str(adapted), untrained=True)
    assert "adapter" not in tlc.trace(model, "w7 w8").provenance
