"""Sets of prompts."""

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One prompt with an id that stays the same from run to run, and the task it comes from, if any."""

    id: str
    prompt: str
    task: str | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Prompts from a JSONL file: one object a line, `{"prompt": …}` and optionally `"id"` and `"task"`.

    The id defaults to the line number. Blank lines are skipped.

    Raises:
        ValueError: a line that is not such an object, an id that stands twice, a file without prompts; the message
            names the file and the line.
        OSError: the file cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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
        prompt = Prompt(str(entry.get("id", number)), text, entry.get("task"))
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id!r} stands twice; ids must differ")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f'{path}: no prompts in it; wanted lines like {{"prompt": "…"}}')
    return list(prompts.values())
