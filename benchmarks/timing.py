"""What benchmarks have in common: the tokens they measure, seconds, memory, and where
it all ran.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from rich.console import Console

from tl_coupling.models import EMBEDDED_MODEL, embedded_folder
from tl_coupling.studies.surveys import PAPER_PROMPT

TEXT = (
    "The harbour was quiet when the first boats came back. Gulls "
    "followed them in, loud and hungry, and the men on "
    "deck threw what they could not sell over the side. By eight "
    "the tide had turned. An old woman sat on the wall "
    "with a basket of bread, as she had done every morning for "
    "thirty years, and sold a loaf to anyone who asked. She "
    "knew the names of all the crews, and of the ships, and of "
    "most of the storms that had taken the others. When the "
    "wind came round to the north she would look at the sky, "
    "close her basket, and go home without a word; and those "
    "who had watched her long enough tied their boats up twice "
    "and stayed ashore that night. Nobody had ever asked "
    "her how she could tell. It was said in the village that her "
    "father had taught her, and that his mother had "
    "taught him, but the harbour master thought that she simply "
    "listened better than the rest of them did."
)

# Only prompts of many tokens reach it.
LONG_TEXT = (
    f"{TEXT} One winter the sea took the end of the wall, with "
    f"the bench and the lamp that stood on it, and for some "
    "weeks she was not seen. The boats went out as before and "
    "came back as before, a little later each day. When she "
    "returned she had moved her basket to the steps of the "
    "chapel, where the wind could not reach it, and asked more "
    "for a loaf than she used to. Nobody complained. The "
    "youngest of the captains, who believed in instruments, bought "
    "two and asked her what the week would bring; she looked at "
    "his shoes, then at the flag above the pilots' house, "
    "and told him that it would bring him home if he let it."
)


class BenchmarkError(ValueError):
    """Something was asked for that cannot be measured; the message says what to do."""


def source_of(name: str) -> str:
    """Where HuggingFace finds a model that tl_coupling knows by this name."""
    return str(embedded_folder()) if name == EMBEDDED_MODEL else name


def token_ids(name: str, n_tokens: int) -> list[int]:
    """Return the paper's prompt where it has this many tokens, else the beginning of a
    fixed text.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_of(name))
    paper = tokenizer(PAPER_PROMPT)["input_ids"]
    if len(paper) == n_tokens:
        return paper
    text = tokenizer(LONG_TEXT)["input_ids"]
    if n_tokens > len(text):
        raise BenchmarkError(
            f"--tokens must lie in [1, {len(text)}] (the text that is "
            f"used is no longer), got {n_tokens}"
        )
    return text[:n_tokens]


def timed(device: torch.device, function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what the function returns, and how many seconds it took on the device."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    start = now()
    result = function()
    return result, now() - start


class Memory:
    """Memory of this process, in MiB: after loading (at creation), after the warm-up,
    and at its peak since then.

    The weights are mapped from their file and count as resident only once they have
    been read: it is `after_warm_up` that a peak compares with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib: dict[str, float | bool] = {
            "after_loading": resident(),
            **self._on_gpu("after_loading"),
        }

    def start(self) -> None:
        """From here on the peak is taken."""
        self.mib["after_warm_up"] = resident()
        # Linux can forget the peak so far; elsewhere it includes loading.
        self.mib["peak_includes_loading"] = True
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.mib["peak_includes_loading"] = False
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> dict[str, float | bool]:
        """All that was recorded."""
        peak = resident(peak=True)
        return (
            self.mib
            | {"peak": peak, "above_warm_up": peak - self.mib["after_warm_up"]}
            | self._on_gpu("peak")
        )

    def _on_gpu(self, moment: str) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        read = (
            torch.cuda.max_memory_allocated
            if moment == "peak"
            else torch.cuda.memory_allocated
        )
        return {f"gpu_{moment}": read(self.device) / 2**20}


def resident(peak: bool = False) -> float:
    """Resident memory of this process in MiB, now or at its peak (without /proc only
    the latter is known).
    """
    try:
        # Not ru_maxrss: it starts from the peak of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 2**10
    except OSError:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def environment(device: torch.device) -> dict[str, Any]:
    """When, versions and machine. A load average above a fraction means that others
    were using the cores.
    """
    packages = ("torch", "transformers", "transformer-lens", "tl-coupling")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {
            package: importlib.metadata.version(package) for package in packages
        },
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def console() -> Console:
    """Where there is no terminal, wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else 120)


def chosen_device(name: str) -> torch.device:
    """Return a device by its name; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError(
            "--device cuda, but torch sees no GPU: use cpu, or install torch with CUDA"
        )
    return torch.device(name)


def stop(reason: Exception | str) -> NoReturn:
    """Say on one line what was wrong, and exit with status 2."""
    print(" ".join(str(reason).split()), file=sys.stderr)
    raise SystemExit(2) from None


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    """Results as FOLDER/NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name} | content, indent=1) + "\n")
    return path


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
