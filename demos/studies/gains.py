"""Do blocks amplify together on many prompts? The alignment gain of all blocks.

    tl-coupling survey --model smollm2-135m --prompts prompts.jsonl --per-task 4 \\
        --untrained --dynamics --k 10 --out out/gains
    python demos/studies/gains.py --survey out/gains --out demos/studies/results/gains
    python demos/studies/gains.py --table  # what the committed results say

The survey takes half an hour of two busy cores for 24 prompts and the untrained twin.
For each model this prints the mean of the gain in log σ₁ over prompts after the last
block, with its 95 % t interval over prompts and over tasks; on how many prompts the gain
lies outside the interval of one more product of turned blocks; and over how many
directions the products spread.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas
import xarray
from scipy import stats

RESULTS = Path(__file__).parent / "results" / "gains"
# Variables of a survey, by the column that they are written to.
COLUMNS = {
    "alignment_gain": "gain",
    "alignment_gain_low": "low",
    "alignment_gain_high": "high",
    "product_participation_ratio": "directions",
    "null_product_participation_ratio": "directions_turned",
}


def measured(survey: Path) -> pandas.DataFrame:
    """Return a row for each model and prompt, after the last block.

    Raises:
        ValueError: a folder without units that were measured with `--dynamics`.
    """
    tables = []
    for path in sorted((survey / "units").glob("*.nc")):
        with xarray.open_dataset(path) as data:
            if "alignment_gain" not in data:
                raise ValueError(f"{path} was measured without `--dynamics`")
            last = data.isel(layer=-1)
            columns = {
                column: last[name].values.round(4) for name, column in COLUMNS.items()
            }
            rows = {"task": data["task"].values, "id": data["prompt"].values} | columns
            tables.append(pandas.DataFrame(rows).assign(model=path.stem))
    if not tables:
        raise ValueError(f"there are no units in {survey}: wanted a survey's folder")
    return pandas.concat(tables, ignore_index=True)


def interval(values: pandas.Series) -> str:
    """Return a mean with its 95 % t interval."""
    mean = values.mean()
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def report(table: pandas.DataFrame) -> str:
    """Return what the results say, model by model."""
    lines = []
    for model, rows in table.groupby("model"):
        by_task = rows.groupby("task")["gain"].mean()
        above = int((rows["low"] > 0).sum())
        below = int((rows["high"] < 0).sum())
        ratio = np.log(rows["directions"] / rows["directions_turned"])
        lines += [
            f"{model}: {len(rows)} prompts of {len(by_task)} tasks, nats",
            f"  mean over prompts {interval(rows['gain'])}, over tasks {interval(by_task)}",
            f"  outside the interval of one more draw: above on {above}, below on {below}",
            f"  directions {rows['directions'].median():.1f}, turned blocks "
            f"{rows['directions_turned'].median():.1f} (medians); log ratio {interval(ratio)}",
            "  by task: "
            + ", ".join(f"{task} {mean:+.2f}" for task, mean in by_task.items()),
        ]
    return "\n".join(lines)


def main() -> None:
    """Read a survey, write its table and print the report; or print that of a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--survey", type=Path, help="folder of a survey to read")
    parser.add_argument("--out", type=Path, default=Path("out/gains"))
    parser.add_argument(
        "--table", action="store_true", help="print the committed results alone"
    )
    options = parser.parse_args()
    if options.table:
        print(report(pandas.read_csv(RESULTS / "measured.csv")))
        return
    if options.survey is None:
        parser.error("give --survey, a survey's folder, or --table")
    table = measured(options.survey)
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "measured.csv", index=False)
    print(report(table))


if __name__ == "__main__":
    main()
