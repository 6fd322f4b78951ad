"""Prompts: benchmark questions from the HuggingFace hub, and JSONL files."""

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
    """A prompt with an id that is the same in every run, and the task it comes from, if any."""

    id: str
    prompt: str
    task: str | None = None

    def __post_init__(self) -> None:
        """Raise on a prompt that cannot be named or measured."""
        if not self.id:
            raise ValueError(f"the id of a prompt is empty: wanted a name for {self.prompt[:80]!r}")
        if not self.prompt:
            raise ValueError("the prompt is empty: wanted at least one token")


class _Dataset(NamedTuple):
    """Where a prompt set is on the hub: a split, its columns of texts and of ids (else: row numbers)."""

    path: str
    config: str | None
    split: str
    text: str
    id: str | None = None
    wanted: Callable[[str], bool] = bool


def _is_prose(text: str) -> bool:
    """Whether a line of WikiText is neither a heading (` = Title = `) nor a list entry or fragment."""
    return not (text.startswith("=") and text.endswith("=")) and len(text.split()) >= 20


_DATASETS = {
    "arc_challenge": _Dataset("allenai/ai2_arc", "ARC-Challenge", "test", "question", "id"),
    "gsm8k": _Dataset("openai/gsm8k", "main", "test", "question"),
    "hellaswag": _Dataset("Rowan/hellaswag", None, "test", "ctx", "ind"),
    "mmlu": _Dataset("cais/mmlu", "all", "test", "question"),
    # TruthfulQA has no other split.
    "truthfulqa": _Dataset("truthfulqa/truthful_qa", "generation", "validation", "question"),
    "winogrande": _Dataset("allenai/winogrande", "winogrande_xl", "test", "sentence"),
    "wikitext": _Dataset("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", wanted=_is_prose),
}
_LEADERBOARD = "open_llm_leaderboard"
_BENCHMARKS = [name for name in _DATASETS if name != "wikitext"]


@checked
def load_prompts(source: AnyPath, n: Count | None = None, seed: Seed = 0) -> list[Prompt]:
    r"""Prompts of a JSONL file or of a benchmark's test set; `n` of them, drawn at random and kept in row order.

    A JSONL file has one object per line: `{"prompt": …}` and optionally `"id"` (else the line number) and `"task"`.
    Blank lines are skipped. Of a set, texts are the questions as the dataset has them, without options and answers:
    HellaSwag's contexts keep their `[header]` marks, WinoGrande's sentences their `_`. Empty and repeated texts are
    left out. Ids are the set's name with the dataset's own id or, if it has none, the row number.

    The draw depends on `seed` and the rows alone, and a larger `n` draws the same prompts and more.

    Args:
        source: a path to a JSONL file, or `"arc_challenge"`, `"gsm8k"`, `"hellaswag"`, `"mmlu"`, `"truthfulqa"`,
            `"winogrande"` (test splits; TruthfulQA's only split is called validation), `"wikitext"` (WikiText-2's test
            split: each line of at least 20 words that is not a heading), or `"open_llm_leaderboard"`: equally many of
            the first six, for the paper's comparison of models.
        n: how many; all by default.
        seed: of the draw.

    Raises:
        ValueError: neither a known set nor a file; `n` below 1, above what there is, or not a multiple of 6 for the
            leaderboard; the package `datasets` is not installed; a line that is not a prompt, an id that is used twice
            or a file without prompts, named with file and line.
        OSError: the file cannot be read, or the hub cannot be reached and nothing is cached, or the dataset changed.

    Cost: none for a file. The first call for a set downloads all splits of that configuration into HuggingFace's
    cache (MMLU: some 50 MB); later calls need no network.

    Source: 1,200 leaderboard prompts, Section 4.2 and Appendix A.6. The paper does not say how many come from each
    benchmark nor which; equal shares are our reading.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "prompts.jsonl")
        >>> _ = file.write_text('{"id": "a", "prompt": "1 + 1 ="}\n{"id": "b", "prompt": "Two plus two is"}\n')
        >>> [prompt.id for prompt in tlc.load_prompts(file)]
        ['a', 'b']
    """
    if source == _LEADERBOARD:
        n_each, rest = (None, 0) if n is None else divmod(n, len(_BENCHMARKS))
        if rest:
            raise ValueError(f"`n` must be a multiple of {len(_BENCHMARKS)}, as many from each benchmark, got {n}")
        return [prompt for name in _BENCHMARKS for prompt in load_prompts(name, n_each, seed)]
    if isinstance(source, str) and source in _DATASETS:
        prompts = _from_hub(source)
    elif isinstance(source, str) and not Path(source).is_file():
        known = ", ".join([*_DATASETS, _LEADERBOARD])
        raise ValueError(f"{source!r} is neither a file nor a prompt set: give a JSONL file or one of {known}")
    else:
        prompts = _from_file(Path(source))
    if n is not None and n > len(prompts):
        raise ValueError(f"`n` must be at most {len(prompts)}, all the prompts of {source}, got {n}; or None for all")
    return prompts if n is None else _draw(prompts, n, seed)


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
    tasks: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        tasks.setdefault(prompt.task, []).append(i)
    fewest = min(map(len, tasks.values()), default=0)
    if not 1 <= n <= fewest:
        raise ValueError(f"`n` must lie in [1, {fewest}], the prompts of the smallest task, got {n}")
    return [prompts[i] for i in sorted(i for of_task in tasks.values() for i in _draw(of_task, n, seed))]


def _draw(items: Sequence[_Item], n: int, seed: int) -> list[_Item]:
    drawn = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[i] for i in sorted(drawn)]


def _from_file(path: Path) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    try:
        # Not splitlines: a text may hold Unicode's own line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        wanted = f'{where}: wanted {{"prompt": "…"}}'
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{wanted}, got text that is not JSON ({error.msg})") from None
        text = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{wanted} with a text that is not empty, got {line.strip()[:80]}")
        if not isinstance(task := entry.get("task"), str | None):
            raise ValueError(f'{where}: "task" must be a string or null, got {task!r}')
        prompt = Prompt(str(entry.get("id", number)), text, task)
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} is used twice; ids must differ")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f'{path} has no prompts; wanted lines like {{"prompt": "…"}}')
    return list(prompts.values())


def _from_hub(name: str) -> list[Prompt]:
    """All prompts of a known set, in row order, each text and each id once."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        install = 'pip install "tl-coupling[survey]"'
        raise ValueError(f"the prompt set {name!r} needs the package datasets: {install} ({error})") from None
    path, config, split, column, id_column, wanted = _DATASETS[name]
    try:
        rows = load_dataset(path, config, split=split)
        texts = list(rows[column])
        ids = list(rows[id_column]) if id_column else range(len(texts))
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is documented.
    except Exception as error:
        why = "it is not there as expected, or the download broke; try again, or give a JSONL file"
        if isinstance(error, ConnectionError):
            why = "the hub cannot be reached and nothing is cached; go online once, or give a JSONL file"
        what = f"{path}, {config or 'default'}, split {split!r}, column {column!r}"
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise OSError(f"could not load {name!r} ({what}) from HuggingFace: {why} ({said})") from error
    by_text: dict[str, Prompt] = {}
    seen: set[str] = set()
    for own, text in zip(ids, texts, strict=True):
        text, key = (text or "").strip(), f"{name}-{own}"
        if wanted(text) and text not in by_text and key not in seen:
            by_text[text] = Prompt(key, text, name)
            seen.add(key)
    return list(by_text.values())
