"""Numbers of bytes, as users write and read them."""

import re
from typing import Annotated

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Decimal units, as disks are sold, beside binary ones, as memory is.
_UNITS |= {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def n_bytes(limit: int | str) -> int:
    """Return a number of bytes, from a number or from a text such as "3GiB"."""
    # A number alone is one of bytes.
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]*)\s*", str(limit))
    size = 0
    if match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(
            'must be a number of bytes, or a text such as "3GiB" or "500MB", '
            f"got {limit!r}"
        )
    return size


def format_bytes(size: int | float) -> str:
    """Return a number of bytes as a text for reading, such as "1.5 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.3g} {unit}"
    return f"{size:.3g} B"


def _check_size(limit: int | str) -> None:
    n_bytes(limit)


# How much memory may be taken: bytes, or "3GiB".
MemoryLimit = Annotated[int | str, _check_size]
