"""Values that are compared: arrays of numbers, and texts with numbers in them."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
# By name within a file.
Values = Mapping[str, Array | str]

NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Difference:
    """One value that is not the same in both trees.

    Attributes:
        file: relative to the folder of results.
        variable: the name of the value within the file.
        message: what differs, in words.
        absolute: the largest difference between two numbers, or None.
        relative: the largest, divided by the larger of both magnitudes, or None.
    """

    file: str
    variable: str
    message: str
    absolute: float | None = None
    relative: float | None = None

    def __str__(self) -> str:
        line = f"{self.file}  {self.variable}: {self.message}"
        if self.absolute is None:
            return line
        return (
            f"{line}, by up to {self.absolute:.3g} absolute, "
            f"{self.relative:.3g} relative"
        )


def digest(values: Values) -> str:
    """Return a hash of the values and their names.

    Zeros of either sign are the same, and so is every NaN.
    """
    hashed = hashlib.sha256()
    for name in sorted(values):
        hashed.update(f"{name}\0".encode())
        hashed.update(_bytes_of(values[name]) + b"\0")
    return hashed.hexdigest()


def count_of_numbers(values: Values) -> int:
    """Return how many numbers the values hold."""
    return sum(_count(value) for value in values.values())


def differences(file: str, before: Values, after: Values) -> list[Difference]:
    """Return what differs between a file's values in both trees."""
    reported = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            reported.append(Difference(file, name, "is gone"))
        elif name not in before:
            reported.append(Difference(file, name, "is new"))
        elif _bytes_of(before[name]) != _bytes_of(after[name]):
            reported.append(_difference(file, name, before[name], after[name]))
    return reported


def _bytes_of(value: Array | str) -> bytes:
    if isinstance(value, str):
        return b"text\0" + value.encode(errors="surrogatepass")
    described = f"{value.dtype.kind}{value.dtype.itemsize}{value.shape}".encode()
    if value.dtype.kind in "fc":
        nan = value.dtype.type(np.nan)
        canonical = np.where(np.isnan(value), nan, value + value.dtype.type(0))
        return described + canonical.tobytes()
    if value.dtype.kind in "biu":
        return described + value.tobytes()
    # Texts: their width in memory is that of the longest.
    return f"texts{value.shape}{value.tolist()!r}".encode(errors="surrogatepass")


def _count(value: Array | str) -> int:
    if isinstance(value, str):
        return len(NUMBER.findall(value))
    return value.size


def _difference(
    file: str, name: str, before: Array | str, after: Array | str
) -> Difference:
    if isinstance(before, str) and isinstance(after, str):
        return _difference_of_texts(file, name, before, after)
    if isinstance(before, str) or isinstance(after, str):
        message = f"{_short(str(before))!r} became {_short(str(after))!r}"
        return Difference(file, name, message)
    if before.shape != after.shape:
        return Difference(file, name, f"shape {before.shape} became {after.shape}")
    are_numbers = [array.dtype.kind in "biufc" for array in (before, after)]
    if all(are_numbers):
        return _difference_of_numbers(file, name, before, after)
    n_differ = int((before.astype(str) != after.astype(str)).sum())
    return Difference(file, name, f"{n_differ} of {before.size} texts differ")


def _difference_of_numbers(
    file: str, name: str, before: Array, after: Array
) -> Difference:
    wide = complex if "c" in (before.dtype.kind, after.dtype.kind) else float
    a = np.asarray(before, dtype=wide)
    b = np.asarray(after, dtype=wide)
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    if not differ.any():
        return Difference(file, name, f"{before.dtype} became {after.dtype}")
    a = a[differ]
    b = b[differ]
    with np.errstate(invalid="ignore", divide="ignore"):
        absolute = np.abs(a - b)
        relative = absolute / np.maximum(np.abs(a), np.abs(b))
    # Beside a number stands NaN or an infinity: no difference is larger.
    absolute[np.isnan(absolute)] = np.inf
    relative[np.isnan(relative)] = np.inf
    message = f"{differ.sum()} of {before.size} numbers differ"
    return Difference(file, name, message, absolute.max().item(), relative.max().item())


def _difference_of_texts(file: str, name: str, before: str, after: str) -> Difference:
    """Compare the numbers in both, where the words between them are the same."""
    if NUMBER.split(before) == NUMBER.split(after):
        numbers = [
            np.array(
                [float(number.replace("−", "-")) for number in NUMBER.findall(text)]
            )
            for text in (before, after)
        ]
        if (numbers[0] != numbers[1]).any():
            return _difference_of_numbers(file, name, *numbers)
    lines_before = before.splitlines()
    lines_after = after.splitlines()
    for number, pair in enumerate(zip(lines_before, lines_after, strict=False), 1):
        if pair[0] != pair[1]:
            where = _first_difference(*pair)
            change = " became ".join(repr(_short(line[where:])) for line in pair)
            return Difference(file, name, f"line {number}: {change}")
    n_before = len(lines_before)
    return Difference(file, name, f"{n_before} lines became {len(lines_after)}")


def _first_difference(before: str, after: str) -> int:
    """Return where two lines part, a few characters earlier."""
    pairs = zip(before, after, strict=False)
    equal = [a == b for a, b in pairs]
    position = equal.index(False) if False in equal else len(equal)
    return max(0, position - 10)


def _short(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return text[: SHOWN_CHARACTERS - 1] + "…"
