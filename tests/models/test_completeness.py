"""A checkpoint that lacks weights is refused; one that lacks only its head, or what a
rule makes, is measured.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
import tl_coupling as tlc
from model_folders import save
from tl_coupling.studies.surveys import Settings, measures
from tl_coupling.trajectories import measure_trajectory

pytestmark = pytest.mark.both_lines

State = dict[str, Tensor]
BACKENDS = ["bridge", pytest.param("hooked", marks=tiny.needs_hooked_transformer)]


def rewritten(folder: Path, change: Callable[[State], State]) -> Path:
    """The same folder with other weights in its file."""
    file = folder / "model.safetensors"
    state = {key: tensor.clone() for key, tensor in change(load_file(file)).items()}
    save_file(state, file, {"format": "pt"})
    return folder


@pytest.fixture
def llama(folder_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_model, tmp_path / "llama"))


@pytest.fixture
def gpt2(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of a hub model, whose weights the test may change."""
    weights = next((hub / "models--gpt2").rglob("model.safetensors"))
    intact = weights.read_bytes()
    yield weights.parent
    weights.write_bytes(intact)


def prefixed(prefix: str) -> Callable[[State], State]:
    return lambda state: {prefix + key: tensor for key, tensor in state.items()}


def without(word: str) -> Callable[[State], State]:
    return lambda state: {
        key: tensor for key, tensor in state.items() if word not in key
    }


def refused(name: object, **options: Any) -> str:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(name), **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_that_wrap_every_key_are_taken_off(
    prefix: str, memory: str, folder_model: Path, llama: Path
) -> None:
    expected = tlc.trace(tlc.load_model(str(folder_model)), tiny.TOKENS)
    trace = tlc.trace(
        tlc.load_model(str(rewritten(llama, prefixed(prefix))), memory=memory),
        tiny.TOKENS,
    )
    assert torch.equal(trace.residual, expected.residual)
    assert torch.equal(
        trace.logits(trace.residual[-1]), expected.logits(expected.residual[-1])
    )


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            prefixed("net."),
            "lacks 20 of the 21 weights of a LlamaForCausalLM: model.embed_tokens.weight",
        ),
        (
            without("layers.1.mlp.up_proj"),
            "lacks 1 of the 21 weights of a LlamaForCausalLM: model.layers.1.mlp.up",
        ),
        (
            without("layers.1."),
            "lacks 9 of the 21 weights of a LlamaForCausalLM: model.layers.1.input_layernorm.we",
        ),
        (
            without("model.norm"),
            "lacks 1 of the 21 weights of a LlamaForCausalLM: model.norm.weight; they would be",
        ),
    ],
    ids=["strange prefix", "tensor", "layer", "last norm"],
)
def test_missing_weights_are_named(
    change: Callable[[State], State], message: str, memory: str, llama: Path
) -> None:
    assert message in refused(rewritten(llama, change), memory=memory)


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("is_whole_model", [True, False])
def test_more_layers_than_the_configuration_has(
    memory: str, is_whole_model: bool, llama: Path
) -> None:
    """Also in a checkpoint of the body alone, whose keys do not begin with `model.`."""

    def deeper(state: State) -> State:
        state |= {
            key.replace("layers.1.", "layers.2."): tensor
            for key, tensor in state.items()
        }
        return (
            state
            if is_whole_model
            else {key.removeprefix("model."): state[key] for key in state}
        )

    message = refused(rewritten(llama, deeper), memory=memory)
    assert (
        "holds 9 weights of layers or experts that its configuration does not have"
        in message
    )
    assert "layers.2.input_layernorm.weight" in message


def test_layers_that_predict_later_tokens_are_left_out(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text()) | {
        "num_nextn_predict_layers": 1
    }
    (llama / "config.json").write_text(json.dumps(config))

    def with_next(state: State) -> State:
        return state | {
            key.replace("layers.1.", "layers.2."): tensor
            for key, tensor in state.items()
        }

    assert (
        tlc.load_model(str(rewritten(llama, with_next))).cfg.n_layers == tiny.N_LAYERS
    )


@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_weights_of_another_shape(memory: str, llama: Path) -> None:
    def narrower(state: State) -> State:
        return {
            key: tensor[:-1] if "input_layernorm" in key else tensor
            for key, tensor in state.items()
        }

    message = refused(rewritten(llama, narrower), memory=memory)
    assert (
        "holds 2 weights of another shape than its configuration says: model.layers.0.input_layern"
        in message
    )
    assert f"weight is [{tiny.D_MODEL - 1}], wanted [{tiny.D_MODEL}]" in message


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: (
                state
                | {
                    key.replace("experts.0", "experts.4"): tensor
                    for key, tensor in state.items()
                    if "experts.0" in key
                }
            ),
            "holds 4 weights of another shape than its configuration says: model.layers.0",
        ),
        (
            without("experts.0.w1"),
            "lacks tensors of which model.layers.0.mlp.experts.gate_up_proj, model.layer",
        ),
    ],
    ids=["one more", "part of one missing"],
)
def test_experts_that_are_merged(
    change: Callable[[State], State], message: str, memory: str, tmp_path: Path
) -> None:
    tiny.huggingface_model("mixtral").save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    assert message in refused(rewritten(tmp_path, change), memory=memory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hub_model_that_lacks_a_layer(backend: str, gpt2: Path) -> None:
    rewritten(gpt2, without("h.1."))
    assert "transformer.h.1.attn.c_attn.bias" in refused("gpt2", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hub_model_that_is_wrapped(backend: str, gpt2: Path) -> None:
    expected = tlc.trace(tlc.load_model("gpt2", backend=backend), tiny.TOKENS)
    rewritten(gpt2, prefixed("module."))
    trace = tlc.trace(tlc.load_model("gpt2", backend=backend), tiny.TOKENS)
    assert torch.equal(trace.residual, expected.residual)


def test_a_shard_that_is_lost(tmp_path: Path) -> None:
    tiny.huggingface_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    tiny.save_tokenizer(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    tlc.load_model(str(tmp_path))
    told["weight_map"] = {
        key: file for key, file in told["weight_map"].items() if "-00003-" not in file
    }
    index.write_text(json.dumps(told))
    assert "of the 21 weights of a LlamaForCausalLM" in refused(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        # As HuggingFace's `GPT2Model` is saved; its unembedding is its embedding.
        (
            "gpt2",
            lambda state: {
                key.removeprefix("transformer."): tensor
                for key, tensor in state.items()
            },
        ),
        # Masks that older versions saved.
        (
            "gpt2",
            lambda state: state | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)},
        ),
        (
            "gpt_neox",
            lambda state: (
                state | {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
            ),
        ),
        (
            "llama",
            lambda state: (
                state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
            ),
        ),
        (
            "bert",
            lambda state: (
                state | {"bert.embeddings.position_ids": torch.arange(32)[None]}
            ),
        ),
        (
            "bert",
            lambda state: state | {"bert.pooler.dense.weight": torch.ones(32, 32)},
        ),
        (
            "bert",
            lambda state: state | {"cls.seq_relationship.weight": torch.ones(2, 32)},
        ),
    ],
)
def test_what_is_right_stays_right(
    architecture: str,
    change: Callable[[State], State],
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    plain = tiny.huggingface_model(architecture)
    plain.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    trace = tlc.trace(tlc.load_model(str(rewritten(tmp_path, change))), tiny.TOKENS)
    with torch.no_grad():
        expected = plain(torch.tensor([tiny.TOKENS])).logits[0]
    torch.testing.assert_close(
        trace.logits(trace.residual[-1]), expected, rtol=1e-4, atol=1e-4
    )
    assert "head" not in trace.provenance


def headless(folder: Path, architecture: str = "bert") -> Path:
    """As sentence encoders are saved: the body alone, its keys without a prefix, and a
    pooler.
    """
    plain = tiny.huggingface_model(architecture)
    plain.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    body = plain.base_model_prefix + "."
    rewritten(
        folder,
        lambda state: {
            key.removeprefix(body): tensor
            for key, tensor in state.items()
            if key.startswith(body)
        },
    )
    return folder


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_checkpoint_without_a_head_is_measured_without_logits(
    architecture: str, memory: str, tmp_path: Path
) -> None:
    saved_model = tiny.huggingface_model(architecture)
    model = tlc.load_model(str(headless(tmp_path, architecture)), memory=memory)
    with pytest.warns(UserWarning, match="the model's head is not in the checkpoint"):
        trace = tlc.trace(model, tiny.TOKENS)
    with torch.no_grad():
        stream = torch.cat(
            saved_model(
                torch.tensor([tiny.TOKENS]), output_hidden_states=True
            ).hidden_states
        )
    torch.testing.assert_close(trace.residual[:-1], stream[:-1], rtol=1e-5, atol=1e-5)
    assert trace.provenance["head"].startswith("not in the checkpoint (")
    assert any(
        "there are no logits, entropies or losses" in remark
        for remark in trace.provenance["remarks"]
    )
    with pytest.raises(
        ValueError,
        match="this model's head is random, because its weights are not in the checkpoint",
    ):
        trace.logits(trace.residual[-1])
    with pytest.warns(
        UserWarning, match="no logit-lens entropy: this model's head is random"
    ):
        shapes = measure_trajectory(trace, linear=False, noise=False)
    assert shapes.logit_lens_entropy is None


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_it_has_one_digest_however_random_numbers_stand(
    architecture: str, tmp_path: Path
) -> None:
    folder = str(headless(tmp_path, architecture))
    digests = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with pytest.warns(UserWarning, match="head is not in the checkpoint"):
            trace = tlc.trace(tlc.load_model(folder), tiny.TOKENS)
        assert torch.equal(torch.get_rng_state(), state)
        digests.add(trace.provenance["weights_digest"])
    assert len(digests) == 1


def test_a_survey_of_it_has_no_loss_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="head is not in the checkpoint"):
        trace = tlc.trace(tlc.load_model(str(headless(tmp_path))), tiny.TOKENS)
    settings = Settings(k=(3,))
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        measured = measures(trace, settings, tlc.depth_coupling(trace, k=3))
    assert bool(measured.loss.isnull())
    assert bool(measured.logit_lens_entropy.isnull().all())
    assert "no logits, entropies or losses" in str(measured.remarks.item())


def test_a_vit_with_and_without_a_pooler(tmp_path: Path) -> None:
    save("vit", folder := tmp_path / "with")
    bare = Path(shutil.copytree(folder, tmp_path / "without"))
    rewritten(bare, without("pooler"))
    pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))
    traces = [tlc.trace(tlc.load_model(str(path)), pixels) for path in (folder, bare)]
    assert torch.equal(traces[0].residual, traces[1].residual)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "falcon"])
def test_the_number_of_weights_is_huggingfaces(
    architecture: str, tmp_path: Path
) -> None:
    """Bridges add zeros as a bias, and copies of the matrices that they cut; how many
    differs with the version.
    """
    plain = tiny.huggingface_model(architecture)
    plain.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    expected = sum(parameter.numel() for parameter in plain.parameters())
    for options in ({}, {"untrained": True}, {"memory": "stream"}):
        provenance = tlc.trace(
            tlc.load_model(str(tmp_path), **options), tiny.TOKENS
        ).provenance
        assert provenance["n_params"] == expected, options


@tiny.needs_hooked_transformer
@pytest.mark.parametrize("untrained", [True, False])
def test_the_number_of_weights_of_a_hooked_transformer(
    untrained: bool, hub: Path
) -> None:
    expected = sum(
        parameter.numel() for parameter in tiny.huggingface_model("gpt2").parameters()
    )
    model = tlc.load_model("gpt2", backend="hooked", untrained=untrained)
    assert tlc.trace(model, tiny.TOKENS).provenance["n_params"] == expected
