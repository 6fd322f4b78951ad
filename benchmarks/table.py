"""The committed results as tables, rich and Markdown, and as one picture.

    python -m benchmarks.table                       # reads benchmarks/results/*.json
    python -m benchmarks.table --results out/bench   # … or another folder

Writes `table.md` and `benchmarks.png` beside the files. Every benchmark draws its own tables (`tables` in its module).
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.table import Table

from benchmarks.timing import console

HERE = Path(__file__).parent
SIDES = ("released", "ours")
COLORS = {"gate": "C1", "jacobians": "C0", "svd": "C2"}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Results by benchmark, of those whose module draws tables."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if (HERE / f"{path.stem}.py").exists() and hasattr(_module(path.stem), "tables"):
            found[path.stem] = json.loads(path.read_text())
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def markdown(table: Table) -> str:
    """A rich table in Markdown."""
    columns = [list(column.cells) for column in table.columns]
    rows = [[str(column.header) for column in table.columns]]
    rows.append([":--" if column.justify == "left" else "--:" for column in table.columns])
    rows += [list(map(str, cells)) for cells in zip(*columns, strict=True)]
    title = " ".join(str(table.title).split())
    caption = f"\n\n{table.caption}" if table.caption else ""
    return f"**{title}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + caption


def page(results: dict[str, dict[str, Any]]) -> str:
    """All tables, each benchmark with where and when it ran."""
    parts = [
        "# Benchmarks",
        "Written by `python -m benchmarks.table` from the JSON files beside it.",
        "![](benchmarks.png)",
    ]
    for name, one in results.items():
        where, purpose = one["environment"], str(_module(name).__doc__).splitlines()[0]
        versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
        ran = (
            f"{where['date']}, {where['device_name']}, {where['cpu_threads']} threads, load {where['load_average']:.2f}"
        )
        parts += [f"## {name}", purpose, f"{ran}; {versions}", *map(markdown, _module(name).tables(one))]
    return "\n\n".join(parts) + "\n"


def picture(results: dict[str, dict[str, Any]]) -> Figure:
    """Three panels: end to end against the transcription, stages by width, Jacobians over their bare products."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    if "depth_coupling" in results:
        _against_the_transcription(left, results["depth_coupling"])
    if "jacobians" in results:
        runs = results["jacobians"]["runs"]
        _by_width(middle, [run for run in runs if run["model"] == "random"])
        _over_bare(right, runs)
    return figure


def _against_the_transcription(ax: Axes, results: dict[str, Any]) -> None:
    for side, color, name in (("released", "C3", "the released algorithm"), ("ours", "C0", "tl_coupling")):
        runs = [run for run in results["runs"] if side in run]
        seconds = [run[side]["seconds"]["end to end"] for run in runs]
        ax.loglog([run["shapes"]["n_pos"] for run in runs], seconds, "o-", color=color, label=name)
    for run in results["runs"]:
        if "released" in run:
            n_pos, theirs, ours = run["shapes"]["n_pos"], *(run[side]["seconds"]["end to end"] for side in SIDES)
            ax.plot([n_pos, n_pos], [ours, theirs], ":", color="0.6", zorder=0)
            ax.annotate(f"{theirs / ours:.1f} ×", (n_pos, (theirs * ours) ** 0.5), (5, 0), textcoords="offset points")
    _ticks(ax, [run["shapes"]["n_pos"] for run in results["runs"]])
    ax.set(xlabel="tokens", ylabel="seconds", title=f"{results['model']}: depth coupling, end to end")
    ax.legend()


def _by_width(ax: Axes, runs: list[dict[str, Any]]) -> None:
    if not runs:
        return
    widths, shapes = [run["shapes"]["d_model"] for run in runs], runs[0]["shapes"]
    ax.loglog(widths, [sum(run["bare_products"].values()) for run in runs], "k--", label="bare products")
    for stage in ("jacobians", "svd", "gate"):
        ax.loglog(widths, [run["seconds"][stage] for run in runs], "o-", color=COLORS[stage], label=stage)
    _ticks(ax, widths)
    what = f"{shapes['n_layers']} random Llama block, {shapes['n_pos']} tokens, k = {shapes['k']}"
    ax.set(xlabel="d_model", ylabel="seconds", title=what)
    ax.legend()


def _over_bare(ax: Axes, runs: list[dict[str, Any]]) -> None:
    names = ["{n_layers} × {d_model}, T = {n_pos}".format(**run["shapes"]) for run in runs]
    names = [f"{run['model']} {name}" for run, name in zip(runs, names, strict=True)]
    jacobians = [run["jacobians_over_bare"] for run in runs]
    gates = [run["jacobians_and_gate_over_bare"] - ratio for run, ratio in zip(runs, jacobians, strict=True)]
    places = range(len(runs))
    ax.barh(places, jacobians, color=COLORS["jacobians"], label="jacobians")
    ax.barh(places, gates, left=jacobians, color=COLORS["gate"], label="gate")
    ax.set_yticks(places, names, fontsize=8)
    ax.axvline(1, color="k", linestyle="--", linewidth=1, label="bare products")
    ax.invert_yaxis()
    ax.set(xlabel="× bare products", title="What Jacobians cost beyond their products")
    ax.legend()


def _ticks(ax: Axes, places: Sequence[int]) -> None:
    """Plain numbers on logarithmic axes: these below, and 1, 2 and 5 of each decade at the side."""
    ax.set_xticks(places, map(str, places))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    options = parser.parse_args(arguments)
    if not (results := read(options.results)):
        print(f"{options.results} holds no results: run `make bench`, or give --results", file=sys.stderr)
        raise SystemExit(2)
    out = console()
    for name, one in results.items():
        out.print(*_module(name).tables(one), sep="\n")
    (options.results / "table.md").write_text(page(results))
    picture(results).savefig(options.results / "benchmarks.png", dpi=120)
    out.print(f"wrote {options.results / 'table.md'} and {options.results / 'benchmarks.png'}")


if __name__ == "__main__":
    main()
