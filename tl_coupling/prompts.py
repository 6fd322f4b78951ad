"""Sets of prompts: benchmark questions from the HuggingFace hub, and JSONL files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from tl_coupling.border import AnyPath, Count, Seed, checked

_Item = TypeVar("_Item")


@checked
@dataclass(frozen=True)
class Prompt:
    """One prompt with an id that stays the same from run to run, and the task it comes from, if any."""

    id: str
    prompt: str
    task: str | None = None

    def __post_init__(self) -> None:
        """Raise on a prompt that cannot be named or measured."""
        if not self.id:
            raise ValueError(f"the id of a prompt is empty: wanted a name for {self.prompt[:80]!r}")
        if not self.prompt:
            raise ValueError("the prompt is empty: wanted at least one token")


def _is_passage(text: str) -> bool:
    """Whether a line of WikiText is prose rather than a heading (` = Title = `), an entry of a list or a fragment."""
    return not (text.startswith("=") and text.endswith("=")) and len(text.split()) >= 20


class _Dataset(NamedTuple):
    """Where a prompt set stands on the hub: a split, its column of texts, and its column of ids (else: row numbers)."""

    path: str
    config: str | None
    split: str
    text: str
    id: str | None = None
    wanted: Callable[[str], bool] = bool


_LEADERBOARD = {
    "arc_challenge": _Dataset("allenai/ai2_arc", "ARC-Challenge", "test", "question", "id"),
    "gsm8k": _Dataset("openai/gsm8k", "main", "test", "question"),
    "hellaswag": _Dataset("Rowan/hellaswag", None, "test", "ctx", "ind"),
    "mmlu": _Dataset("cais/mmlu", "all", "test", "question"),
    # All that TruthfulQA has is a split called validation.
    "truthfulqa": _Dataset("truthfulqa/truthful_qa", "generation", "validation", "question"),
    "winogrande": _Dataset("allenai/winogrande", "winogrande_xl", "test", "sentence"),
}
_DATASETS = _LEADERBOARD | {
    "wikitext": _Dataset("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", wanted=_is_passage)
}


@checked
def load_prompts(source: AnyPath, n: Count | None = 200, seed: Seed = 0) -> list[Prompt]:
    r"""Prompts of a benchmark's test set, or of a JSONL file; `n` of them, drawn at random and kept in row order.

    The draw depends on `seed` and the rows alone, and a larger `n` draws the same prompts and more. Texts are the
    questions as the dataset has them, without options and answers: HellaSwag's contexts keep their `[header]` marks,
    WinoGrande's sentences their `_`. Prompts that are empty or stand twice are left out before the draw. An id is the
    name of the set and the dataset's own id or, where it has none, the row number in the split.

    Args:
        source: a path to a JSONL file (see `read_prompts`; its prompts and ids are taken as they are), or
            `"arc_challenge"`, `"gsm8k"`, `"hellaswag"`, `"mmlu"`, `"winogrande"` (test splits), `"truthfulqa"` (its
            only split, called validation), or `"wikitext"` (WikiText-2's test split: one line a prompt, without
            headings and lines of fewer than 20 words).
        n: how many; `None` takes all.
        seed: of the draw.

    Raises:
        ValueError: neither a known set nor a file; `n` below 1 or above what there is; the package `datasets` is
            not installed; a file that is not one of prompts.
        OSError: the hub cannot be reached and nothing is cached, or the dataset is not there as expected.

    Cost: none for a file. The first call for a set downloads all splits of that configuration into HuggingFace's
    cache (MMLU: some 50 MB); later ones need no network.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "prompts.jsonl")
        >>> _ = file.write_text('{"id": "a", "prompt": "1 + 1 ="}\n{"id": "b", "prompt": "Two plus two is"}\n')
        >>> [prompt.id for prompt in tlc.load_prompts(file, n=None)]
        ['a', 'b']
    """
    if isinstance(source, str) and source in _DATASETS:
        prompts = _hub_prompts(source)
    elif isinstance(source, str) and not Path(source).is_file():
        raise ValueError(f"{source!r} is no file and no prompt set: give a JSONL file or one of {', '.join(_DATASETS)}")
    else:
        prompts = read_prompts(source)
    if n is None:
        return prompts
    if n > len(prompts):
        raise ValueError(f"`n` must be at most {len(prompts)}, all the prompts of {source}, got {n}; or None for all")
    return _draw(prompts, n, seed)


@checked
def prompts_per_task(prompts: Sequence[Prompt], n: int, seed: Seed = 0) -> list[Prompt]:
    """`n` prompts of every task, drawn at random and kept in their order; a larger `n` draws the same and more.

    Raises:
        ValueError: `n` below 1, or a task with fewer prompts.

    Example:
        >>> prompts = [tlc.Prompt(f"{task}-{i}", "1 + 1 =", task) for task in ("sums", "riddles") for i in range(9)]
        >>> [prompt.task for prompt in tlc.prompts.prompts_per_task(prompts, n=2)]
        ['sums', 'sums', 'riddles', 'riddles']
    """
    prompts = list(prompts)
    tasks: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        tasks.setdefault(prompt.task, []).append(i)
    fewest = min((len(of_task) for of_task in tasks.values()), default=0)
    if not 1 <= n <= fewest:
        raise ValueError(f"`n` must lie in [1, {fewest}], the prompts of the smallest task, got {n}")
    return [prompts[i] for i in sorted(i for of_task in tasks.values() for i in _draw(of_task, n, seed))]


@checked
def open_llm_leaderboard_prompts(n: int = 1200, seed: Seed = 0) -> list[Prompt]:
    """The prompts of the paper's comparison of models: equally many of six Open LLM Leaderboard benchmarks.

    ARC (Challenge), GSM8K, HellaSwag, MMLU, TruthfulQA and WinoGrande, in this order, each as `load_prompts` draws it.

    Raises:
        ValueError, OSError: `n` is not a multiple of 6; or as `load_prompts`.

    Source: Section 4.2 and Appendix A.6 (1,200 prompts from the test sets). The paper says neither how many come from
    each benchmark nor which, so equal shares are our reading, and the prompts are not the very ones of the paper.
    """
    if n < 1 or n % len(_LEADERBOARD):
        raise ValueError(f"`n` must be a multiple of {len(_LEADERBOARD)}, as many from each benchmark, got {n}")
    return [prompt for name in _LEADERBOARD for prompt in load_prompts(name, n // len(_LEADERBOARD), seed)]


@checked
def read_prompts(path: AnyPath) -> list[Prompt]:
    """Prompts from a JSONL file: one object a line, `{"prompt": …}` and optionally `"id"` and `"task"`.

    The id defaults to the line number. Blank lines are skipped.

    Raises:
        ValueError: a line that is not such an object, an id that stands twice, a file without prompts; the message
            names the file and the line.
        OSError: the file cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    try:
        # Not splitlines: a text may hold Unicode's own line separators.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f'{where}: wanted {{"prompt": "…"}}, got text that is not JSON ({error.msg})') from None
        text = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f'{where}: wanted {{"prompt": "…"}} with a text that is not empty, got {line.strip()[:80]}'
            )
        if not isinstance(task := entry.get("task"), str | None):
            raise ValueError(f'{where}: wanted a "task" that is text, or none, got {task!r}')
        prompt = Prompt(str(entry.get("id", number)), text, task)
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} stands twice; ids must differ")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f'{path}: no prompts in it; wanted lines like {{"prompt": "…"}}')
    return list(prompts.values())


def _draw(items: Sequence[_Item], n: int, seed: int) -> list[_Item]:
    drawn = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[i] for i in sorted(drawn)]


def _hub_prompts(name: str) -> list[Prompt]:
    """All prompts of a known set, in row order, each text and each id once."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f'the prompt set {name!r} needs datasets: pip install "tl-coupling[survey]" ({error})'
        ) from None
    wanted = _DATASETS[name]
    try:
        rows = load_dataset(wanted.path, wanted.config, split=wanted.split)
        texts = list(rows[wanted.text])
        ids = list(rows[wanted.id]) if wanted.id else list(range(len(texts)))
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is documented.
    except Exception as error:
        if isinstance(error, ConnectionError):
            why = "the hub cannot be reached and nothing is cached; go online once, or give a JSONL file"
        else:
            why = "it is not there as expected, or the download broke; try again, or give a JSONL file"
        what = f"{wanted.path}, {wanted.config or 'default'}, split {wanted.split!r}, column {wanted.text!r}"
        said = " ".join(str(error).split())[:200]
        raise OSError(
            f"could not load {name!r} ({what}) from HuggingFace: {why} ({type(error).__name__}: {said})"
        ) from error
    by_text: dict[str, Prompt] = {}
    seen: set[str] = set()
    for own, text in zip(ids, texts, strict=True):
        text, key = (text or "").strip(), f"{name}-{own}"
        if wanted.wanted(text) and text not in by_text and key not in seen:
            by_text[text] = Prompt(key, text, name)
            seen.add(key)
    return list(by_text.values())
