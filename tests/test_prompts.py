"""JSONL files of prompts: what is read, and errors that name file and line."""

from pathlib import Path

import pytest
import torch

import tl_coupling as tlc


def test_ids_tasks_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"id": 7, "task": "arc", "prompt": "é\\n?"}\n\n{"prompt": "b", "more": 1}\n',
        encoding="utf-8",
    )
    assert tlc.load_prompts(file) == [
        tlc.Prompt("é\n?", "7", "arc"),
        tlc.Prompt("b", "3", None),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", r"p\.jsonl, line 2: .*not JSON"),
        (b"[" * 100_000, r"p\.jsonl, line 2: .*not JSON \(nested too deeply\)"),
        (b"[1, 2]", r"p\.jsonl, line 2: wanted"),
        (b'{"text": "x"}', r"p\.jsonl, line 2: wanted"),
        (b'{"prompt": 3}', r"p\.jsonl, line 2: wanted"),
        (b'{"prompt": " "}', r"p\.jsonl, line 2: .*not empty"),
        (b'{"id": "1", "prompt": "x"}', r"line 2: the id '1' is used twice"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_line_that_is_not_a_prompt_is_named(
    tmp_path: Path, line: bytes, message: str
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"id": "1", "prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        tlc.load_prompts(file)


def test_texts_under_another_key(tmp_path: Path) -> None:
    file = tmp_path / "tickets.jsonl"
    file.write_text('{"body": "a", "id": "x", "prompt": "not this"}\n{"body": "b"}\n')
    assert tlc.load_prompts(file, key="body") == [
        tlc.Prompt("a", "x"),
        tlc.Prompt("b", "2"),
    ]
    with pytest.raises(
        ValueError,
        match=r"tickets\.jsonl, line 2: wanted {\"prompt\": .* the keys 'body'; .* `key`$",
    ):
        tlc.load_prompts(file)
    with pytest.raises(
        ValueError,
        match=r"line 1: wanted {\"text\": .* the keys 'body', 'id', 'prompt'; ",
    ):
        tlc.load_prompts(file, key="text")
    with pytest.raises(ValueError, match="`key` is for files, and 'gsm8k' is a prompt"):
        tlc.load_prompts("gsm8k", key="body")


def test_all_empty_texts_are_named_at_once_or_left_out(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": ""}\n{"prompt": "a"}\n\n{"prompt": " "}\n{"prompt": null}\n'
        '{"prompt": "b"}\n'
    )
    with pytest.raises(
        ValueError,
        match=r"p\.jsonl, lines 1, 4, 5: wanted texts under 'prompt' .*skip_empty=True$",
    ):
        tlc.load_prompts(file)
    assert tlc.load_prompts(file, skip_empty=True) == [
        tlc.Prompt("a", "2"),
        tlc.Prompt("b", "6"),
    ]
    file.write_text('{"prompt": ""}')
    with pytest.raises(ValueError, match="has no prompts"):
        tlc.load_prompts(file, skip_empty=True)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="has no prompts"):
        tlc.load_prompts(tmp_path / "p.jsonl")


def test_lines_end_where_a_file_says_and_a_mark_at_its_beginning_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\ufeff{"prompt": "one\u2028two\x85three"}\r\n{"prompt": "four"}\n',
        encoding="utf-8",
    )
    assert [prompt.prompt for prompt in tlc.load_prompts(path)] == [
        "one\u2028two\x85three",
        "four",
    ]


def test_a_difficulty_is_a_number(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a", "difficulty": 3}\n{"prompt": "b", "difficulty": null}\n{"prompt": "c"}\n'
    )
    assert [prompt.difficulty for prompt in tlc.load_prompts(file)] == [3.0, None, None]
    for wrong in ('"hard"', "NaN", "true"):
        file.write_text(f'{{"prompt": "a", "difficulty": {wrong}}}')
        with pytest.raises(
            ValueError, match=r"p\.jsonl, line 1: `difficulty` must be .*, got"
        ):
            tlc.load_prompts(file)


def test_a_task_is_a_string(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "task": ["sums"]}')
    with pytest.raises(
        ValueError, match=r"line 1: \"task\" must be a string or null, got \['sums'\]"
    ):
        tlc.load_prompts(path)


def test_prompts_per_task_of_what_can_be_walked_through_once(as_a_user):
    prompts = [
        tlc.Prompt("a", "0", "x"),
        tlc.Prompt("b", "0", "y"),
        tlc.Prompt("c", "1", "x"),
    ]
    drawn = tlc.prompts.prompts_per_task(prompts, 1)
    assert tlc.prompts.prompts_per_task(iter(prompts), 1) == drawn
    assert sorted(prompt.task for prompt in drawn) == ["x", "y"]


def test_the_text_comes_first_and_is_the_id(tmp_path: Path) -> None:
    prompt = tlc.Prompt("What is 1 + 1?")
    assert (prompt.text, prompt.id) == ("What is 1 + 1?", "What is 1 + 1?")
    named = tlc.Prompt("What is 1 + 1?", "sum", "sums")
    assert (named.text, named.id, named.task) == ("What is 1 + 1?", "sum", "sums")
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"not read here")
    assert tlc.Prompt(image=picture).id == "cat.png"
    with pytest.raises(ValueError, match=r"\(was 'an id' meant as `id=`\?\)"):
        tlc.Prompt("an id", image=picture)


HALF = "w3 \ud83d w14"


@pytest.mark.parametrize(
    "given", [{"id": HALF, "prompt": "w3"}, {"id": "a", "prompt": HALF}]
)
def test_half_a_character_is_refused_in_one_line(given: dict[str, str]) -> None:
    with pytest.raises(
        ValueError,
        match=r"must be text in Unicode, got 'w3 \\ud83d w14': character 3 is half",
    ) as caught:
        tlc.Prompt(**given)
    str(caught.value).encode()
    with pytest.raises(ValueError, match="`task` must be text in Unicode"):
        tlc.Prompt("w3", "a", task=HALF)
    assert tlc.Prompt("w3 😀", "a").text == "w3 😀"


def test_a_line_with_half_a_character_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "w3"}\n{"prompt": "w3 \\ud83d"}\n'
    )
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl, line 2: `prompt` must be text in Unicode"
    ):
        tlc.load_prompts(tmp_path / "prompts.jsonl")


def test_half_a_character_cannot_be_traced_nor_be_a_name(tiny_trace: tlc.Trace) -> None:
    with pytest.raises(ValueError, match="`prompt` must be text in Unicode"):
        tlc.trace(tiny_trace.model, HALF)
    net = torch.nn.Sequential(torch.nn.PReLU(init=0.9))
    with pytest.raises(ValueError, match="`name` must be text in Unicode"):
        tlc.trace_modules(net, lambda: net(torch.ones(1, 3, 4)), name=HALF)
    with pytest.raises(ValueError, match="`label` must be text in Unicode"):
        tlc.load_model("no such model", label=HALF)


def test_token_ids_are_a_prompt_of_their_own() -> None:
    prompt = tlc.Prompt(tokens=torch.tensor([[3, 14, 15]]), task="sums")
    assert prompt.tokens == (3, 14, 15)
    assert prompt.content == [3, 14, 15]
    assert prompt.text == prompt.id == "token ids 3 14 15"
    same = tlc.Prompt(tokens=[3, 14, 15], task="sums")
    assert prompt == same
    assert hash(prompt) == hash(same)
    assert prompt != tlc.Prompt("token ids 3 14 15", task="sums")


def test_a_prompt_is_one_of_a_text_token_ids_and_an_image(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is a text or token ids, not both: leave one"
    ):
        tlc.Prompt("w3", tokens=[3])
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"not read here")
    with pytest.raises(ValueError, match="is token ids or an image, not both"):
        tlc.Prompt(image=picture, tokens=[3])
    with pytest.raises(
        ValueError, match=r"`tokens` must be token ids .* shape \[2, 1\]"
    ):
        tlc.Prompt(tokens=torch.tensor([[3], [4]]))
    with pytest.raises(ValueError, match="the prompt is empty"):
        tlc.Prompt(tokens=[])


def test_a_prompt_of_token_ids_is_traced_as_they_are(tiny_trace: tlc.Trace) -> None:
    ids = tiny_trace.tokens[:4]
    prompt = tlc.Prompt(tokens=ids)
    traced = tlc.trace(tiny_trace.model, prompt)
    assert torch.equal(traced.residual, tlc.trace(tiny_trace.model, ids).residual)
    assert traced.tokens.tolist() == ids.tolist()
    assert traced.provenance["prepend_bos"] == "token ids given"
