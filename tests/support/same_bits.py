"""For what compares numbers bit for bit."""

import os
from pathlib import Path

_CPU = Path("/proc/cpuinfo")


def round_alike() -> None:
    """Have matrix products round alike wherever a matrix lies in memory.

    MKL's faster kernels do so on Intel's processors alone. It is read when torch is
    imported, by this process and by those that it starts.
    """
    is_intel = _CPU.exists() and "GenuineIntel" in _CPU.read_text()
    if not is_intel:
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
