"""The options of a command as they are typed, and the examples of its help text."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def printed_examples(text: str) -> list[str]:
    """Return the commands that a help text shows, as they are printed."""
    return re.findall(r"^    (tl-coupling (?:.*\\\n)*.*)$", text, re.MULTILINE)


def typed(**options: object) -> Iterator[str]:
    """Yield the words of options: a list's once for each value, and no value for True.

    `typed(all_measures=True, k=[2, 4])` is `--all-measures --k 2 --k 4`.
    """
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
            continue
        values = value if isinstance(value, list) else [value]
        for each_value in values:
            yield from (flag, str(each_value))


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Show warnings of the package, as a user's Python does: commands print them as lines
    of their own, which tests read beside the results.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=UserWarning)
        yield
