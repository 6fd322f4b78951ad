"""The committed results as tables, rich and Markdown, and as one picture.

    python -m benchmarks.table                       # reads benchmarks/results/*.json
    python -m benchmarks.table --results out/bench   # … or another folder

Writes `table.md` and `benchmarks.png` beside the files. A benchmark draws its own
tables (`tables` in its module, or `table` for each of its runs); of one that draws none
the single numbers are listed.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.table import Table

from benchmarks.questions import QUESTIONS
from benchmarks.timing import console
from tl_coupling.pictures import labels

HERE = Path(__file__).parent
SIDES = ("released", "ours")
COLORS = {"gate": labels.ORANGE, "jacobians": labels.BLUE, "svd": labels.VERMILION}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by the name of their file."""
    contents = {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
    }
    return {
        name: figures for name, figures in contents.items() if "benchmark" in figures
    }


def tables_of(results: dict[str, Any]) -> list[Table]:
    """Return the figures of one file for reading."""
    module = _module(results)
    if hasattr(module, "tables"):
        return module.tables(results)
    if hasattr(module, "table"):
        return [module.table(run) for run in results["runs"]]
    listed = Table("", "", title=results["benchmark"])
    for name, value in _numbers(results, ()):
        listed.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return [listed]


def _module(results: dict[str, Any]) -> Any:
    return importlib.import_module(f"benchmarks.{results['benchmark']}")


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Every number and word in nested results, with where it stands; not the
    environment, which is written apart.
    """
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in ("benchmark", "environment"):
                yield from _numbers(entry, (*path, name))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, entry in enumerate(value):
            yield from _numbers(entry, (*path, str(i)))
    elif not isinstance(value, list):
        yield ", ".join(path), value


def markdown(table: Table) -> str:
    """Return a rich table in Markdown."""
    columns = [list(column.cells) for column in table.columns]
    rows = [[str(column.header) for column in table.columns]]
    rows.append(
        [":--" if column.justify == "left" else "--:" for column in table.columns]
    )
    rows += [list(map(str, cells)) for cells in zip(*columns, strict=True)]
    title = " ".join(str(table.title).split())
    caption = f"\n\n{table.caption}" if table.caption else ""
    return (
        f"**{title}**\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in rows)
        + caption
    )


def page(results: dict[str, dict[str, Any]]) -> str:
    """All tables, by the question that they answer."""
    parts = [
        "# Benchmarks",
        "Written by `python -m benchmarks.table` from the JSON files beside it.",
        "![](benchmarks.png)",
    ]
    left = dict(results)
    for question in QUESTIONS:
        asked = {name: left.pop(name) for name in question.commands if name in results}
        if not asked:
            continue
        parts.append(f"## {question.text}")
        # The answer is read from the first file.
        if next(iter(question.commands)) in asked:
            parts.append(question.answer(results))
        heading = None
        for name, figures in asked.items():
            # Files of one benchmark share a heading.
            if _purpose(figures) != heading:
                heading = _purpose(figures)
                parts.append(f"### {heading}")
            parts += section(figures, question.commands[name])
    for name, figures in left.items():
        command = f"python -m benchmarks.{figures['benchmark']}"
        parts += [f"## {name}", _purpose(figures), *section(figures, command)]
    return "\n\n".join(parts) + "\n"


def _purpose(figures: dict[str, Any]) -> str:
    """Return what a benchmark measures: the first paragraph of its module."""
    text = str(_module(figures).__doc__).split("\n\n")[0]
    return " ".join(text.split()).removesuffix(".")


def section(figures: dict[str, Any], command: str) -> list[str]:
    """Return the tables of a file below the command, the place and the time."""
    environment = figures["environment"]
    versions = ", ".join(
        f"{package} {version}" for package, version in environment["versions"].items()
    )
    ran = (
        f"{environment['date']}, {environment['device_name']}, "
        f"{environment['cpu_threads']} threads, load "
        f"{environment['load_average']:.2f}"
    )
    return [
        f"`{command}`",
        f"{ran}; {versions}",
        *map(markdown, tables_of(figures)),
    ]


def picture(results: dict[str, dict[str, Any]]) -> Figure:
    """Return a panel for each question that the results answer."""
    runs = {
        name: figures["runs"] for name, figures in results.items() if "runs" in figures
    }
    of_widths = [run for run in runs.get("jacobians", []) if run["model"] == "random"]
    panels = {
        _against_the_transcription: results.get("depth_coupling"),
        _over_bare: runs.get("jacobians"),
        _by_width: of_widths,
        _top_of_spectra: [
            run for run in runs.get("truncated_svd", []) if len(run["shape"]) == 2
        ],
    }
    drawn = {draw: data for draw, data in panels.items() if data}
    figure = Figure(
        figsize=(labels.PHONE_WIDTH, 3.6 * len(drawn)), layout="constrained"
    )
    # Each with a layout of its own: names of one panel take no width from the others.
    parts = figure.subfigures(len(drawn), 1, squeeze=False)[:, 0]
    for part, (draw, data) in zip(parts, drawn.items(), strict=True):
        ax = part.subplots()
        draw(ax, data)
        part.suptitle(ax.get_title(), fontsize="medium")
        ax.set_title("")
        part.legend(
            loc="outside lower center", ncols=2, fontsize="small", frameon=False
        )
    return figure


def _against_the_transcription(ax: Axes, results: dict[str, Any]) -> None:
    for side, color, name in (
        ("released", labels.VERMILION, "the released algorithm"),
        ("ours", labels.BLUE, "tl_coupling"),
    ):
        runs = [run for run in results["runs"] if side in run]
        seconds = [run[side]["seconds"]["end to end"] for run in runs]
        ax.loglog(
            [run["shapes"]["n_pos"] for run in runs],
            seconds,
            label=name,
            **labels.marked(color),
        )
    for run in results["runs"]:
        if "released" in run:
            n_pos, theirs, ours = (
                run["shapes"]["n_pos"],
                *(run[side]["seconds"]["end to end"] for side in SIDES),
            )
            ax.plot([n_pos, n_pos], [ours, theirs], ":", color="0.6", zorder=0)
            ax.annotate(
                f"{theirs / ours:.1f} ×",
                (n_pos, (theirs * ours) ** 0.5),
                (5, 0),
                textcoords="offset points",
            )
    _ticks(ax, [run["shapes"]["n_pos"] for run in results["runs"]])
    ax.set(
        xlabel="tokens",
        ylabel="seconds",
        title=f"{results['model']}: depth coupling, end to end",
    )


def _by_width(ax: Axes, runs: list[dict[str, Any]]) -> None:
    widths = [run["shapes"]["d_model"] for run in runs]
    shapes = runs[0]["shapes"]
    ax.loglog(
        widths,
        [sum(run["bare_products"].values()) for run in runs],
        "k--",
        label="bare products",
    )
    for stage in ("jacobians", "svd", "gate"):
        ax.loglog(
            widths,
            [run["seconds"][stage] for run in runs],
            label=stage,
            **labels.marked(COLORS[stage]),
        )
    _ticks(ax, widths)
    measured = (
        f"{shapes['n_layers']} random Llama block, {shapes['n_pos']} "
        f"tokens, k = {shapes['k']}"
    )
    ax.set(xlabel="d_model", ylabel="seconds", title=measured)


def _over_bare(ax: Axes, runs: list[dict[str, Any]]) -> None:
    names = [
        "{n_layers} × {d_model}, T = {n_pos}".format(**run["shapes"]) for run in runs
    ]
    names = [f"{run['model']} {name}" for run, name in zip(runs, names, strict=True)]
    jacobians = [run["jacobians_over_bare"] for run in runs]
    gates = [
        run["jacobians_and_gate_over_bare"] - ratio
        for run, ratio in zip(runs, jacobians, strict=True)
    ]
    places = range(len(runs))
    ax.barh(places, jacobians, color=COLORS["jacobians"], label="jacobians")
    ax.barh(places, gates, left=jacobians, color=COLORS["gate"], label="gate")
    ax.set_yticks(places, names, fontsize="small")
    ax.set_xlim(0, 1.25 * max(run["jacobians_and_gate_over_bare"] for run in runs))
    ax.axvline(1, color="k", linestyle="--", linewidth=1, label="bare products")
    ax.invert_yaxis()
    ax.set(xlabel="× bare products", title="What Jacobians cost beyond their products")


def _top_of_spectra(ax: Axes, runs: list[dict[str, Any]]) -> None:
    """Draw a colour for each way, a style of line for each shape of spectrum."""
    ways = list(dict.fromkeys(way for run in runs for way in run["ways"]))
    for number, way in enumerate(ways):
        for style, name in enumerate(dict.fromkeys(run["matrices"] for run in runs)):
            with_way = [
                run for run in runs if run["matrices"] == name and way in run["ways"]
            ]
            seconds = [run["ways"][way]["seconds"] for run in with_way]
            look = labels.numbered_look(number) | {
                "linestyle": ("-", "--", ":")[style % 3]
            }
            ax.loglog(
                [run["shape"][-1] for run in with_way],
                seconds,
                label=None if style else way,
                **look,
            )
    for style, name in enumerate(dict.fromkeys(run["matrices"] for run in runs)):
        ax.plot(
            [],
            [],
            color="0.4",
            linestyle=("-", "--", ":")[style % 3],
            label=name.removeprefix("its "),
        )
    _ticks(ax, sorted({run["shape"][-1] for run in runs}))
    ax.set(
        xlabel="width of one matrix",
        ylabel="seconds",
        title=f"Top {runs[0]['k']} singular triplets",
    )


def _ticks(ax: Axes, places: Sequence[int]) -> None:
    """Plain numbers on logarithmic axes: these below, and 1, 2 and 5 of each decade at
    the side.
    """
    ax.set_xticks(places, map(str, places))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=HERE / "results",
        help="folder of the JSON files",
    )
    options = parser.parse_args(arguments)
    if not (results := read(options.results)):
        print(
            f"{options.results} holds no results: run `make bench`, or give --results",
            file=sys.stderr,
        )
        raise SystemExit(2)
    out = console()
    for figures in results.values():
        out.print(*tables_of(figures), sep="\n")
    (options.results / "table.md").write_text(page(results))
    picture(results).savefig(options.results / "benchmarks.png", dpi=120)
    out.print(
        f"wrote {options.results / 'table.md'} and {options.results / 'benchmarks.png'}"
    )


if __name__ == "__main__":
    main()
