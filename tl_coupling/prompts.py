"""Prompts, texts, token ids or images: benchmark questions from the HuggingFace hub,
and JSONL files.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tl_coupling.arguments import (
    AnyPath,
    Count,
    Finite,
    Seed,
    Text,
    checked,
    ids_of_one_prompt,
    made_by,
)
from tl_coupling.results import DifferentPrompts

__all__ = ["Prompt", "load_prompts", "prompts_per_task"]
__dir__ = __all__.copy

_Item = TypeVar("_Item")
# Under which a row of a file has its text, unless another key is asked for.
_KEY = "prompt"
# WikiText's shorter lines are list entries and fragments.
_FEWEST_WORDS = 20


@made_by("Prompt(text)")
@checked
@dataclass(frozen=True)
class Prompt:
    """A prompt with an id that is the same in every run; the task it comes from, and
    how difficult it is, if known.

    It is a text, `prompt`; or token ids of one text, `tokens`, which are taken as they
    are; or for a vision model the file of an image, `image`, which must stay where it
    is. The id is by default the text, or the name of the file. ValueError for an empty
    text, none or two of the three, token ids of several texts, an image that is not
    there, and lone surrogates.

    Example:
        >>> prompt = tlc.Prompt("The capital of France is", task="capitals")
        >>> prompt.text, prompt.id
        ('The capital of France is', 'The capital of France is')
        >>> tlc.Prompt("The capital of France is", "france").id
        'france'
        >>> tlc.Prompt(tokens=[3, 14, 15], id="three").text
        'token ids 3 14 15'
    """

    prompt: Text = ""
    id: Text = ""
    task: Text | None = None
    image: AnyPath | None = None
    difficulty: Finite | None = None
    tokens: Int[Tensor, "*batch n_pos"] | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            ids = ids_of_one_prompt(self.tokens, "tokens")
            # A tuple: prompts are compared with each other, and must not change.
            object.__setattr__(self, "tokens", tuple(ids.tolist()))
        if not self.id:
            own_id = self.text if self.image is None else Path(self.image).name
            object.__setattr__(self, "id", own_id)
        if self.image is None and self.tokens is None and not self.prompt:
            raise ValueError("the prompt is empty: wanted at least one token")
        kinds = {
            "a text": self.prompt,
            "token ids": self.tokens is not None,
            "an image": self.image is not None,
        }
        given = [kind for kind, is_given in kinds.items() if is_given]
        if len(given) > 1:
            meant = (
                f" (was {self.prompt[:80]!r} meant as `id=`?)" if self.prompt else ""
            )
            raise ValueError(
                f"prompt {self.id!r} is {' or '.join(given)}, not both: leave one out"
                f"{meant}"
            )
        if self.image is None:
            return
        path = Path(self.image).resolve()
        if not path.is_file():
            raise ValueError(
                f"prompt {self.id!r}: there is no image file {os.fspath(self.image)!r}"
            )
        # Resolved: workers may have another working directory.
        object.__setattr__(self, "image", str(path))

    @property
    def text(self) -> str:
        """The text; of token ids, these in words; of an image, the checksum of its
        file.
        """
        if self.tokens is not None:
            return f"token ids {' '.join(map(str, self.tokens))}"
        if self.image is None:
            return self.prompt
        content = Path(self.image).read_bytes()
        return f"image sha256:{hashlib.sha256(content).hexdigest()}"

    @property
    def content(self) -> str | Path | list[int]:
        """What a model reads, as `trace` takes it: a text, token ids or a file."""
        if self.tokens is not None:
            return list(map(int, self.tokens))
        return self.prompt if self.image is None else Path(self.image)


_OnePrompt = str | Prompt | Int[Tensor, "..."] | Sequence[int]
Prompts = Annotated[
    _OnePrompt | Sequence[_OnePrompt],
    "`tl_coupling.Prompt(text)` makes one, and a text or token ids (`input_ids` of what "
    "a tokenizer returns) are one",
]


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """Return prompts with ids; bare texts and token ids are numbered.

    Whole numbers are the tokens of one prompt. The rows of a tensor, `[n_prompts
    n_pos]`, are prompts.

    Raises ValueError where there are none, or an id or a prompt twice.
    """
    named_prompts = [
        _named(prompt, str(number)) for number, prompt in enumerate(_separate(prompts))
    ]
    if not named_prompts:
        raise ValueError("`prompts` is empty: wanted at least one")
    if len({prompt.id for prompt in named_prompts}) < len(named_prompts):
        raise ValueError("the ids of `prompts` must differ")
    different = DifferentPrompts("prompts")
    for prompt in named_prompts:
        # The text of an image is a checksum: two files may hold the same image.
        different.add({"prompt": prompt.text}, prompt.id)
    return named_prompts


def _separate(prompts: Prompts) -> list[Any]:
    """Return each prompt of what may be one prompt, or several."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    if isinstance(prompts, Tensor):
        return list(prompts) if prompts.ndim > 1 else [prompts]
    is_token = [isinstance(prompt, Integral) for prompt in prompts]
    return [prompts] if any(is_token) else list(prompts)


def _named(prompt: Any, number: str) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, number)
    return Prompt(id=number, tokens=prompt)


@contextmanager
def naming_prompt(prompt: Prompt) -> Iterator[None]:
    """Name the prompt in every ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id!r}: {error}") from error


def _is_prose(text: str) -> bool:
    """Say whether a line of WikiText is neither a heading (` = Title = `) nor a list
    entry or fragment.
    """
    is_heading = text.startswith("=") and text.endswith("=")
    return not is_heading and len(text.split()) >= _FEWEST_WORDS


class _HubSet(NamedTuple):
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


def _easy2hard(name: str, column: str) -> _HubSet:
    return _HubSet(
        "furonghuang-lab/Easy2Hard-Bench",
        f"E2H-{name}",
        "eval",
        column,
        difficulty="rating",
    )


_LEADERBOARD = {
    "arc_challenge": _HubSet(
        "allenai/ai2_arc", "ARC-Challenge", "test", "question", "id"
    ),
    "gsm8k": _HubSet("openai/gsm8k", "main", "test", "question"),
    "hellaswag": _HubSet("Rowan/hellaswag", None, "test", "ctx", "ind"),
    "mmlu": _HubSet("cais/mmlu", "all", "test", "question"),
    # TruthfulQA has no other split.
    "truthfulqa": _HubSet(
        "truthfulqa/truthful_qa", "generation", "validation", "question"
    ),
    "winogrande": _HubSet("allenai/winogrande", "winogrande_xl", "test", "sentence"),
}
# The other two are games of chess and programming problems, which are no prompts in one
# column.
_EASY2HARD = {
    "easy2hard_amc": _easy2hard("AMC", "problem"),
    "easy2hard_arc": _easy2hard("ARC", "question"),
    "easy2hard_gsm8k": _easy2hard("GSM8K", "question"),
    "easy2hard_winogrande": _easy2hard("Winogrande", "sentence"),
}
_WIKITEXT = _HubSet(
    "Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", is_prompt=_is_prose
)
_DATASETS = _LEADERBOARD | {"wikitext": _WIKITEXT} | _EASY2HARD
_GROUPS = {"open_llm_leaderboard": list(_LEADERBOARD), "easy2hard": list(_EASY2HARD)}


@checked
def load_prompts(
    source: AnyPath,
    n: Count | None = None,
    seed: Seed = 0,
    *,
    key: Text = _KEY,
    skip_empty: bool = False,
) -> list[Prompt]:
    r"""Load prompts of a JSONL file or of a benchmark's test set; `n` of them, drawn at
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
        key: under which the texts of a file stand.
        skip_empty: leave out the rows of a file whose text is empty or null, instead of
            an error that names them. The others keep their line numbers as ids.

    Raises:
        ValueError: neither a known set nor a file; a set and a `key`; `n` below 1,
            above what there is, or not a multiple of 6 for the leaderboard, of 4 for
            `"easy2hard"`; no package `datasets`; a line that is not
            a prompt or lacks the key, empty texts, an id that is used twice, an empty
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
        >>> first = '{"id": "a", "prompt": "1 + 1 ="}'
        >>> second = '{"id": "b", "prompt": "Two plus two is"}'
        >>> _ = Path("two.jsonl").write_text(f"{first}\n{second}")
        >>> [prompt.id for prompt in tlc.load_prompts("two.jsonl")]
        ['a', 'b']
    """
    is_set = isinstance(source, str) and source in {*_DATASETS, *_GROUPS}
    if is_set and key != _KEY:
        raise ValueError(
            f"`key` is for files, and {source!r} is a prompt set, got {key!r}: leave it "
            "out"
        )
    if isinstance(source, str) and source in _GROUPS:
        return _equally_many(_GROUPS[source], n, seed)
    if isinstance(source, str) and source in _DATASETS:
        prompts = _read_hub_set(source, _DATASETS[source])
    elif isinstance(source, str) and not Path(source).is_file():
        known_sets = ", ".join([*_DATASETS, *_GROUPS])
        raise ValueError(
            f"{source!r} is neither a file nor a prompt set: give a JSONL file or one "
            f"of {known_sets}"
        )
    else:
        prompts = _read_file(Path(source), key, skip_empty)
    if n is not None and n > len(prompts):
        raise ValueError(
            f"`n` must be at most {len(prompts)}, all the prompts of {source}, got {n}; "
            "or None for all"
        )
    return _drawn(prompts, n, seed)


def _equally_many(names: Sequence[str], n: int | None, seed: int) -> list[Prompt]:
    """Return `n` prompts of several sets together, or all of them."""
    if n and n % len(names):
        raise ValueError(
            f"`n` must be a multiple of {len(names)}, as many from each benchmark, got "
            f"{n}"
        )
    n_of_set = None if n is None else n // len(names)
    prompts: list[Prompt] = []
    for name in names:
        prompts += load_prompts(name, n_of_set, seed)
    return prompts


@checked
def prompts_per_task(prompts: Sequence[Prompt], n: int, seed: Seed = 0) -> list[Prompt]:
    """Draw `n` prompts of every task at random, and keep them in their order.

    A larger `n` draws the same prompts and more.

    Raises:
        ValueError: `n` below 1, or a task with fewer prompts.

    Example:
        >>> tasks = ["sums", "riddles"]
        >>> prompts = [
        ...     tlc.Prompt("1 + 1 =", f"{task}-{i}", task)
        ...     for task in tasks
        ...     for i in range(9)
        ... ]
        >>> [prompt.task for prompt in tlc.prompts.prompts_per_task(prompts, n=2)]
        ['sums', 'sums', 'riddles', 'riddles']
    """
    indices_of_task: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        indices_of_task.setdefault(prompt.task, []).append(i)
    fewest = min(map(len, indices_of_task.values()), default=0)
    if not 1 <= n <= fewest:
        raise ValueError(
            f"`n` must lie in [1, {fewest}], the prompts of the smallest task, got {n}"
        )
    drawn: list[int] = []
    for indices in indices_of_task.values():
        drawn += _drawn(indices, n, seed)
    return [prompts[i] for i in sorted(drawn)]


def _drawn(items: Sequence[_Item], n: int | None, seed: int) -> list[_Item]:
    """Return `n` items drawn at random, in their order; all of them for None."""
    # The beginning of one permutation: a larger n draws the same items and more.
    indices = np.random.default_rng(seed).permutation(len(items))[:n]
    return [items[i] for i in sorted(indices)]


def _read_file(path: Path, key: str, skip_empty: bool) -> list[Prompt]:
    """Return the prompts of a JSONL file; an error names the line, or all lines whose
    texts are empty.
    """
    try:
        # Not splitlines: a text may hold Unicode's own line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    prompts: dict[str, Prompt] = {}
    empty_lines: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _prompt_in(line, path, number, key)
        if prompt is None:
            empty_lines.append(str(number))
            continue
        if prompt.id in prompts:
            raise ValueError(
                f"{path}, line {number}: the id {prompt.id!r} is used twice; ids must "
                "differ"
            )
        prompts[prompt.id] = prompt
    if empty_lines and not skip_empty:
        noun = "line" if len(empty_lines) == 1 else "lines"
        raise ValueError(
            f"{path}, {noun} {', '.join(empty_lines)}: wanted texts under {key!r} that "
            "are not empty; remove these lines, or leave them out with skip_empty=True"
        )
    if not prompts:
        raise ValueError(f'{path} has no prompts; wanted lines like {{"{key}": "…"}}')
    return list(prompts.values())


def _prompt_in(line: str, path: Path, number: int, key: str) -> Prompt | None:
    """Return the prompt in a line of a JSONL file, `None` where its text is empty.

    Its id is by default the line's number.
    """
    location = f"{path}, line {number}"
    expected = f'{location}: wanted {{"{key}": "…"}}'
    try:
        entry = json.loads(line)
    # The parser recurses into brackets, thousands of which are no JSON either.
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise ValueError(f"{expected}, got text that is not JSON ({reason})") from None
    fields = entry if isinstance(entry, dict) else {}
    text = fields.get(key)
    image = fields.get("image")
    if not _is_filled(text) and not _is_filled(image):
        if fields and key not in fields:
            names = ", ".join(map(repr, fields))
            raise ValueError(
                f"{expected}, got a row with the keys {names}; if the text stands under "
                "one of them, name it with `key`"
            )
        if not isinstance(text, str | None) or not fields:
            raise ValueError(f"{expected} with a text, got {line.strip()[:80]}")
        return None
    task = fields.get("task")
    if not isinstance(task, str | None):
        raise ValueError(f'{location}: "task" must be a string or null, got {task!r}')
    try:
        return Prompt(
            text or "",
            id=str(fields.get("id", number)),
            task=task,
            # Paths in a file are meant from where the file is.
            image=image and path.parent / image,
            difficulty=fields.get("difficulty"),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{location}: {error}") from None


def _is_filled(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


class _Columns(NamedTuple):
    """The texts of a prompt set, their ids and their difficulty."""

    texts: list[str]
    ids: list[str]
    difficulties: list[float | None]


def _read_hub_set(name: str, source: _HubSet) -> list[Prompt]:
    """Return all prompts of a known set, in row order, each text and each id once."""
    columns = _downloaded(name, source)
    prompts: dict[str, Prompt] = {}
    seen: set[str] = set()
    for text, prompt_id, difficulty in zip(*columns, strict=True):
        if not source.is_prompt(text) or text in seen or prompt_id in prompts:
            continue
        # Benchmarks repeat questions; means would count them twice.
        seen.add(text)
        prompts[prompt_id] = Prompt(text, prompt_id, name, difficulty=difficulty)
    return list(prompts.values())


def _downloaded(name: str, source: _HubSet) -> _Columns:
    """Return the columns of a prompt set, from the hub or HuggingFace's cache."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"the prompt set {name!r} needs the package datasets: pip install "
            f'"tl-coupling[survey]" ({error})'
        ) from None
    try:
        rows = load_dataset(source.path, source.config, split=source.split)
        # Empty ones are dropped later, so that row numbers stay those of the dataset.
        texts = [(text or "").strip() for text in rows[source.column]]
        own_ids: Sequence[Any] = range(len(texts))
        if source.id_column:
            own_ids = rows[source.id_column]
        ids = [f"{name}-{own_id}" for own_id in own_ids]
        difficulties: list[float | None] = [None] * len(texts)
        if source.difficulty:
            difficulties = list(rows[source.difficulty])
        return _Columns(texts, ids, difficulties)
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is
    # documented.
    except Exception as error:
        raise OSError(_why_not_downloaded(name, source, error)) from error


def _why_not_downloaded(name: str, source: _HubSet, error: Exception) -> str:
    advice = (
        "it is not there as expected, or the download broke; try again, or give a JSONL "
        "file"
    )
    if isinstance(error, ConnectionError):
        advice = (
            "the hub cannot be reached and nothing is cached; go online once, or give a "
            "JSONL file"
        )
    message = " ".join(str(error).split())[:200]
    return (
        f"could not load {name!r} ({source.path}, {source.config or 'default'}, split "
        f"{source.split!r}, column {source.column!r}) from HuggingFace: {advice} "
        f"({type(error).__name__}: {message})"
    )
