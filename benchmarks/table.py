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
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
STAGES = {"forward": "0.8", "gate": "C1", "jacobians": "C0", "svd": "C2", "pairs": "C4"}


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
        _by_width(middle, [run for run in runs if run["model"].startswith("random")])
        _over_bare(right, runs)
    return figure


def _against_the_transcription(ax: Axes, results: dict[str, Any]) -> None:
    for side, color, name in (("released", "C3", "transcription"), ("ours", "C0", "tl_coupling")):
        runs = [run for run in results["runs"] if side in run]
        lengths, seconds = (
            [run["shapes"]["n_pos"] for run in runs],
            [run[side]["seconds"]["end to end"] for run in runs],
        )
        ax.loglog(lengths, seconds, "o-", color=color, label=name)
    for run in results["runs"]:
        if "released" in run:
            theirs, ours = (run[side]["seconds"]["end to end"] for side in ("released", "ours"))
            ax.plot(2 * [run["shapes"]["n_pos"]], [ours, theirs], ":", color="0.6", zorder=0)
            ax.annotate(
                f"{theirs / ours:.1f} ×",
                (run["shapes"]["n_pos"], (theirs * ours) ** 0.5),
                (5, 0),
                textcoords="offset points",
            )
    lengths = [run["shapes"]["n_pos"] for run in results["runs"]]
    ax.set_xticks(lengths, map(str, lengths), minor=False)
    ax.minorticks_off()
    ax.set(xlabel="tokens", ylabel="seconds", title=f"{results['model']}: depth coupling, end to end")
    ax.legend()


def _by_width(ax: Axes, runs: list[dict[str, Any]]) -> None:
    widths = [run["shapes"]["d_model"] for run in runs]
    ax.loglog(widths, [sum(run["bare_products"].values()) for run in runs], "k--", label="bare products")
    for stage in ("jacobians", "svd", "gate"):
        ax.loglog(widths, [run["seconds"][stage] for run in runs], "o-", color=STAGES[stage], label=stage)
    ax.set_xticks(widths, map(str, widths), minor=False)
    ax.minorticks_off()
    ax.set(xlabel="d_model", ylabel="seconds for one block" if runs else "", title="Random Llama blocks, 64 tokens")
    ax.legend()


def _over_bare(ax: Axes, runs: list[dict[str, Any]]) -> None:
    names = [f"{run['model']}\nL = {run['shapes']['n_layers']}, T = {run['shapes']['n_pos']}" for run in runs]
    jacobians = [run["jacobians_over_bare"] for run in runs]
    gates = [run["jacobians_and_gate_over_bare"] - ratio for run, ratio in zip(runs, jacobians, strict=True)]
    ax.barh(names, jacobians, color=STAGES["jacobians"], label="jacobians")
    ax.barh(names, gates, left=jacobians, color=STAGES["gate"], label="gate")
    ax.axvline(1, color="k", linestyle="--", linewidth=1)
    ax.axvline(2, color="k", linestyle=":", linewidth=1)
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=7)
    ax.set(xlabel="seconds over those of the bare products", title="What Jacobians cost beyond their products")
    ax.legend()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    options = parser.parse_args(arguments)
    if not (results := read(options.results)):
        print(f"{options.results} holds no results: run `make bench`, or give --results", file=sys.stderr)
        raise SystemExit(2)
    console = Console()
    for name, one in results.items():
        console.print(*_module(name).tables(one), sep="\n")
    (options.results / "table.md").write_text(page(results))
    picture(results).savefig(options.results / "benchmarks.png", dpi=120)
    console.print(f"wrote {options.results / 'table.md'} and {options.results / 'benchmarks.png'}")


if __name__ == "__main__":
    main()
