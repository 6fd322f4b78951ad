"""Prompts, texts or images: benchmark questions from the HuggingFace hub, and JSONL files."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tl_coupling.border import AnyPath, Count, Seed, checked


@checked
@dataclass(frozen=True)
class Prompt:
    """A prompt with an id that is the same in every run, and the task it comes from, if any.

    It is a text, `prompt`, or for a vision model the file of an image, `image`, which must stay where it is.
    """

    id: str
    prompt: str = ""
    task: str | None = None
    image: AnyPath | None = None

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError(f"the id of a prompt is empty: wanted a name for {str(self.image or self.prompt)[:80]!r}")
        if self.image is None and not self.prompt:
            raise ValueError("the prompt is empty: wanted at least one token")
        if self.image is not None:
            if self.prompt:
                raise ValueError(f"prompt {self.id!r} is a text or an image, not both: leave one out")
            if not (path := Path(self.image).resolve()).is_file():
                raise ValueError(f"prompt {self.id!r}: there is no image file {os.fspath(self.image)!r}")
            object.__setattr__(self, "image", str(path))

    @property
    def text(self) -> str:
        """The text; of an image, the checksum of its file."""
        if self.image is None:
            return self.prompt
        return f"image sha256:{hashlib.sha256(Path(self.image).read_bytes()).hexdigest()}"


def _is_prose(text: str) -> bool:
    """Whether a line of WikiText is neither a heading (` = Title = `) nor a list entry or fragment."""
    return not (text.startswith("=") and text.endswith("=")) and len(text.split()) >= 20


# Where a prompt set is on the hub: a split, its columns of texts and of ids (else: row numbers), and which texts.
_DATASETS: dict[str, tuple[str, str | None, str, str, str | None, Callable[[str], bool]]] = {
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", "question", "id", bool),
    "gsm8k": ("openai/gsm8k", "main", "test", "question", None, bool),
    "hellaswag": ("Rowan/hellaswag", None, "test", "ctx", "ind", bool),
    "mmlu": ("cais/mmlu", "all", "test", "question", None, bool),
    # TruthfulQA has no other split.
    "truthfulqa": ("truthfulqa/truthful_qa", "generation", "validation", "question", None, bool),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "test", "sentence", None, bool),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", None, _is_prose),
}
_LEADERBOARD = "open_llm_leaderboard"
_BENCHMARKS = [name for name in _DATASETS if name != "wikitext"]


@checked
def load_prompts(source: AnyPath, n: Count | None = None, seed: Seed = 0) -> list[Prompt]:
    r"""Prompts of a JSONL file or of a benchmark's test set; `n` of them, drawn at random and kept in row order.

    A JSONL file has one object per line: `{"prompt": …}`, or `{"image": …}` with a path from the file's folder, and
    optionally `"id"` (else the line number) and `"task"`.
    Blank lines are skipped. Of a set, texts are the questions as the dataset has them, without options and answers:
    HellaSwag's contexts keep their `[header]` marks, WinoGrande's sentences their `_`. Empty and repeated texts are
    left out. Ids are the set's name with the dataset's own id or, if it has none, the row number.

    Args:
        source: a path to a JSONL file, or `"arc_challenge"`, `"gsm8k"`, `"hellaswag"`, `"mmlu"`, `"truthfulqa"`,
            `"winogrande"` (test splits; TruthfulQA's only split is called validation), `"wikitext"` (WikiText-2's test
            split: each line of at least 20 words that is not a heading), or `"open_llm_leaderboard"`: equally many of
            the first six, for the paper's comparison of models.
        n: how many; all by default. A larger `n` draws the same prompts and more.
        seed: of the draw, which depends on nothing else but the rows.

    Raises:
        ValueError: neither a known set nor a file; `n` below 1, above what there is, or not a multiple of 6 for the
            leaderboard; no package `datasets`; a line that is not a prompt, an id that is used twice, an empty file.
        OSError: the file cannot be read, or the hub cannot be reached and nothing is cached, or the dataset changed.

    Cost: the first call for a set downloads all splits of that configuration into HuggingFace's cache (MMLU: 50 MB).

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
        if n and n % len(_BENCHMARKS):
            raise ValueError(f"`n` must be a multiple of {len(_BENCHMARKS)}, as many from each benchmark, got {n}")
        return [prompt for name in _BENCHMARKS for prompt in load_prompts(name, n and n // len(_BENCHMARKS), seed)]
    if isinstance(source, str) and source in _DATASETS:
        prompts = _from_hub(source)
    elif isinstance(source, str) and not Path(source).is_file():
        known = ", ".join([*_DATASETS, _LEADERBOARD])
        raise ValueError(f"{source!r} is neither a file nor a prompt set: give a JSONL file or one of {known}")
    else:
        prompts = _from_file(Path(source))
    if n is not None and n > len(prompts):
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
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    indices = [[i for i, prompt in enumerate(prompts) if prompt.task == task] for task in tasks]
    fewest = min(map(len, indices), default=0)
    if not 1 <= n <= fewest:
        raise ValueError(f"`n` must lie in [1, {fewest}], the prompts of the smallest task, got {n}")
    return [prompts[i] for i in sorted(i for of_task in indices for i in _draw(of_task, n, seed))]


def _draw(items: Sequence[Any], n: int | None, seed: int) -> list[Any]:
    drawn = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[i] for i in sorted(drawn)]


def _from_file(path: Path) -> list[Prompt]:
    try:
        # Not splitlines: a text may hold Unicode's own line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
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
            raise ValueError(f"{wanted}, got text that is not JSON ({reason})") from None
        given = entry if isinstance(entry, dict) else {}
        text, image = given.get("prompt"), given.get("image")
        if not any(isinstance(one, str) and one.strip() for one in (text, image)):
            raise ValueError(f"{wanted} with a text that is not empty, got {line.strip()[:80]}")
        if not isinstance(task := given.get("task"), str | None):
            raise ValueError(f'{where}: "task" must be a string or null, got {task!r}')
        try:
            prompt = Prompt(str(given.get("id", number)), text or "", task, image and path.parent / image)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
        if prompts.setdefault(prompt.id, prompt) is not prompt:
            raise ValueError(f"{where}: the id {prompt.id!r} is used twice; ids must differ")
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
        texts = [(text or "").strip() for text in rows[column]]
        keys = [f"{name}-{own}" for own in (rows[id_column] if id_column else range(len(texts)))]
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is documented.
    except Exception as error:
        why = "it is not there as expected, or the download broke; try again, or give a JSONL file"
        if isinstance(error, ConnectionError):
            why = "the hub cannot be reached and nothing is cached; go online once, or give a JSONL file"
        what = f"{path}, {config or 'default'}, split {split!r}, column {column!r}"
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise OSError(f"could not load {name!r} ({what}) from HuggingFace: {why} ({said})") from error
    prompts: dict[str, Prompt] = {}
    seen: set[str] = set()
    for key, text in zip(keys, texts, strict=True):
        if wanted(text) and text not in seen and key not in prompts:
            seen.add(text)
            prompts[key] = Prompt(key, text, name)
    return list(prompts.values())
