"""Prompts, texts or images: benchmark questions from the HuggingFace hub, and JSONL
files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tl_coupling.arguments import AnyPath, Count, Finite, Seed, Text, checked, made_by

__all__ = ["Prompt", "load_prompts", "prompts_per_task"]


@made_by("Prompt(id, text)")
@checked
@dataclass(frozen=True)
class Prompt:
    """A prompt with an id that is the same in every run; the task it comes from, and
    how difficult it is, if known.

    It is a text, `prompt`, or for a vision model the file of an image, `image`, which
    must stay where it is. ValueError for an empty id or text, both a text and an image,
    an image that is not there, and lone surrogates.

    Example:
        >>> tlc.Prompt("france", "The capital of France is", task="capitals").text
        'The capital of France is'
    """

    id: Text
    prompt: Text = ""
    task: Text | None = None
    image: AnyPath | None = None
    difficulty: Finite | None = None

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError(
                f"the id of a prompt is empty: wanted a name for {str(self.image or self.prompt)[:80]!r}"
            )
        if self.image is None and not self.prompt:
            raise ValueError("the prompt is empty: wanted at least one token")
        if self.image is not None:
            if self.prompt:
                raise ValueError(
                    f"prompt {self.id!r} is a text or an image, not both: leave one out"
                )
            if not (path := Path(self.image).resolve()).is_file():
                raise ValueError(
                    f"prompt {self.id!r}: there is no image file {os.fspath(self.image)!r}"
                )
            object.__setattr__(self, "image", str(path))

    @property
    def text(self) -> str:
        """The text; of an image, the checksum of its file."""
        if self.image is None:
            return self.prompt
        return (
            f"image sha256:{hashlib.sha256(Path(self.image).read_bytes()).hexdigest()}"
        )


def _is_prose(text: str) -> bool:
    """Whether a line of WikiText is neither a heading (` = Title = `) nor a list entry
    or fragment.
    """
    return not (text.startswith("=") and text.endswith("=")) and len(text.split()) >= 20


class _Set(NamedTuple):
    """Where a prompt set is on the hub: a split, its columns of texts, ids (else: row
    numbers) and difficulty.
    """

    path: str
    config: str | None
    split: str
    column: str
    id_column: str | None = None
    is_prompt: Callable[[str], bool] = bool
    difficulty: str | None = None


def _easy2hard(name: str, column: str) -> _Set:
    return _Set(
        "furonghuang-lab/Easy2Hard-Bench",
        f"E2H-{name}",
        "eval",
        column,
        difficulty="rating",
    )


_LEADERBOARD = {
    "arc_challenge": _Set("allenai/ai2_arc", "ARC-Challenge", "test", "question", "id"),
    "gsm8k": _Set("openai/gsm8k", "main", "test", "question"),
    "hellaswag": _Set("Rowan/hellaswag", None, "test", "ctx", "ind"),
    "mmlu": _Set("cais/mmlu", "all", "test", "question"),
    # TruthfulQA has no other split.
    "truthfulqa": _Set(
        "truthfulqa/truthful_qa", "generation", "validation", "question"
    ),
    "winogrande": _Set("allenai/winogrande", "winogrande_xl", "test", "sentence"),
}
# The other two are games of chess and programming problems, which are no prompts in one
# column.
_EASY2HARD = {
    "easy2hard_amc": _easy2hard("AMC", "problem"),
    "easy2hard_arc": _easy2hard("ARC", "question"),
    "easy2hard_gsm8k": _easy2hard("GSM8K", "question"),
    "easy2hard_winogrande": _easy2hard("Winogrande", "sentence"),
}
_WIKITEXT = _Set(
    "Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", is_prompt=_is_prose
)
_DATASETS = _LEADERBOARD | {"wikitext": _WIKITEXT} | _EASY2HARD
_GROUPS = {"open_llm_leaderboard": list(_LEADERBOARD), "easy2hard": list(_EASY2HARD)}


@checked
def load_prompts(
    source: AnyPath, n: Count | None = None, seed: Seed = 0
) -> list[Prompt]:
    r"""Prompts of a JSONL file or of a benchmark's test set; `n` of them, drawn at
    random and kept in row order.

    A JSONL file has one object per line: `{"prompt": …}`, or `{"image": …}` with a path
    from the file's folder, and optionally `"id"` (else the line number), `"task"` and
    `"difficulty"`, a number. Blank lines are skipped. Of a set, texts are the questions
    as the dataset has them, without options and answers: HellaSwag's contexts keep
    their `[header]` marks, WinoGrande's sentences their `_`. Empty and repeated texts
    are left out. Ids are the set's name with the dataset's own id or, if it has none,
    the row number.

    Args:
        source: a path to a JSONL file, or `"arc_challenge"`, `"gsm8k"`, `"hellaswag"`,
            `"mmlu"`, `"truthfulqa"`, `"winogrande"` (test splits; TruthfulQA's only
            split is called validation), `"wikitext"` (WikiText-2's test split: each
            line of at least 20 words that is not a heading), `"easy2hard_amc"`,
            `"easy2hard_arc"`, `"easy2hard_gsm8k"`, `"easy2hard_winogrande"`
            (Easy2Hard-Bench's eval splits, with their rating as the difficulty: a scale
            of its own in each). Equally many of several: `"open_llm_leaderboard"`, the
            first six, for the paper's comparison of models; `"easy2hard"`, the last
            four.
        n: how many; all by default. A larger `n` draws the same prompts and more.
        seed: of the draw, which depends on nothing else but the rows.

    Raises:
        ValueError: neither a known set nor a file; `n` below 1, above what there is, or
            not a multiple of 6 for the leaderboard, of 4 for `"easy2hard"`; no package
            `datasets`; a line that is not a prompt, an id that is used twice, an empty
            file.
        OSError: the file cannot be read, or the hub cannot be reached and nothing is
            cached, or the dataset changed.

    Cost: the first call for a set downloads all splits of that configuration into
    HuggingFace's cache (MMLU: 50 MB).

    Source: 1,200 leaderboard prompts, Section 4.2 and Appendix A.6. The paper does not
    say how many come from each benchmark nor which; equal shares are our reading. Nor
    does it say which of Easy2Hard-Bench (Ding et al. 2024) are in its figure 10.

    Example:
        >>> from pathlib import Path
        >>> lines = '{"id": "a", "prompt": "1 + 1 ="}', '{"id": "b", "prompt": "Two plus two is"}'
        >>> _ = Path("two.jsonl").write_text("\n".join(lines))
        >>> [prompt.id for prompt in tlc.load_prompts("two.jsonl")]
        ['a', 'b']
    """
    if isinstance(source, str) and (names := _GROUPS.get(source)):
        if n and n % len(names):
            raise ValueError(
                f"`n` must be a multiple of {len(names)}, as many from each benchmark, got {n}"
            )
        return [
            prompt
            for name in names
            for prompt in load_prompts(name, n and n // len(names), seed)
        ]
    if isinstance(source, str) and source in _DATASETS:
        prompts = _from_hub(source)
    elif isinstance(source, str) and not Path(source).is_file():
        known = ", ".join([*_DATASETS, *_GROUPS])
        raise ValueError(
            f"{source!r} is neither a file nor a prompt set: give a JSONL file or one of {known}"
        )
    else:
        prompts = _from_file(Path(source))
    if n is not None and n > len(prompts):
        raise ValueError(
            f"`n` must be at most {len(prompts)}, all the prompts of {source}, got {n}; or None for all"
        )
    return _draw(prompts, n, seed)


@checked
def prompts_per_task(prompts: Sequence[Prompt], n: int, seed: Seed = 0) -> list[Prompt]:
    """`n` prompts of every task, drawn at random and kept in their order; a larger `n`
    draws the same and more.

    Raises:
        ValueError: `n` below 1, or a task with fewer prompts.

    Example:
        >>> prompts = [tlc.Prompt(f"{task}-{i}", "1 + 1 =", task) for task in ("sums", "riddles") for i in range(9)]
        >>> [prompt.task for prompt in tlc.prompts.prompts_per_task(prompts, n=2)]
        ['sums', 'sums', 'riddles', 'riddles']
    """
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    indices = [
        [i for i, prompt in enumerate(prompts) if prompt.task == task] for task in tasks
    ]
    fewest = min(map(len, indices), default=0)
    if not 1 <= n <= fewest:
        raise ValueError(
            f"`n` must lie in [1, {fewest}], the prompts of the smallest task, got {n}"
        )
    return [
        prompts[i]
        for i in sorted(i for of_task in indices for i in _draw(of_task, n, seed))
    ]


def _draw(items: Sequence[Any], n: int | None, seed: int) -> list[Any]:
    drawn = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[i] for i in sorted(drawn)]


def _from_file(path: Path) -> list[Prompt]:
    try:
        # Not splitlines: a text may hold Unicode's own line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        wanted = f'{where}: wanted {{"prompt": "…"}}'
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise ValueError(
                f"{wanted}, got text that is not JSON ({reason})"
            ) from None
        given = entry if isinstance(entry, dict) else {}
        text, image = given.get("prompt"), given.get("image")
        if not any(isinstance(one, str) and one.strip() for one in (text, image)):
            raise ValueError(
                f"{wanted} with a text that is not empty, got {line.strip()[:80]}"
            )
        if not isinstance(task := given.get("task"), str | None):
            raise ValueError(f'{where}: "task" must be a string or null, got {task!r}')
        try:
            picture, difficulty = image and path.parent / image, given.get("difficulty")
            prompt = Prompt(
                str(given.get("id", number)), text or "", task, picture, difficulty
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
        if prompts.setdefault(prompt.id, prompt) is not prompt:
            raise ValueError(
                f"{where}: the id {prompt.id!r} is used twice; ids must differ"
            )
    if not prompts:
        raise ValueError(f'{path} has no prompts; wanted lines like {{"prompt": "…"}}')
    return list(prompts.values())


def _from_hub(name: str) -> list[Prompt]:
    """All prompts of a known set, in row order, each text and each id once."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        install = 'pip install "tl-coupling[survey]"'
        raise ValueError(
            f"the prompt set {name!r} needs the package datasets: {install} ({error})"
        ) from None
    of = _DATASETS[name]
    try:
        rows = load_dataset(of.path, of.config, split=of.split)
        texts = [(text or "").strip() for text in rows[of.column]]
        keys = [
            f"{name}-{own}"
            for own in (rows[of.id_column] if of.id_column else range(len(texts)))
        ]
        ratings = list(rows[of.difficulty]) if of.difficulty else [None] * len(texts)
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is
    # documented.
    except Exception as error:
        why = "it is not there as expected, or the download broke; try again, or give a JSONL file"
        if isinstance(error, ConnectionError):
            why = "the hub cannot be reached and nothing is cached; go online once, or give a JSONL file"
        what = f"{of.path}, {of.config or 'default'}, split {of.split!r}, column {of.column!r}"
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise OSError(
            f"could not load {name!r} ({what}) from HuggingFace: {why} ({said})"
        ) from error
    prompts: dict[str, Prompt] = {}
    seen: set[str] = set()
    for key, text, rating in zip(keys, texts, ratings, strict=True):
        if of.is_prompt(text) and text not in seen and key not in prompts:
            seen.add(text)
            prompts[key] = Prompt(key, text, name, difficulty=rating)
    return list(prompts.values())
