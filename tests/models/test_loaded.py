"""Models of many kinds as they come: their twins, special tokens, contexts, processing;
and what is none of ours.
"""

import copy
import pickle
import subprocess
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import model_folders
import tiny
import tl_coupling as tlc
from tl_coupling import models
from tl_coupling.prompts import Prompt
from tl_coupling.studies.surveys import Settings, measure_prompts

pytestmark = pytest.mark.both_lines

needs_4 = pytest.mark.skipif(
    tiny.HAS_HOOKED_TRANSFORMER, reason="transformer-lens 3.9 has no adapter for it"
)
quiet = pytest.mark.filterwarnings(
    "ignore:.*without its image processor", "ignore:Hook alias"
)


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was commands of pip; nothing of it happens."""
    commands: list[Any] = []

    def check_call(command: Any, *_: Any, **__: Any) -> int:
        commands.append(command)
        raise OSError("no pip in tests")

    monkeypatch.setattr(subprocess, "check_call", check_call)
    return commands


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    def save(kind: str) -> Path:
        model_folders.save(kind, tmp_path / kind)
        return tmp_path / kind

    return save


@quiet
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["bert", pytest.param("roberta", marks=needs_4), "mamba", "llava", "gemma3"]
)
def test_an_untrained_twin_is_of_the_trained_models_class(
    saved: Callable[[str], Path], kind: str, dtype: torch.dtype
) -> None:
    folder = saved(kind)
    trained, twin = (
        tlc.load_model(str(folder), untrained=untrained, dtype=dtype)
        for untrained in (False, True)
    )
    class_name, _ = model_folders.KINDS[kind]
    assert (
        type(twin.original_model)
        is type(trained.original_model)
        is getattr(transformers, class_name)
    )
    torch.manual_seed(0)
    fresh = getattr(transformers, class_name)._from_config(
        trained.original_model.config, dtype=dtype
    )
    weights = sorted(trained.named_parameters())
    weights_of_twin = sorted(twin.named_parameters())
    for (name, weight), (_, drawn) in zip(weights, weights_of_twin, strict=True):
        assert drawn.shape == weight.shape, name
        assert drawn.dtype == dtype, name
    assert torch.equal(twin.W_E, fresh.get_input_embeddings().weight)
    assert not torch.equal(twin.W_E, trained.W_E)
    assert not twin.training


@quiet
@pytest.mark.parametrize("untrained", [False, True])
def test_nothing_is_installed_for_a_multimodal_model(
    saved: Callable[[str], Path], pip: list[Any], untrained: bool
) -> None:
    original = subprocess.check_call
    with pytest.warns(
        UserWarning, match="without its image processor.*`pip install torchvision`"
    ):
        model = tlc.load_model(str(saved("llava")), untrained=untrained)
    assert pip == []
    assert subprocess.check_call is original
    assert tlc.trace(model, tiny.TOKENS).n_pos == len(tiny.TOKENS)


def test_other_commands_are_called_while_a_model_loads(
    saved: Callable[[str], Path], pip: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tl_coupling.models import bridges

    def during(*_: Any) -> Any:
        with pytest.raises(OSError, match="no pip in tests"):
            subprocess.check_call(["true"])
        raise KeyboardInterrupt

    monkeypatch.setattr(bridges, "kind_of_config", during)
    original = subprocess.check_call
    with pytest.raises(KeyboardInterrupt):
        tlc.load_model(str(saved("mamba")))
    assert pip == [["true"]]
    assert subprocess.check_call is original


def test_no_other_model_is_warned_of(saved: Callable[[str], Path]) -> None:
    folder = saved("bert")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*processor")
        tlc.load_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "kind_in_words"),
    [
        ("t5", "an encoder–decoder"),
        ("bart", "an encoder–decoder"),
        ("hubert", "an audio model"),
    ],
)
@pytest.mark.parametrize("untrained", [False, True])
def test_another_kind_is_named_before_its_weights_are_read(
    saved: Callable[[str], Path], kind: str, kind_in_words: str, untrained: bool
) -> None:
    folder = saved(kind)
    (folder / "model.safetensors").unlink()
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(str(folder), untrained=untrained)
    assert str(caught.value).startswith(f"'{folder}' is {kind_in_words}")
    assert "wanted a decoder" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["t5", "bart", "hubert"])
def test_a_bridge_that_somebody_else_booted_is_named_too(
    saved: Callable[[str], Path], kind: str
) -> None:
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import transformers as _  # noqa: F401

    model = TransformerBridge.boot_transformers(str(saved(kind)), device="cpu")
    assert "wanted a decoder" in (models.describe_kind(model) or "")


def test_stacks_that_are_none_of_ours_are_named() -> None:
    model = nn.Module()
    model.slow, model.fast = nn.ModuleList(), nn.ModuleList()
    assert "its stacks are 'slow', 'fast'" in (models.describe_kind(model) or "")


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom"])
def test_a_decoder_is_of_our_kind(architecture: str, tokenizer_folder: Path) -> None:
    assert (
        models.describe_kind(
            tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
        )
        is None
    )


def test_an_architecture_without_an_adapter_is_named(tmp_path: Path) -> None:
    transformers.CTRLLMHeadModel(
        transformers.CTRLConfig(
            vocab_size=100, n_positions=32, n_embd=32, dff=48, n_layer=2, n_head=4
        )
    ).save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    with pytest.raises(
        tlc.ModelError,
        match=r"no adapter for its architecture, 'CTRLLMHeadModel'; .*trace_modules",
    ):
        tlc.load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "length"),
    [
        ("gpt2", 32),
        ("llama", 32),
        ("opt", 32),
        ("gpt_neox", 32),
        ("mpt", 32),
        ("bloom", None),
        ("falcon", 2048),
    ],
)
def test_context_of_attention(
    architecture: str, length: int | None, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder)
    assert models.context_length(model) == length


@quiet
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("bert", 32),
        pytest.param("roberta", 32, marks=needs_4),
        ("llava", 32),
        ("mamba", None),
        pytest.param("rwkv", None, marks=needs_4),
    ],
)
def test_context_of_other_kinds(
    saved: Callable[[str], Path], kind: str, length: int | None
) -> None:
    model = tlc.load_model(str(saved(kind)))
    assert models.context_length(model) == length
    longest = torch.full((1, (length or 40)), 7)
    with torch.no_grad():
        model(longest)


@tiny.needs_hooked_transformer
@pytest.mark.parametrize(
    ("positions", "length"), [("standard", 6), ("rotary", 6), ("alibi", None)]
)
def test_context_of_a_hooked_transformer(positions: str, length: int | None) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=1,
        d_model=8,
        d_head=4,
        n_heads=2,
        d_mlp=8,
        n_ctx=6,
        d_vocab=10,
        act_fn="relu",
        rotary_dim=4,
        positional_embedding_type=positions,
    )
    model = HookedTransformer(cfg)
    assert models.context_length(model) == length
    with (
        pytest.raises((RuntimeError, AssertionError, IndexError))
        if length
        else nullcontext()
    ):
        model(torch.zeros(1, 7, dtype=torch.long))


def test_long_prompts_are_not_refused_where_there_is_no_limit(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tl_coupling.studies.surveys import measurements

    class Reached(Exception):
        pass

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(measurements, "trace", reached)
    prompts = [Prompt(" ".join(["w7"] * 2100), "long")]
    with pytest.raises(Reached):
        measure_prompts(tlc.load_model(str(saved("mamba"))), prompts, Settings(k=(2,)))
    with pytest.raises(
        ValueError,
        match=r"1 of 1 prompts have more tokens than this model's context holds, 32",
    ):
        measure_prompts(tlc.load_model(str(saved("bert"))), prompts, Settings(k=(2,)))


def _closing_tokenizer(folder: Path, template: str) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("w99", 99)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="w99",
        cls_token="<s>",
        sep_token="w99",
        unk_token="<s>",
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "template", "prepend_bos", "expected"),
    [
        # A decoder's last position is the text's last token, whatever its tokenizer
        # appends.
        ("llama", "$A w99", None, [7, 8]),
        ("llama", "<s> $A w99", None, [0, 7, 8]),
        ("llama", "<s> $A w99", True, [0, 7, 8]),
        ("llama", "<s> $A w99", False, [7, 8]),
        ("llama", "$A w99", True, [0, 7, 8]),
        # An encoder reads `[CLS] … [SEP]`.
        ("bert", "<s> $A w99", None, [0, 7, 8, 99]),
        ("bert", "<s> $A w99", True, [0, 7, 8, 99]),
        ("bert", "<s> $A w99", False, [7, 8, 99]),
    ],
)
def test_closing_tokens_are_left_off_decoders_and_kept_by_encoders(
    tmp_path: Path,
    kind: str,
    template: str,
    prepend_bos: bool | None,
    expected: list[int],
) -> None:
    if kind == "bert":
        model_folders.save("bert", tmp_path)
    else:
        tiny.huggingface_model(kind).save_pretrained(tmp_path)
        tiny.save_tokenizer(tmp_path)
    _closing_tokenizer(tmp_path, template)
    ids, provenance = models.tokenize(
        tlc.load_model(str(tmp_path)), "w7 w8", prepend_bos
    )
    assert ids.tolist() == expected
    assert provenance == {
        "prepend_bos": expected[0] == 0,
        "append_eos": expected[-1] == 99,
    }


def test_a_closing_token_that_the_text_itself_holds_stays(tmp_path: Path) -> None:
    tiny.huggingface_model("llama").save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    _closing_tokenizer(tmp_path, "$A w99")
    model = tlc.load_model(str(tmp_path))
    assert models.tokenize(model, "w7 w99", None)[0].tolist() == [7, 99]
    assert models.tokenize(model, "w99 w99", None)[0].tolist() == [99, 99]


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=needs_4)])
@pytest.mark.parametrize("untrained", [False, True])
def test_layer_norms_within_the_stream_are_no_centred_weights(
    saved: Callable[[str], Path], kind: str, untrained: bool
) -> None:
    model = tlc.load_model(str(saved(kind)), untrained=untrained)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*centred")
        trace = tlc.trace(model, tiny.TOKENS)
    # The witness: these rows do have mean zero.
    assert float(trace.residual.mean(-1).abs().max()) < 1e-6
    assert trace.provenance["weight_processing"] == ["none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centred_weights_are_seen_in_any_precision(
    dtype: torch.dtype, tokenizer_folder: Path
) -> None:
    hf_model = tiny.huggingface_model("gpt2", dtype=dtype)
    state = hf_model.state_dict()
    writing = ("wte.weight", "wpe.weight", "c_proj.weight", "c_proj.bias")
    for name in (name for name in state if name.endswith(writing)):
        state[name] -= state[name].float().mean(-1, keepdim=True).to(dtype)
    model = tiny.bridge(hf_model, tokenizer_folder)
    with pytest.warns(UserWarning, match="centred"):
        assert (
            "center_writing_weights"
            in tlc.trace(model, tiny.TOKENS).provenance["weight_processing"]
        )


def test_what_is_known_of_a_model_is_neither_copied_nor_saved_with_it() -> None:
    model = nn.Linear(2, 2)
    models.facts_of(model).loaded_as = {"model": "original"}
    assert models.facts_of(model).loaded_as
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert models.facts_of(other).loaded_as == {}
    assert b"tl_coupling.models" not in pickle.dumps(model)
