"""The code of README and of the documentation's pages: `python -m pages` runs the
Python of all pages in this folder, `python -m pages docs/start.md` that of one; with
`--figures FOLDER`, what the `plot_*` of each page draw is kept there.

Each page is a script of its own. Pages run in reading order, and a later one may read
what an earlier one wrote. A comment above a block, `<!-- needs … -->`, says why it is
not run here; `text` after a block is what it prints.
"""

import argparse
import ast
import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            "how-to/compare-and-ablate",
            "how-to/from-transformerlens",
            "how-to/other-tools",
            "how-to/models",
            "how-to/other-models",
            "how-to/checkpoints",
            "how-to/training",
            "how-to/fine-tuned-models",
            "how-to/chat-models",
            "how-to/surveys",
            "how-to/cluster",
        ),
        *(
            "how-to/large-models",
            "how-to/long-prompts",
            "how-to/saes",
            "how-to/own-measure",
            "how-to/tables",
            "how-to/vision",
            "how-to/statistics",
            "findings",
            "findings/depth",
            "atlas",
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


def plots_in(code: str) -> list[str]:
    """Return the `plot_*` that code calls, in order."""
    return re.findall(r"\bplot_\w+(?=\()", code)


def draws_into(call: ast.Call) -> bool:
    """Say whether a call gets Axes or a figure to draw in."""
    return bool({"ax", "fig"} & {keyword.arg for keyword in call.keywords})


class Block(NamedTuple):
    """A block of code, where it starts and ends on its page, what it needs that is not here, and
    what its page says that it prints.
    """

    page: str
    line: int
    start: int
    end: int
    needs: str | None
    language: str
    text: str
    prints: str | None

    @property
    def plots(self) -> list[str]:
        """Return the `plot_*` that the block calls, in order: one figure each, but for
        those that draw in a figure that the block makes.
        """
        if self.language != "python" or self.needs:
            return []
        calls = [
            node
            for node in ast.walk(ast.parse(self.text))
            if isinstance(node, ast.Call)
        ]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        own_figures = [call.func for call in calls if not draws_into(call)]
        names = [ast.unparse(function).rpartition(".")[2] for function in own_figures]
        return [name for name in names if name.startswith("plot_")]

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
            found.start(),
            found.end(),
            **found.groupdict(),
        )
        for found in _FENCE.finditer(text)
    ]


def run(pages: Iterable[Path], figures: Path | None = None) -> None:
    """Run pages, and write what each block prints, by page and line, to
    `printed.json`; what it draws to PNG files in the folder `figures`.
    """
    from matplotlib import pyplot as plt

    printed = {}
    for path in pages:
        names: dict[str, object] = {"__name__": "__main__"}
        for block in blocks(path):
            if block.language == "python" and not block.needs:
                where, said = f"{block.page}:{block.line}", io.StringIO()
                earlier = set(plt.get_fignums())
                with contextlib.redirect_stdout(said):
                    # Tracebacks then count lines as the page does.
                    exec(
                        compile(
                            "\n" * (block.line - 1) + block.text, block.page, "exec"
                        ),
                        names,
                    )
                printed[where] = said.getvalue()
                drawn = [
                    plt.figure(number)
                    for number in plt.get_fignums()
                    if number not in earlier
                ]
                if figures is not None and block.plots:
                    save_figures(drawn, block.plots, figures / page_name(path))
        plt.close("all")
    Path("printed.json").write_text(json.dumps(printed))


def page_name(path: Path) -> str:
    """Return a page's path below docs, without its ending."""
    return str(path.relative_to(ROOT / "docs").with_suffix(""))


def save_figures(figures: Iterable["Figure"], plots: list[str], folder: Path) -> None:
    """Save a figure for each of `plots` under its name, with the words at its top as
    its description, and the place of its plot, which thumbnails show.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in zip(plots, figures, strict=True):
        titles = [figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)]
        words = "; ".join(filter(None, titles)).replace("\n", ", ").replace("$", "")
        figure.savefig(
            folder / f"{name}.png",
            # Twice the pixels that a page shows: sharp on a telephone, too.
            dpi=200,
            metadata={
                "Software": None,
                "Description": words,
                "Plot": place_of_plot(figure),
            },
        )


def place_of_plot(figure: "Figure") -> str:
    """Return left, top, right and bottom of a figure's Axes and their labels, without
    titles and legends, as shares of its width and height.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    boxes = []
    for ax in figure.axes:
        parts = (ax.xaxis, ax.yaxis) if ax.axison else ()
        label_boxes = [part.get_tightbbox() for part in parts]
        boxes += [ax.get_window_extent(), *filter(None, label_boxes)]
        # Below the title of a figure those of its Axes are the names of panels.
        if figure.get_suptitle() and ax.get_title():
            boxes.append(ax.title.get_window_extent())
    plot = Bbox.union(boxes).transformed(figure.transFigure.inverted())
    ends = (plot.x0, 1 - plot.y1, plot.x1, 1 - plot.y0)
    return " ".join(f"{min(max(end, 0.0), 1.0):.4f}" for end in ends)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()
    run([ROOT / path for path in given.pages], given.figures)
