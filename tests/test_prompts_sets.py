"""Prompt sets from the hub and from files: which texts, which ids, which sample, which
errors.

The datasets have the names, configurations, splits and columns that their cards on the
hub give.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fake_datasets_hub import FakeDatasetsHub, write_dataset
from fake_hub import output_of
from tl_coupling.prompts import Prompt, load_prompts

N_ROWS = 30
PROSE = (
    "The lobster lives in the eastern Atlantic , and it may weigh as much as six "
    "kilograms @-@ so they say , chapter"
)

# name: (path, configuration, split to read, what a row has beside the question, the
# question's column)
CARDS: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "arc_challenge": (
        "allenai/ai2_arc",
        "ARC-Challenge",
        "test",
        {
            "choices": {"text": ["an option", "another"], "label": ["A", "B"]},
            "answerKey": "A",
        },
        "question",
    ),
    "gsm8k": ("openai/gsm8k", "main", "test", {"answer": "#### 72"}, "question"),
    "hellaswag": (
        "Rowan/hellaswag",
        "default",
        "test",
        {
            "activity_label": "Ice",
            "ctx_a": "",
            "ctx_b": "",
            "endings": ["an option"],
            "source_id": "",
            "label": "",
        },
        "ctx",
    ),
    "mmlu": (
        "cais/mmlu",
        "all",
        "test",
        {"subject": "anatomy", "choices": ["an option", "another"], "answer": 1},
        "question",
    ),
    "truthfulqa": (
        "truthfulqa/truthful_qa",
        "generation",
        "validation",
        {
            "type": "Adversarial",
            "category": "Law",
            "best_answer": "an answer",
            "correct_answers": ["an answer"],
        },
        "question",
    ),
    "winogrande": (
        "allenai/winogrande",
        "winogrande_xl",
        "test",
        {"option1": "an option", "option2": "another", "answer": ""},
        "sentence",
    ),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", {}, "text"),
    **{
        f"easy2hard_{name.lower()}": (
            "furonghuang-lab/Easy2Hard-Bench",
            f"E2H-{name}",
            "eval",
            {"rating_std": 0.2},
            column,
        )
        for name, column in {
            "AMC": "problem",
            "ARC": "question",
            "GSM8K": "question",
            "Winogrande": "sentence",
        }.items()
    },
}
EASY2HARD = [name for name in CARDS if name.startswith("easy2hard")]
LEADERBOARD = [name for name in CARDS if name != "wikitext" and name not in EASY2HARD]


def own_ids(name: str, n: int) -> list[dict[str, Any]]:
    """The columns of ids and ratings of those datasets that have one."""
    columns = {
        "arc_challenge": ("id", "Mercury_{}"),
        "hellaswag": ("ind", 7),
    } | dict.fromkeys(EASY2HARD, ("rating", -0.25))
    if name not in columns:
        return [{} for _ in range(n)]
    column, form = columns[name]
    return [
        {column: form.format(7 * i) if isinstance(form, str) else form * i}
        for i in range(n)
    ]


def difficulty(name: str, i: int) -> float | None:
    return -0.25 * i if name in EASY2HARD else None


def write_set(folder: Path, name: str, texts: Sequence[str | None]) -> None:
    """A set with these texts, and other splits with others."""
    path, config, split, others, column = CARDS[name]
    rows = [
        {**own, column: text, **others}
        for own, text in zip(own_ids(name, len(texts)), texts, strict=True)
    ]
    elsewhere = [{**rows[0], column: f"{PROSE} of another split"}]
    splits = (
        {} if name == "truthfulqa" else {"train": elsewhere, "validation": elsewhere}
    )
    write_dataset(folder / path, config, {**splits, split: rows})


def a_text(name: str, i: int) -> str:
    return (
        f"{PROSE} {i} of {name} ."
        if name == "wikitext"
        else f"[header] What did _ do in {name} {i}?"
    )


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for name in CARDS:
        write_set(folder, name, [a_text(name, i) for i in range(N_ROWS)])
    return folder


def stand_in(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder by a dataset's name for the dataset itself, and asks no
    hub.

    It knows such a folder again by its relative name alone: hence a cache for each.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


@pytest.fixture
def here(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(sets, sets / "cache", monkeypatch)


@pytest.fixture
def write_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_in(tmp_path, tmp_path / "cache", monkeypatch)
    return tmp_path


def expected_id(name: str, i: int) -> str:
    return {
        "arc_challenge": f"arc_challenge-Mercury_{7 * i}",
        "hellaswag": f"hellaswag-{7 * i}",
    }.get(name, f"{name}-{i}")


@pytest.mark.parametrize("name", CARDS)
def test_a_set_is_the_questions_of_its_split_alone(here: None, name: str) -> None:
    expected = [
        Prompt(a_text(name, i), expected_id(name, i), name, None, difficulty(name, i))
        for i in range(N_ROWS)
    ]
    assert load_prompts(name, n=None) == expected


def test_the_draw_is_random_repeatable_and_in_row_order(here: None) -> None:
    everything = load_prompts("gsm8k", n=None)
    drawn = load_prompts("gsm8k", n=10, seed=3)
    assert (
        drawn
        == load_prompts("gsm8k", n=10, seed=3)
        != load_prompts("gsm8k", n=10, seed=4)
    )
    rows = [everything.index(prompt) for prompt in drawn]
    assert rows == sorted(set(rows))
    assert len(rows) == 10
    assert set(drawn) < set(load_prompts("gsm8k", n=20, seed=3))
    assert load_prompts("gsm8k", n=N_ROWS, seed=3) == everything


def test_every_row_is_drawn_equally_often(tmp_path: Path) -> None:
    """1000 draws of 3 of 30 rows: 100 each, with a standard deviation of 9.5."""
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(N_ROWS))
    )
    ids = [
        prompt.id
        for seed in range(1000)
        for prompt in load_prompts(file, n=3, seed=seed)
    ]
    counts = np.unique(ids, return_counts=True)[1]
    assert len(counts) == N_ROWS
    assert abs(counts - 100).max() < 5 * 9.5


def test_what_is_empty_or_stands_twice_is_left_out_and_rows_keep_their_numbers(
    write_here: Path,
) -> None:
    write_set(write_here, "gsm8k", ["a?", "", " a?\n", None, "b?", "  ", "c?", "b?"])
    assert [(p.id, p.prompt) for p in load_prompts("gsm8k", n=None)] == [
        ("gsm8k-0", "a?"),
        ("gsm8k-4", "b?"),
        ("gsm8k-6", "c?"),
    ]
    with pytest.raises(
        ValueError, match=r"`n` must be at most 3, all the prompts of gsm8k, got 4"
    ):
        load_prompts("gsm8k", n=4)


def test_an_id_names_one_prompt(write_here: Path) -> None:
    rows = [
        {"ind": 4, "ctx": "first"},
        {"ind": 4, "ctx": "second"},
        {"ind": 5, "ctx": "third"},
    ]
    write_dataset(write_here / "Rowan/hellaswag", "default", {"test": rows})
    assert [p.prompt for p in load_prompts("hellaswag", n=None)] == ["first", "third"]


def test_wikitext_is_passages(write_here: Path) -> None:
    passage = "word " * 20
    lines = [
        "",
        " = Lobster = \n",
        " = = " + passage + "= = \n",
        f" {passage}\n",
        " a list entry \n",
        "word " * 19,
    ]
    write_set(write_here, "wikitext", lines)
    assert load_prompts("wikitext", n=None) == [
        Prompt(passage.strip(), "wikitext-3", "wikitext")
    ]


def test_the_leaderboard_is_six_equal_parts(here: None) -> None:
    prompts = load_prompts("open_llm_leaderboard", n=60, seed=5)
    assert [prompt.task for prompt in prompts] == [
        name for name in LEADERBOARD for _ in range(10)
    ]
    assert len({prompt.id for prompt in prompts}) == 60
    assert prompts[10:20] == load_prompts("gsm8k", n=10, seed=5)
    assert load_prompts("open_llm_leaderboard") == [
        prompt for name in LEADERBOARD for prompt in load_prompts(name)
    ]


def test_easy_to_hard_is_four_equal_parts_with_their_ratings(here: None) -> None:
    prompts = load_prompts("easy2hard", n=40, seed=5)
    assert [prompt.task for prompt in prompts] == [
        name for name in EASY2HARD for _ in range(10)
    ]
    assert all(
        prompt.difficulty == -0.25 * int(prompt.id.rsplit("-", 1)[1])
        for prompt in prompts
    )


def test_a_prompt_without_a_rating_is_kept_and_ratings_stay_with_their_texts(
    write_here: Path,
) -> None:
    rows = [
        {"question": text, "rating": rating}
        for text, rating in (("a?", 1.5), ("", 9.0), ("b?", None), ("c?", -2))
    ]
    write_dataset(
        write_here / "furonghuang-lab/Easy2Hard-Bench", "E2H-GSM8K", {"eval": rows}
    )
    assert [(p.prompt, p.difficulty) for p in load_prompts("easy2hard_gsm8k")] == [
        ("a?", 1.5),
        ("b?", None),
        ("c?", -2),
    ]


@pytest.mark.parametrize(
    ("name", "n", "wanted"),
    [
        ("open_llm_leaderboard", 100, "a multiple of 6, .*"),
        ("open_llm_leaderboard", 0, "at least 1,"),
        ("open_llm_leaderboard", -6, "at least 1,"),
        ("easy2hard", 6, "a multiple of 4, .*"),
    ],
)
def test_a_group_in_unequal_parts_is_refused(
    here: None, name: str, n: int, wanted: str
) -> None:
    with pytest.raises(ValueError, match=f"`n` must be {wanted} got {n}"):
        load_prompts(name, n=n)


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(
            json.dumps({"id": f"x{i}", "prompt": f"p{i // 2}", "task": "t"}) + "\n"
            for i in range(12)
        )
    )
    everything = [Prompt(f"p{i // 2}", f"x{i}", "t") for i in range(12)]
    assert load_prompts(file, n=None) == load_prompts(str(file), n=12) == everything
    drawn = load_prompts(file, n=5, seed=1)
    assert len(drawn) == 5
    assert drawn == [prompt for prompt in everything if prompt in drawn]
    with pytest.raises(
        ValueError, match=r"at most 12, all the prompts of .*p\.jsonl, got 13"
    ):
        load_prompts(file, n=13)


def test_a_set_goes_before_a_file_of_its_name_and_a_path_is_a_file(
    write_here: Path,
) -> None:
    (write_here / "gsm8k").write_text('{"prompt": "of the file"}\n')
    write_set(write_here, "gsm8k", ["of the set"])
    assert [p.prompt for p in load_prompts("gsm8k", n=1)] == ["of the set"]
    assert [p.prompt for p in load_prompts(Path("gsm8k"), n=1)] == ["of the file"]


@pytest.mark.parametrize("name", ["arc", "nowhere.jsonl", "."])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    known = ", ".join([*CARDS, "open_llm_leaderboard", "easy2hard"])
    with pytest.raises(
        ValueError, match=f"^'{name}' is neither a file nor a prompt set: .*{known}$"
    ):
        load_prompts(name)


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_one(n: int) -> None:
    with pytest.raises(ValueError, match=f"`n` must be at least 1, got {n}$"):
        load_prompts("gsm8k", n=n)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        load_prompts(tmp_path / "nothing.jsonl")


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r'pip install "tl-coupling\[survey\]"'
    ) as caught:
        load_prompts("mmlu")
    assert "\n" not in str(caught.value)


def test_without_a_hub(write_here: Path) -> None:
    with pytest.raises(
        OSError, match=r"^could not load 'gsm8k' \(openai/gsm8k, main, .*go online once"
    ) as caught:
        load_prompts("gsm8k")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "split", "column", "gone"),
    [
        ("new", "test", "question", "'main'"),
        ("main", "new", "question", '"test"'),
        ("main", "test", "new", "'question'"),
    ],
)
def test_a_dataset_that_has_changed(
    write_here: Path, config: str, split: str, column: str, gone: str
) -> None:
    write_dataset(write_here / "openai/gsm8k", config, {split: [{column: "x"}]})
    with pytest.raises(
        OSError,
        match=rf"'gsm8k' \(openai/gsm8k, .*: it is not there as expected.*{gone}",
    ) as caught:
        load_prompts("gsm8k", n=1)
    assert "\n" not in str(caught.value)


_LOAD = """
import dataclasses, json, os, sys
os.environ["HF_HUB_OFFLINE"], *names = sys.argv[1:]
from tl_coupling.prompts import load_prompts
for name in names:
    try:
        print(json.dumps([dataclasses.astuple(prompt) for prompt in load_prompts(name, n=5)]))
    except OSError as error:
        print(error)
"""


@pytest.mark.long("starts processes")
def test_the_genuine_call_downloads_once(sets: Path, tmp_path: Path) -> None:
    """Over HTTP, from a hub on this machine that has one set and lacks another; then
    from the cache.
    """
    names = "arc_challenge", "easy2hard_gsm8k"
    with FakeDatasetsHub(
        {path: sets / path for path in (CARDS[name][0] for name in names)}
    ) as hub:
        *first, said = output_of(hub, tmp_path, _LOAD, "0", *names, "gsm8k")
        requests = list(hub.requests)
        again = output_of(hub, tmp_path, _LOAD, "1", *names)
    for name, line in zip(names, first, strict=True):
        expected = [dataclasses.astuple(prompt) for prompt in drawn_here(sets, name)]
        assert [tuple(entry) for entry in json.loads(line)] == expected
    assert again == first
    assert hub.requests == requests
    assert "GET main/ARC-Challenge/test-00000-of-00001.parquet" in requests
    assert "GET main/E2H-GSM8K/eval-00000-of-00001.parquet" in requests
    assert said.startswith(
        "could not load 'gsm8k' (openai/gsm8k, main, split 'test', column 'question')"
    )
    assert "DatasetNotFoundError" in said


def drawn_here(sets: Path, name: str) -> list[Prompt]:
    file = sets / f"{name}.jsonl"
    lines = [
        {
            "id": expected_id(name, i),
            "prompt": a_text(name, i),
            "task": name,
            "difficulty": difficulty(name, i),
        }
        for i in range(N_ROWS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_prompts(file, n=5)
