"""What benchmarks have in common: the tokens they measure, seconds, memory, and where it all ran."""

import contextlib
import importlib.metadata
import platform
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tl_coupling.models import EMBEDDED_MODEL
from tl_coupling.models.loading import embedded_folder
from tl_coupling.surveys.measurements import PAPER_PROMPT

TEXT = (
    "The harbour was quiet when the first boats came back. Gulls followed them in, loud and hungry, and the men on "
    "deck threw what they could not sell over the side. By eight the tide had turned. An old woman sat on the wall "
    "with a basket of bread, as she had done every morning for thirty years, and sold a loaf to anyone who asked. She "
    "knew the names of all the crews, and of the ships, and of most of the storms that had taken the others. When the "
    "wind came round to the north she would look at the sky, close her basket, and go home without a word; and those "
    "who had watched her long enough tied their boats up twice and stayed ashore that night. Nobody had ever asked "
    "her how she could tell. It was said in the village that her father had taught her, and that his mother had "
    "taught him, but the harbour master thought that she simply listened better than the rest of them did."
)


class BenchmarkError(ValueError):
    """Something was asked for that cannot be measured; the message says what to do."""


def source_of(name: str) -> str:
    """Where HuggingFace finds a model that tl_coupling knows by this name."""
    return str(embedded_folder()) if name == EMBEDDED_MODEL else name


def token_ids(name: str, n_tokens: int) -> list[int]:
    """The paper's prompt where it has this many tokens, else the beginning of a fixed text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_of(name))
    paper = tokenizer(PAPER_PROMPT)["input_ids"]
    if len(paper) == n_tokens:
        return paper
    text = tokenizer(TEXT)["input_ids"]
    if n_tokens > len(text):
        raise BenchmarkError(
            f"--tokens must lie in [1, {len(text)}] (the text that is used is no longer), got {n_tokens}"
        )
    return text[:n_tokens]


def timed(device: torch.device, function: Callable[[], Any]) -> tuple[Any, float]:
    """What the function returns, and how many seconds it took on the device."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    start = now()
    result = function()
    return result, now() - start


class Memory:
    """Memory of this process, in MiB: after loading (at creation), after the warm-up, and at its peak since then.

    The weights are mapped from their file and count as resident only once they have been read: it is `after_warm_up`
    that a peak compares with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib: dict[str, float | bool] = {"after_loading": resident(), **self._on_gpu("after_loading")}

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
        return self.mib | {"peak": resident(peak=True)} | self._on_gpu("peak")

    def _on_gpu(self, when: str) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        read = torch.cuda.max_memory_allocated if when == "peak" else torch.cuda.memory_allocated
        return {f"gpu_{when}": read(self.device) / 2**20}


def resident(peak: bool = False) -> float:
    """Resident memory of this process in MiB, now or at its peak (without /proc only the latter is known)."""
    try:
        # Not ru_maxrss: it starts from the peak of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 2**10
    except OSError:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine."""
    packages = ("torch", "transformers", "transformer-lens", "tl-coupling")
    return {
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
