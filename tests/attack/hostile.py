"""Input that nobody means well: files and options of commands that must be refused in
one line, or taken.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from attack.child import DONE, REFUSED, Child
from attack.interrupts import command
from attack.subject import Subject

_TEXTS = [
    "",
    " ",
    "\0",
    "\udcff",
    "w1 " * 3000,
    "𝕨1",
    "\u2028",
    "-",
    "--k",
    "1e999",
    "NaN",
    "../..",
    "/dev/null",
    "w1\nw2",
]
_RECORDS = [
    *(
        '{"prompt": 7}',
        '{"prompt": ""}',
        '{"prompt": "w1", "id": null}',
        '{"prompt": "w1", "task": 3}',
        "[]",
        "7",
        "{",
    ),
    *(
        '{"prompt": {"a": 1}}',
        '{"prompt": "w1", "id": {"a": []}}',
        "\x00",
        "[" * 100_000,
        '{"prompt": "\\ud800 w1"}',
    ),
    *(
        '{"prompt": "w1", "id": "x"}\n{"prompt": "w2", "id": "x"}',
        '{"prompt": "w1"}',
        '{"a":' * 50_000,
    ),
]
_TABLES = [
    *(
        "",
        "model\n",
        "model,score\n",
        "model,score,score\na,1,2\nb,2,3\n",
        "model,score\na,x\nb,1\nc,2\n",
    ),
    *(
        "model,score\na,1\na,2\n",
        "model,score\na,1,2,3\n",
        "\x00",
        "score\n1\n",
        "model,score\na,1e999\nb,2\nc,3\n",
    ),
    *(
        'model,score\n"a,1\nb,2\n',
        "model;score\na;1\n",
        "model,score\na,1\nb,2\nc,3\n",
        "\ufeffmodel,score\na,1\n",
    ),
]
_EXPRESSIONS = [
    "9**9**9**9",
    "__import__('os')",
    "x" * 5000,
    "(" * 500,
    "score/0",
    "log(-1)",
    "a.b",
    "",
    "1",
    "score",
]


def hostile_inputs(subject: Subject, rng: random.Random, n: int) -> Iterator[list[str]]:
    """Commands with a hostile option or file, one at a time."""
    folder = subject.new_folder()
    folder.mkdir()
    for i in range(n):
        arguments = _arguments(subject, rng, folder, i)
        shown = " ".join(
            argument if len(argument) < 40 else f"{argument[:40]}…"
            for argument in map(ascii, arguments)
        )
        yield Child(lambda arguments=arguments: command(arguments)).faults(
            shown, (DONE, 1, REFUSED)
        )


def _arguments(subject: Subject, rng: random.Random, folder: Path, i: int) -> list[str]:
    model, out = str(subject.root / "a"), str(folder / f"out-{i}")
    file = folder / f"file-{i}"

    def written(content: str) -> str:
        file.write_bytes(content.encode(errors="surrogatepass"))
        return str(file)

    options = {"--model": model, "--prompt": "w3 w14", "--k": "2", "--out": out}
    numbers = ["0", "-1", "1.5", "nan", "99999999999999999999", "", "two"]
    kind = rng.choice(
        [
            "text",
            "number",
            "records",
            "table",
            "expression",
            "device",
            "out",
            "slurm",
            "json",
        ]
    )
    if kind == "text":
        command, options["--prompt"] = (
            rng.choice(["depth", "trajectory", "report"]),
            rng.choice(_TEXTS),
        )
    elif kind == "number":
        command = rng.choice(["depth", "trajectory"])
        options[rng.choice(["--k", "--position", "--window"])] = rng.choice(numbers)
    elif kind in ("table", "expression"):
        table = (
            rng.choice(_TABLES) if kind == "table" else "model,score\na,1\nb,2\nc,3\n"
        )
        options = {
            "--survey": str(subject.calm),
            "--scores": written(table),
            "--out": out,
        }
        options |= (
            {"--control": rng.choice(_EXPRESSIONS)} if kind == "expression" else {}
        )
        command = "generalization"
    elif kind == "device":
        command, options["--device"] = (
            rng.choice(["depth", "report"]),
            rng.choice(["toaster", "cuda:99", "meta", "", "cpu:7"]),
        )
    elif kind == "out":
        command, options["--out"] = (
            "depth",
            rng.choice([written("a file"), "/proc/nowhere", "/dev/null/x", "\0"]),
        )
    else:
        del options["--prompt"]
        command, options["--prompts"] = (
            "survey",
            written(rng.choice(_RECORDS) if kind == "records" else '{"prompt": "w1"}'),
        )
        if kind == "slurm":
            options["--slurm"] = rng.choice(
                [
                    "partition=x,partition=y",
                    "=",
                    "partition",
                    "no=such",
                    ",",
                    "mem_gb=lots",
                ]
            )
        if kind == "json":
            options["--checkpoint"] = rng.choice(_TEXTS)
    return [command, *(part for pair in options.items() for part in pair)]
