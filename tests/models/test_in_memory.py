"""HuggingFace models in memory: measured as their saved copies are, and left as they
were.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

import tiny
import tl_coupling as tlc

IDS = [1, 5, 3, 9, 2, 7]


def coupling(trace: tlc.Trace) -> torch.Tensor:
    return tlc.depth_coupling(trace, k=4).coupling()


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gpt_neox"])
def test_a_folder_a_bridge_and_a_model_in_memory_are_equal(
    architecture: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    model = tiny.huggingface_model(architecture)
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    in_memory = coupling(tlc.trace(model, IDS))
    loaded = coupling(tlc.trace(tlc.load_model(hf_model=model), IDS))
    folder = coupling(tlc.trace(tlc.load_model(str(tmp_path)), IDS))
    bridge = coupling(tlc.trace(tiny.bridge(model, tokenizer_folder), IDS))
    for other in (loaded, folder, bridge):
        assert torch.allclose(in_memory, other, atol=1e-6)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_model_stays_as_it_is(architecture: str, tmp_path: Path) -> None:
    model = tiny.huggingface_model(architecture).train()
    model.set_attn_implementation("sdpa")
    classes = {name: type(part) for name, part in model.named_modules()}
    ids = torch.tensor([IDS])
    with torch.no_grad():
        model.eval()
        logits = model(ids).logits
        model.train()
    for _ in range(2):
        tlc.trace(model, IDS)
    assert model.training
    assert {name: type(part) for name, part in model.named_modules()} == classes
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, logits)


def test_weights_are_shared_and_not_copied() -> None:
    model = tiny.huggingface_model("llama")
    loaded = tlc.load_model(hf_model=model)
    before = coupling(tlc.trace(loaded, IDS))
    shared = {p.data_ptr() for p in model.parameters()}
    assert shared <= {p.data_ptr() for p in loaded.parameters()}
    with torch.no_grad():
        for block in tiny.layers_of(model):
            block.mlp.down_proj.weight.mul_(3)
    assert not torch.allclose(coupling(tlc.trace(loaded, IDS)), before, atol=1e-3)


def test_texts_need_the_tokenizer(tokenizer_folder: Path) -> None:
    model = tiny.huggingface_model("llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    trace = tlc.trace(model, "w3 w14 w15", tokenizer=tokenizer)
    assert trace.str_tokens[-1].strip() == "w15"
    with pytest.raises(ValueError, match="tokenizer"):
        tlc.trace(model, "w3 w14 w15")
    loaded = tlc.load_model(hf_model=model, tokenizer=tokenizer, label="mine")
    assert tlc.trace(loaded, "w3 w14").provenance["model"] == "mine"
    with pytest.raises(ValueError, match="has its own: leave it out"):
        tlc.trace(loaded, "w3", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "gpt2"},
        {"untrained": True},
        {"backend": "bridge"},
        {"checkpoint": 3},
        {"dtype": "float64"},
    ],
)
def test_nothing_else_goes_with_a_model_in_memory(options: dict[str, Any]) -> None:
    model = tiny.huggingface_model("llama")
    with pytest.raises(tlc.ModelError, match="`hf_model` is loaded already"):
        tlc.load_model(**options, hf_model=model)
    with pytest.raises(tlc.ModelError, match="`name` is missing"):
        tlc.load_model()


class LowRank(nn.Module):
    """What peft puts in a linear layer's place, with its names."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def merged(self) -> nn.Linear:
        layer = nn.Linear(
            self.base_layer.in_features, self.base_layer.out_features, bias=False
        )
        added = self.lora_B.weight @ self.lora_A.weight
        layer.weight.data = (self.base_layer.weight + added).detach()
        return layer


def test_an_adapter_that_is_not_merged_is_measured_as_its_merged_copy() -> None:
    model = tiny.huggingface_model("llama")
    bare = coupling(tlc.trace(model, IDS))
    torch.manual_seed(0)
    for block in tiny.layers_of(model):
        for part, name in (
            (block.self_attn, "q_proj"),
            (block.self_attn, "v_proj"),
            (block.mlp, "down_proj"),
        ):
            setattr(part, name, LowRank(getattr(part, name)))
    adapted = coupling(tlc.trace(model, IDS))
    for block in tiny.layers_of(model):
        for part, name in (
            (block.self_attn, "q_proj"),
            (block.self_attn, "v_proj"),
            (block.mlp, "down_proj"),
        ):
            setattr(part, name, getattr(part, name).merged())
    merged = coupling(tlc.trace(model, IDS))
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert not torch.allclose(adapted, bare, atol=1e-3)
