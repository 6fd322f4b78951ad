"""Text becomes the tokens that the model's tokenizer means, once each; without a
tokenizer there is no text.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import model_folders
import tiny
import tl_coupling as tlc

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
)


def save_prepending_tokenizer(folder: Path, template: str = "<s> $A") -> Any:
    """Save a tokenizer that adds special tokens by itself, and has a chat template that
    writes them too; return it.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tiny.save_tokenizer(folder)
    backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("w99", 99)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<s>", eos_token="w99"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def prepending(tmp_path: Path) -> nn.Module:
    tiny.huggingface_model("llama").save_pretrained(tmp_path)
    save_prepending_tokenizer(tmp_path)
    return tlc.load_model(str(tmp_path))


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "gemma2", "qwen3", "llama", "mistral", "phi3", "olmo2", "gpt_neox"],
)
def test_a_folder_without_a_tokenizer_takes_ids(
    tmp_path: Path, architecture: str
) -> None:
    hf_model = tiny.huggingface_model(architecture)
    hf_model.save_pretrained(tmp_path)
    model = tlc.load_model(str(tmp_path))
    trace = tlc.trace(model, tiny.TOKENS)
    assert trace.str_tokens == tuple(map(str, tiny.TOKENS))
    assert trace.tokens.tolist() == tiny.TOKENS
    with torch.no_grad():
        states = hf_model(
            torch.tensor([tiny.TOKENS]), use_cache=False, output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(trace.residual[0], states[0][0], rtol=1e-5, atol=1e-5)
    for text in ("What is the capital of France?", ""):
        with pytest.raises(
            ValueError,
            match=r"this model has no tokenizer: give the prompt as token ids$",
        ):
            tlc.trace(model, text)


def test_a_folder_of_bert_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    model_folders.save("bert", tmp_path)
    for path in tmp_path.glob("*token*"):
        path.unlink()
    model = tlc.load_model(str(tmp_path))
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        tlc.trace(model, "What is the capital of France?")
    assert tlc.trace(model, [1, 2, 3]).str_tokens == ("1", "2", "3")


@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("untrained", [False, True])
def test_a_folder_with_code_and_no_tokenizer_takes_ids(
    untrained: bool, memory: str, tmp_path: Path
) -> None:
    if untrained and memory == "stream":
        pytest.skip("an untrained model has no files")
    tiny.huggingface_model("llama").save_pretrained(folder := tmp_path / "model")
    model_folders.bring_own_code(folder, tmp_path / "executed")
    with pytest.raises(tlc.ModelError, match="comes with Python code of its own"):
        tlc.load_model(str(folder), memory=memory, untrained=untrained)
    assert not (tmp_path / "executed").exists()
    model = tlc.load_model(
        str(folder), memory=memory, untrained=untrained, trust_remote_code=True
    )
    assert model.tokenizer is None
    assert tlc.trace(model, tiny.TOKENS).n_pos == len(tiny.TOKENS)
    with pytest.raises(ValueError, match="has no tokenizer: give the prompt as token"):
        tlc.trace(model, "w7")


def test_a_damaged_tokenizer_is_no_missing_one(tmp_path: Path) -> None:
    tiny.huggingface_model("llama").save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[:-100])
    with pytest.raises(tlc.ModelError, match="could not load"):
        tlc.load_model(str(tmp_path))


def test_a_text_of_unknown_tokens_is_remarked_on(prepending: nn.Module) -> None:
    with pytest.warns(UserWarning, match="2 of the text's 3 tokens are '<s>'"):
        trace = tlc.trace(prepending, "Quelle w7 heure")
    # The first unknown word has the id of the BOS token, and is none.
    assert trace.tokens.tolist() == [0, 0, 7, 0]
    (remark,) = trace.provenance["remarks"]
    assert "which this model's tokenizer gives for what it does not know" in remark
    known = tlc.trace(prepending, "w7 w8 heure")
    assert known.provenance["remarks"] == []


@pytest.mark.parametrize("prepend_bos", [None, True])
def test_a_beginning_that_a_chat_template_wrote_is_taken_once(
    prepending: nn.Module, prepend_bos: bool | None
) -> None:
    messages = [{"role": "user", "content": "w7 w8"}]
    text = prepending.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith("<s>")
    text = text.replace("<s>", "<s> ")
    with pytest.warns(UserWarning, match="the text begins with '<s>' already"):
        trace = tlc.trace(prepending, text, prepend_bos=prepend_bos)
    assert trace.tokens.tolist() == [0, 7, 8]
    assert trace.provenance["prepend_bos"] is True
    (remark,) = trace.provenance["remarks"]
    assert "was not added" in remark
    from_ids = tlc.trace(prepending, [0, 7, 8])
    assert torch.equal(trace.residual, from_ids.residual)


def test_beginnings_that_are_wanted_stay(prepending: nn.Module) -> None:
    for prompt, prepend_bos, expected in (
        ([0, 0, 7], None, [0, 0, 7]),
        ([0, 0, 7], True, [0, 0, 7]),
        ("<s> w7", False, [0, 7]),
        ("w7 <s> w8 w9", None, [0, 7, 0, 8, 9]),
    ):
        trace = tlc.trace(prepending, prompt, prepend_bos=prepend_bos)
        assert trace.tokens.tolist() == expected
        assert trace.provenance["remarks"] == []


def test_an_end_that_is_written_is_taken_once_where_tokens_see_it(
    tmp_path: Path,
) -> None:
    model_folders.save("bert", tmp_path)
    save_prepending_tokenizer(tmp_path, "<s> $A w99")
    model = tlc.load_model(str(tmp_path))
    assert tlc.trace(model, "w7 w8").tokens.tolist() == [0, 7, 8, 99]
    with (
        pytest.warns(UserWarning, match="the text begins with '<s>' already"),
        pytest.warns(UserWarning, match="the text ends with 'w99' already"),
    ):
        trace = tlc.trace(model, "<s> w7 w8 w99")
    assert trace.tokens.tolist() == [0, 7, 8, 99]


@pytest.mark.parametrize("tensors", [None, "pt"])
def test_what_a_tokenizer_returns_is_a_prompt(
    prepending: nn.Module, tensors: str | None
) -> None:
    encoded = prepending.tokenizer("w7 w8 w9", return_tensors=tensors)
    trace = tlc.trace(prepending, encoded)
    expected = tlc.trace(prepending, "w7 w8 w9")
    assert torch.equal(trace.residual, expected.residual)
    assert trace.tokens.tolist() == expected.tokens.tolist()
    chat = prepending.tokenizer.apply_chat_template(
        [{"role": "user", "content": " w7 w8"}], return_dict=True
    )
    assert tlc.trace(prepending, chat).tokens.tolist() == chat["input_ids"]


def test_what_a_tokenizer_returns_of_padding_or_pairs_is_refused(
    prepending: nn.Module,
) -> None:
    tokenizer = prepending.tokenizer
    padded = {"input_ids": [[0, 7, 8]], "attention_mask": [[0, 1, 1]]}
    pair = {"input_ids": [[0, 7, 8]], "token_type_ids": [[0, 0, 1]]}
    for batch, message in (
        (padded, "`prompt` must be unpadded: its attention mask leaves tokens out"),
        (pair, "'token_type_ids' is no argument of LlamaForCausalLM; leave it out"),
        (tokenizer(["w7", "w8"]), "of one prompt; got shape"),
        (tokenizer(["w7", "w8 w9"]), "must be one prompt, got several"),
        ({"pixel_values": torch.ones(1, 3, 4, 4)}, "must hold 'input_ids'"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            tlc.trace(prepending, batch)
        assert "\n" not in str(caught.value)
    assert json.dumps(tlc.trace(prepending, tokenizer("w7")).provenance)
