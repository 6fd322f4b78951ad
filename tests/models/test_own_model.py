"""What is measured is the model that was given: its own call, hooks, masks and attention.

Against autograd through that model, by which no bridge is called.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaConfig

import changed_models
import tiny
import tl_coupling as tlc
from changed_models import IDS, KINDS, Given, NotPossible, verdict
from tl_coupling.blocks import mean_weights
from tl_coupling.directions.downstream import change_of_logits

pytestmark = pytest.mark.both_lines

OWN_MODULES = "measured by the HuggingFace model's own modules"


def a_change(kind: str) -> Given:
    """Return the first model on which a kind of change is possible."""
    for seed in range(100):
        rng = random.Random(f"{kind} {seed}")
        model = tiny.huggingface_model(rng.choice(changed_models.ARCHITECTURES))
        try:
            changed, inputs, where = KINDS[kind](model, rng)
        except NotPossible:
            continue
        text = {"input_ids": torch.tensor([IDS]), **inputs}
        return Given(changed.eval(), text, where)
    pytest.skip(f"no {kind} here: it needs another package")


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.filterwarnings("ignore:.*token_local_recorded failed")
@pytest.mark.parametrize("kind", KINDS)
def test_one_change_of_each_kind_is_right_or_refused(kind: str) -> None:
    given = a_change(kind)
    result = verdict(given, random.Random(kind))
    assert result == "right" or result.startswith("refused: "), given.change


@pytest.mark.long("60 models, each with autograd through all of it")
@pytest.mark.filterwarnings("ignore")
def test_changes_drawn_at_random_are_right_or_refused() -> None:
    n_right = 0
    for i in range(60):
        rng = random.Random(f"0 {i}")
        given = changed_models.draw(rng)
        result = verdict(given, rng)
        assert result == "right" or result.startswith("refused: "), given.change
        n_right += result == "right"
    # What refuses everything is right about nothing.
    assert n_right > 50


def jacobian(model: Any, layer: int = 1) -> torch.Tensor:
    return tlc.block_jacobian(tlc.trace(model, IDS), layer)


def oracle(model: nn.Module, layer: int = 1) -> torch.Tensor:
    t = len(IDS) - 1
    return tiny.oracle_jacobian(model, IDS, layer, t, t)


def test_a_model_as_it_is_needs_no_word() -> None:
    trace = tlc.trace(tiny.huggingface_model("gpt2"), IDS)
    assert trace.provenance["backend"] == "huggingface"
    assert trace.provenance["remarks"] == []


def loaded_folder(model: Any, folder: Path) -> Any:
    """Return a TransformerBridge of a model's saved copy."""
    model.save_pretrained(folder)
    return tlc.load_model(str(folder))


def test_a_hook_that_the_model_got_after_it_was_loaded_is_measured() -> None:
    model = tiny.huggingface_model("llama")
    loaded = tlc.load_model(hf_model=model)
    without = jacobian(loaded, layer=0)
    tiny.layers_of(model)[0].register_forward_hook(
        lambda _, __, output: (
            1.5 * output
            if isinstance(output, torch.Tensor)
            else (1.5 * output[0], *output[1:])
        )
    )
    trace = tlc.trace(loaded, IDS)
    assert trace.provenance["hooks"] == ["model.layers.0"]
    measured = tlc.block_jacobian(trace, 0)
    torch.testing.assert_close(measured, oracle(model, 0), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(measured, without, atol=1e-3)


def test_blocks_that_were_replaced_since_the_last_trace_are_measured() -> None:
    model = tiny.huggingface_model("llama")
    before = jacobian(model)
    other = tiny.huggingface_model("llama", seed=1)
    model.model.layers = other.model.layers
    torch.testing.assert_close(jacobian(model), oracle(model), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(jacobian(model), before, atol=1e-3)


def test_hooks_of_a_bridge_are_never_lost(tmp_path: Path) -> None:
    """They are part of the bridge, which is what was given."""
    loaded = loaded_folder(tiny.huggingface_model("llama"), tmp_path / "plain")
    without = jacobian(loaded)
    loaded.add_hook("blocks.1.hook_mlp_out", lambda z, hook: 0 * z)
    trace = tlc.trace(loaded, IDS)
    assert trace.provenance["hooks"] == ["blocks.1.hook_mlp_out"]
    assert not torch.allclose(tlc.block_jacobian(trace, 1), without, atol=1e-3)
    not_causal = tiny.huggingface_model("llama")
    not_causal.config.is_causal = False
    hooked = loaded_folder(not_causal, tmp_path / "not causal")
    hooked.add_hook("blocks.1.hook_mlp_out", lambda z, hook: 0 * z)
    with pytest.raises(
        ValueError, match=r"has not the bridge's hooks \(blocks\.1\.hook"
    ):
        tlc.trace(hooked, IDS)


def test_a_bridge_whose_weights_were_changed_is_measured_as_it_is(
    tmp_path: Path,
) -> None:
    """GPT-2's queries are a component of the bridge: the model that it was made of keeps
    its own.
    """
    loaded = loaded_folder(tiny.huggingface_model("gpt2"), tmp_path)
    before = jacobian(loaded)
    queries = loaded.blocks[1].attn.q.original_component
    queries.weight = nn.Parameter(3 * queries.weight.detach())
    with pytest.warns(UserWarning, match="this bridge was changed since it was made"):
        after = jacobian(loaded)
    assert not torch.allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_a_folder_whose_attention_is_not_causal(memory: str, tmp_path: Path) -> None:
    """As LLM2Vec saves them; TransformerLens puts a triangular mask in."""
    model = tiny.huggingface_model("llama")
    model.config.is_causal = False
    model.save_pretrained(tmp_path)
    options = {"memory": memory, "device": "cpu"}
    loaded = tlc.load_model(str(tmp_path), **options)
    if memory == "stream":
        with pytest.raises(ValueError, match="load it as a whole"):
            jacobian(loaded)
        return
    with pytest.warns(UserWarning, match=OWN_MODULES):
        trace = tlc.trace(loaded, IDS)
    assert not trace.is_causal
    expected = oracle(model)
    torch.testing.assert_close(
        tlc.block_jacobian(trace, 1), expected, atol=1e-5, rtol=1e-4
    )


BODIES = {"llama": "LlamaModel", "gpt2": "GPT2Model", "bert": "BertModel"}


@pytest.mark.filterwarnings("ignore:.*directions of the stream do not pass the block")
@pytest.mark.filterwarnings("ignore:.*normalises the stream itself")
@pytest.mark.parametrize("architecture", BODIES)
def test_a_body_without_a_head(architecture: str) -> None:
    """`AutoModel` makes them."""
    body = AutoModel.from_config(tiny.huggingface_model(architecture).config).eval()
    assert type(body).__name__ == BODIES[architecture]
    trace = tlc.trace(body, IDS)
    measured = tlc.block_jacobian(trace, 1)
    torch.testing.assert_close(measured, oracle(body), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="gives none: load it with a language-model"):
        trace.logits(trace.residual[-1])


def test_a_classifier_of_texts() -> None:
    config = LlamaConfig(**tiny.CONFIGS["llama"], num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    torch.testing.assert_close(jacobian(model), oracle(model), atol=1e-5, rtol=1e-4)


def test_a_configuration_that_names_no_class() -> None:
    model = tiny.huggingface_model("gemma2")
    model.config.architectures = None
    torch.testing.assert_close(jacobian(model), oracle(model), atol=1e-5, rtol=1e-4)
    assert model.config.architectures is None


def test_weights_made_in_inference_mode() -> None:
    """Neither can autograd save them, nor may their flags be set."""
    with torch.inference_mode():
        model = tiny.huggingface_model("llama")
    measured = jacobian(model)
    expected = oracle(tiny.huggingface_model("llama"))
    torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-4)
    assert all(parameter.is_inference() for parameter in model.parameters())


def test_a_tokenizer_made_in_memory() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", unk_token="w0"
    )
    model = tiny.huggingface_model("llama")
    trace = tlc.trace(model, "w1 w5 w3", tokenizer=tokenizer)
    assert trace.tokens.tolist()[-3:] == [1, 5, 3]


def test_a_model_in_train_mode_is_measured_in_eval_mode_and_left_in_its_own() -> None:
    """Its blocks are called after the trace."""
    model = tiny.huggingface_model("llama")
    expected = oracle(model)
    model.train()
    model.model.layers[1].self_attn.attention_dropout = 0.5
    model.model.layers[0].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(jacobian(model), expected, atol=1e-5, rtol=1e-4)
    assert all(part.training for part in model.modules())


@pytest.mark.filterwarnings("ignore:.*token_local_recorded failed")
def test_an_adapter_that_is_active_from_a_token_on_has_its_hooks_in_each_block() -> (
    None
):
    """peft puts them on its layers for the time of one call."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "up_proj"],
        task_type="CAUSAL_LM",
        alora_invocation_tokens=IDS[2:4],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(tiny.huggingface_model("llama"), config).eval()
    ids = torch.tensor([IDS])
    blocks = tiny.layers_of(model.get_base_model())
    trace = tlc.trace_modules(blocks, lambda: model(input_ids=ids))
    given = Given(model, {"input_ids": ids}, "activated LoRA")
    own = tlc.trace(model, IDS)
    assert verdict(given, random.Random(0)) == "right"
    for t in (1, 5):
        J = tlc.block_jacobian(trace, 1, input_position=t, output_position=t)
        same = tlc.block_jacobian(own, 1, input_position=t, output_position=t)
        torch.testing.assert_close(J, same)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"special_tokens_mask": [[0] * 8]}, "no argument of LlamaForCausalLM"),
        ({"past_key_values": object()}, "which the model may change"),
        ({"attention_mask": [[0] + [1] * 7]}, "must be unpadded"),
        ({"position_ids": [[10_000_000] * 8]}, None),
    ],
)
def test_inputs_beside_the_tokens(inputs: dict[str, Any], message: str | None) -> None:
    model = tiny.huggingface_model("llama")
    prompt = {"input_ids": [IDS], **inputs}
    if message is None:
        assert tlc.trace(model, prompt).provenance["inputs"]["position_ids"]["shape"]
        return
    with pytest.raises(ValueError, match=message) as refusal:
        tlc.trace(model, prompt)
    assert "\n" not in str(refusal.value)


def test_interventions_are_on_the_model_that_is_measured(tmp_path: Path) -> None:
    model = tiny.huggingface_model("llama")
    model.config.is_causal = False
    loaded = loaded_folder(model, tmp_path)
    with pytest.warns(UserWarning, match=OWN_MODULES):
        trace = tlc.trace(loaded, IDS)
    directions = tlc.directions.directions_of(trace, layer=0, k=1)
    hooks = directions.hooks(trace.model, scale=0.3)
    with torch.no_grad():
        with trace.model.hooks(fwd_hooks=hooks):
            steered = trace.model(torch.tensor([IDS]), use_cache=False)
        plain = model(torch.tensor([IDS]), use_cache=False).logits
        assert not torch.allclose(steered, plain, atol=1e-3)
        torch.testing.assert_close(trace.model(torch.tensor([IDS])), plain)


# What models in memory may be


def test_weights_that_a_model_writes_into_are_as_before() -> None:
    """RWKV divides some in place, in eval mode, when it is called."""
    model = tiny.huggingface_model("rwkv", num_hidden_layers=8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(tlc.ModelError, match="no list of modules that pass one"):
        tlc.trace(model, IDS)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "llama"])
def test_token_types_of_zeros_are_passed_on_where_they_are_taken(
    architecture: str,
) -> None:
    """GPT-2 adds the embedding of token 0 for them."""
    model = tiny.huggingface_model(architecture)
    ids = torch.tensor([IDS])
    types = torch.zeros_like(ids)
    trace = tlc.trace(model, {"input_ids": ids, "token_type_ids": types})
    inputs = {"input_ids": ids}
    if architecture != "llama":
        inputs["token_type_ids"] = types
    with torch.no_grad():
        expected = model(**inputs).logits[0]
    torch.testing.assert_close(
        trace.logits(trace.residual[-1]), expected, atol=1e-5, rtol=1e-4
    )


def test_the_tokenizer_that_was_given_is_used_and_not_its_file(
    tokenizer_folder: Path,
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    bos = tokenizer.convert_ids_to_tokens(0)
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    expected = tokenizer("w5 w6").input_ids
    assert expected[0] == 0
    model = tiny.huggingface_model("llama")
    trace = tlc.trace(model, "w5 w6", tokenizer=tokenizer)
    assert trace.tokens.tolist() == expected


def test_an_adapter_that_is_on_is_another_model_than_one_that_is_off() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.huggingface_model("llama"), config)
    on = tlc.depth_coupling(tlc.trace(model, IDS[:5]), k=4)
    assert on.provenance["adapter"] == "default at scale 2"
    with model.disable_adapter():
        off = tlc.depth_coupling(tlc.trace(model, IDS[:6]), k=4)
    assert off.provenance["adapter"] == "off"
    with pytest.raises(ValueError, match="of the same adapter"):
        tlc.mean_of_maps([on, off])


@pytest.mark.parametrize("layer", [0, 1])
def test_a_hook_before_a_block_is_part_of_the_block(layer: int) -> None:
    """Against autograd through the model, from what enters the hook."""
    model = tiny.huggingface_model("llama")
    blocks = tiny.layers_of(model)
    blocks[layer].register_forward_pre_hook(
        lambda _, args: (args[0] * 1.5 + args[0].tanh(), *args[1:])
    )
    trace = tlc.trace(model, IDS)
    measured = tlc.block_jacobian(trace, layer)
    outputs: list[torch.Tensor] = []
    moved = torch.zeros(trace.d_model, requires_grad=True)

    def move(_: nn.Module, __: object, output: Any) -> Any:
        stream = output if isinstance(output, torch.Tensor) else output[0]
        row = torch.zeros_like(stream)
        row[0, -1] = moved
        return stream + row

    before = model.get_input_embeddings() if layer == 0 else blocks[layer - 1]
    before.register_forward_hook(move)
    blocks[layer].register_forward_hook(lambda _, __, output: outputs.append(output))
    model(torch.tensor([IDS]))
    (output,) = outputs
    rows = [torch.autograd.grad(y, moved, retain_graph=True)[0] for y in output[0, -1]]
    expected = torch.stack(rows) - torch.eye(trace.d_model)
    torch.testing.assert_close(measured, expected, atol=1e-5, rtol=1e-4)


def test_hooks_before_blocks_act_as_on_a_bridge(tmp_path: Path) -> None:
    model = tiny.huggingface_model("llama")
    bridge = loaded_folder(model, tmp_path)
    own = tlc.load_model(hf_model=model)
    hooks = [("blocks.1.hook_resid_pre", lambda x, hook: 1.5 * x)]
    jacobians = []
    for one in (own, bridge):
        with one.hooks(fwd_hooks=hooks):
            jacobians.append(jacobian(one))
    torch.testing.assert_close(*jacobians, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0)])
def test_blocks_that_are_there_several_times(order: tuple[int, ...]) -> None:
    model = tiny.huggingface_model("llama")
    blocks = [tiny.layers_of(model)[i] for i in order]
    model.model.layers = nn.ModuleList(blocks)
    model.config.num_hidden_layers = len(order)
    # One type for each layer, in the transformers that have them.
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:1] * len(order)
    ids = torch.tensor([IDS])
    trace = tlc.trace(model, IDS)
    expected = tlc.trace_modules(blocks, lambda: model(ids, use_cache=False))
    assert trace.n_layers == len(order)
    torch.testing.assert_close(
        tlc.block_jacobians(trace), tlc.block_jacobians(expected)
    )


def test_weights_that_accelerate_moves_in_when_they_are_needed() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny.huggingface_model("llama")
    expected = oracle(model)
    accelerate.cpu_offload(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.testing.assert_close(jacobian(model), expected, atol=1e-5, rtol=1e-4)


def on_disk(architecture: str, dtype: torch.dtype, folder: Path) -> tuple[Any, Any]:
    """A model in memory, and one of the same weights that accelerate reads from disk."""
    pytest.importorskip("accelerate")
    model = tiny.huggingface_model(architecture, dtype=dtype)
    model.save_pretrained(folder)
    offloaded = type(model).from_pretrained(
        folder,
        dtype=dtype,
        device_map={"": "disk"},
        offload_folder=str(folder / "offload"),
        attn_implementation="eager",
    )
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    return model, offloaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_model_that_accelerate_reads_from_disk_is_measured_as_in_memory(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, offloaded = on_disk(architecture, dtype, tmp_path)
    parameters = dict(offloaded.named_parameters())
    expected = tlc.trace(model, IDS)
    trace = tlc.trace(offloaded, IDS)
    assert torch.equal(trace.residual, expected.residual)
    torch.testing.assert_close(
        tlc.block_jacobians(trace),
        tlc.block_jacobians(expected),
        atol=1e-5,
        rtol=1e-4,
    )
    x = expected.residual[-1]
    torch.testing.assert_close(trace.logits(x), expected.logits(x))
    assert trace.provenance["device"] == "cpu"
    for name, parameter in offloaded.named_parameters():
        assert parameter is parameters[name]
        assert parameter.is_meta
        assert parameter.dtype == dtype


def test_what_takes_weights_that_accelerate_has_elsewhere_is_refused(
    tmp_path: Path,
) -> None:
    _, offloaded = on_disk("llama", torch.float32, tmp_path)
    trace = tlc.trace(offloaded, IDS)
    with pytest.raises(tlc.ModelError, match=r"^the unembedding .* memory=\"stream\""):
        tlc.directions.decode(trace, 1, 2)
    with pytest.raises(tlc.ModelError, match=r"^the derivative of the logits takes"):
        change_of_logits(trace, torch.ones(1, trace.d_model), -1)
    blocks = tiny.layers_of(offloaded)
    merged = mean_weights(blocks[0], blocks[1])
    with pytest.raises(tlc.ModelError, match=r"^merging blocks takes weights"), merged:
        pass


def test_tokens_that_were_added_after_loading() -> None:
    model = tiny.huggingface_model("llama")
    loaded = tlc.load_model(hf_model=model)
    n_tokens = loaded.cfg.d_vocab
    model.resize_token_embeddings(n_tokens + 4)
    assert tlc.trace(loaded, [n_tokens + 3, 1, 2]).n_pos == 3


def test_a_block_that_was_compiled() -> None:
    model = tiny.huggingface_model("llama")
    expected = oracle(model)
    blocks = tiny.layers_of(model)
    blocks[1] = torch.compile(blocks[1], backend="eager")
    torch.testing.assert_close(jacobian(model), expected, atol=1e-5, rtol=1e-4)


def test_an_error_of_the_model_is_told_as_it_is() -> None:
    model = tiny.huggingface_model("llama")
    model.config.return_dict = False
    with pytest.raises(tlc.ModelError, match="'tuple' object has no attribute"):
        tlc.trace(model, IDS)


def test_decode_names_the_heads_of_a_model_in_memory(tmp_path: Path) -> None:
    model = tiny.huggingface_model("llama")
    decoded = tlc.directions.decode(tlc.trace(model, IDS), 1)
    bridge = loaded_folder(model, tmp_path)
    expected = tlc.directions.decode(tlc.trace(bridge, IDS), 1)
    assert decoded.components == expected.components
    torch.testing.assert_close(decoded.reads, expected.reads, atol=1e-4, rtol=1e-3)
    lens = tlc.trajectories.product_lens([tlc.trace(model, IDS)])
    assert lens.d_model == tiny.D_MODEL


def test_a_hook_with_tensors_in_16_bits_is_told() -> None:
    model = tiny.huggingface_model("llama").to(torch.bfloat16)
    direction = torch.ones(tiny.D_MODEL, dtype=torch.bfloat16)
    tiny.layers_of(model)[0].register_forward_hook(
        lambda _, __, output: output - (output @ direction)[..., None] * direction
    )
    trace = tlc.trace(model, IDS)
    with pytest.raises(tlc.gradients.StepError, match="another dtype than float32"):
        tlc.block_jacobian(trace, 0)
