"""The code of README and of the documentation's pages: `python -m pages` runs the
Python of all pages in this folder, `python -m pages docs/start.md` that of one.

Each page is a script of its own. Pages run in reading order, and a later one may read
what an earlier one wrote. A comment above a block, `<!-- needs … -->`, says why it is
not run here; `text` after a block is what it prints.
"""

import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# In reading order.
PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *(
            "index",
            "start",
            "concepts/jacobians",
            "concepts/coupling",
            "concepts/measures",
            "concepts/nulls",
            "concepts/carriers",
        ),
        *(
            "concepts/trajectories",
            "concepts/dynamics",
            "concepts/directions",
            "how-to/second-hour",
            "how-to/from-transformerlens",
            "how-to/models",
            "how-to/other-models",
            "how-to/checkpoints",
            "how-to/surveys",
            "how-to/cluster",
        ),
        *(
            "how-to/large-models",
            "how-to/vision",
            "how-to/statistics",
            "findings",
            "findings/depth",
            "faq",
            "house",
        ),
    )
]
_FENCE = re.compile(
    (
        r"(?:<!-- needs (?P<needs>.+?) "
        r"-->\n)?```(?P<language>\w+)\n(?P<text>.*?)```(?:\n\n```text\n(?P<prints>.*?)```)?"
    ),
    re.DOTALL,
)


class Block(NamedTuple):
    """A block of code, what it needs that is not here, and what its page says that it
    prints.
    """

    page: str
    line: int
    needs: str | None
    language: str
    text: str
    prints: str | None

    def commands(self) -> list[list[str]]:
        """Return what stands after `tl-coupling`, of shell blocks."""
        lines = (
            self.text.replace("\\\n", " ").splitlines() if self.language == "sh" else []
        )
        return [
            shlex.split(line, comments=True)[1:]
            for line in lines
            if line.startswith("tl-coupling ")
        ]


def blocks(path: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = path.read_text()
    return [
        Block(
            str(path.relative_to(ROOT)),
            text.count("\n", 0, found.start("text")) + 1,
            **found.groupdict(),
        )
        for found in _FENCE.finditer(text)
    ]


def run(pages: Iterable[Path]) -> None:
    """Run pages, and write what each block prints, by page and line, to
    `printed.json`.
    """
    from matplotlib import pyplot as plt

    printed = {}
    for path in pages:
        names: dict[str, object] = {"__name__": "__main__"}
        for block in blocks(path):
            if block.language == "python" and not block.needs:
                where, said = f"{block.page}:{block.line}", io.StringIO()
                with contextlib.redirect_stdout(said):
                    # Tracebacks then count lines as the page does.
                    exec(
                        compile(
                            "\n" * (block.line - 1) + block.text, block.page, "exec"
                        ),
                        names,
                    )
                printed[where] = said.getvalue()
        plt.close("all")
    Path("printed.json").write_text(json.dumps(printed))


if __name__ == "__main__":
    run([ROOT / name for name in sys.argv[1:]] or PAGES)
