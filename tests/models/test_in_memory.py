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

try:
    import peft
except ImportError:
    peft = None
needs_peft = pytest.mark.skipif(peft is None, reason="needs peft")

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


def test_an_adapter_of_another_make_on_a_fused_projection_is_measured() -> None:
    """TransformerLens splits queries, keys and values, and would lose it."""
    model = tiny.huggingface_model("phi3")
    attention = model.model.layers[1].self_attn
    attention.qkv_proj = LowRank(attention.qkv_proj)
    trace = tlc.trace(model, IDS)
    assert trace.provenance["backend"] == "huggingface"
    attention.qkv_proj = attention.qkv_proj.merged()
    merged = coupling(tlc.trace(model, IDS))
    torch.testing.assert_close(coupling(trace), merged, atol=1e-5, rtol=1e-4)


# A fused projection, which TransformerLens splits, is among those of all but Llama.
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
KINDS = [
    ("llama", "LoRA"),
    ("gpt2", "LoRA"),
    ("gpt2", "IA3"),
    ("gpt_neox", "DoRA"),
    ("phi3", "LoRA"),
]


def adapted(architecture: str, kind: str) -> Any:
    """Return a model of peft whose adapters change what it computes."""
    targets = TARGETS[architecture]
    if kind == "IA3":
        config = peft.IA3Config(
            target_modules=targets, feedforward_modules=targets[-1:]
        )
    else:
        config = peft.LoraConfig(
            r=4, target_modules=targets, lora_dropout=0.1, use_dora=kind == "DoRA"
        )
    model = peft.get_peft_model(tiny.huggingface_model(architecture), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "ia3_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.3 * noise
    return model


def blocks_of(model: Any) -> list[nn.Module]:
    return list(tiny.layers_of(model.get_base_model()))


@needs_peft
@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_an_adapter_of_peft_is_measured_as_its_merged_copy(
    architecture: str, kind: str
) -> None:
    """The merged model, and the adapted model's own blocks, without a bridge."""
    model = adapted(architecture, kind).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    measured = coupling(tlc.trace(model, IDS))
    assert model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    model.eval()
    ids = torch.tensor([IDS])
    own = coupling(tlc.trace_modules(blocks_of(model), lambda: model(ids)))
    bare = coupling(tlc.trace(tiny.huggingface_model(architecture), IDS))
    with model.disable_adapter():
        off = coupling(tlc.trace(model, IDS))
    merged = coupling(tlc.trace(model.merge_and_unload(), IDS))
    torch.testing.assert_close(measured, merged, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(measured, own, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(off, bare, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(measured, bare, atol=1e-2)


@needs_peft
def test_learned_tokens_before_the_prompt_are_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny.huggingface_model("gpt2"), config)
    with pytest.raises(tlc.ModelError, match="puts learned tokens before each prompt"):
        tlc.trace(model, IDS)


def test_a_model_that_is_given_as_a_name_is_sent_to_its_argument() -> None:
    with pytest.raises(TypeError, match=r"got LlamaForCausalLM: .* into `hf_model=`"):
        tlc.load_model(tiny.huggingface_model("llama"))


def test_an_encoder_decoder_model_is_refused_and_its_stacks_are_measured() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=100, **shape)).eval()
    refused = r"is an encoder–decoder .* \(`tl_coupling.trace_modules` takes the blocks"
    with pytest.raises(tlc.ModelError, match=refused):
        tlc.trace(model, IDS)
    with pytest.raises(tlc.ModelError, match=refused):
        tlc.load_model(hf_model=model)
    ids = torch.tensor([IDS])

    def run() -> object:
        return model(input_ids=ids, decoder_input_ids=ids)

    for stack in (model.encoder, model.decoder):
        trace = tlc.trace_modules(list(stack.block), run)
        # T5's attention takes its tokens apart in a way that no single row has.
        with pytest.warns(UserWarning, match="a more expensive way was used"):
            measured = coupling(trace)
        assert measured.isfinite().all()


def test_a_model_without_weights_is_refused_by_name() -> None:
    weightless = tiny.huggingface_model("llama").to("meta")
    refused = r"`model\.embed_tokens\.weight` is on the device meta.*: load them"
    with pytest.raises(tlc.ModelError, match=f"^LlamaForCausalLM must .* {refused}"):
        tlc.trace(weightless, IDS)
    with pytest.raises(tlc.ModelError, match=refused):
        tlc.load_model(hf_model=weightless)
    blocks = weightless.model.layers
    ids = torch.tensor([IDS], device="meta")
    with pytest.raises(tlc.ModelError, match=r"^`blocks` must have weights, `0\."):
        tlc.trace_modules(blocks, lambda: weightless(ids))


def test_a_bridge_of_transformer_lens_rewires_the_model_that_it_gets(
    tmp_path: Path,
) -> None:
    """What the pages on training and on fine-tuned models warn of; where it no longer
    does, they can say so.
    """
    import transformer_lens.model_bridge.sources.transformers  # noqa: F401
    from transformer_lens.model_bridge import TransformerBridge

    from tl_coupling.models.tokenization import wordless_tokenizer

    model = tiny.huggingface_model("llama")
    modules = dict(model.named_modules())
    tlc.trace(tlc.load_model(hf_model=model), IDS)
    assert dict(model.named_modules()) == modules
    model.config.architectures = ["LlamaForCausalLM"]
    TransformerBridge.boot_transformers(
        "local/x", hf_model=model, tokenizer=wordless_tokenizer(), device="cpu"
    )
    assert dict(model.named_modules()) != modules
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path)
