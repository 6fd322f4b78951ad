"""Plain English of four kinds and lengths, written for this purpose."""

from typing import Any

from benchmarks.timing import LONG_TEXT

_CODE = (
    "def median(values):\n"
    '    """The middle of the sorted values; of an even number '
    'of them, the mean of the two in the middle."""\n'
    "    ordered = sorted(values)\n"
    "    half = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n"
    "        return ordered[half]\n"
    "    return (ordered[half - 1] + ordered[half]) / 2\n"
)
_FACTS = (
    "Water boils at one hundred degrees at the level of the sea, "
    "and at seventy on the highest mountain, because the "
    "air above it presses less. Salt lowers the temperature at "
    "which it freezes, which is why salt is put on roads in "
    "winter. Ice is lighter than water and floats, so a lake "
    "freezes from above, and fish live below. Of all the water "
    "on Earth three parts in a hundred are fresh, and most of that is ice."
)
# At most so many tokens of each.
PROMPTS = (
    (
        16,
        (
            "The capital of France is Paris, the capital of Italy is "
            "Rome, and the capital of Spain is Madrid."
        ),
    ),
    (48, _FACTS),
    (100, _CODE),
    (200, LONG_TEXT),
)


def shortened(text: str, n_tokens: int, tokenizer: Any) -> str:
    """Return the first words of a text, as many as have no more than `n_tokens` tokens,
    those at both ends included.
    """
    words = text.split(" ")
    while len(words) > 1 and len(tokenizer(" ".join(words))["input_ids"]) > n_tokens:
        words.pop()
    return " ".join(words)
