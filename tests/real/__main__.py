"""`python -m real`: measure trained models from the package index, and compare every
block with HuggingFace's own.
"""

import argparse
import json
import os
import sys
from pathlib import Path

# Read when transformers is imported: nothing is looked up on the hub.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

from real.page import failed, lines, with_section
from real.registry import MODELS
from real.run import in_own_process


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m real",
        description=__doc__,
        epilog="exit status 1: something is refused or wrong",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="only models whose name contains one of these",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("out/real"),
        metavar="FOLDER",
        help="weights and figures",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep the outcomes as JSON"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the section of docs/ARCHITECTURES.md",
    )
    options = parser.parse_args()
    models = [
        model
        for model in MODELS
        if not options.only or any(part.lower() in model.name for part in options.only)
    ]
    if not models:
        names = ", ".join(model.name for model in MODELS)
        parser.error(
            f"no model has {' or '.join(map(repr, options.only))} in its name; there are {names}"
        )
    outcomes = []
    for model in models:
        print(f"{model.name} …", flush=True)
        outcomes.append(in_own_process(model, options.cache))
        print("\n".join(lines(outcomes[-1:])), flush=True)
    if len(outcomes) > 1:
        print("\n".join(["", *lines(outcomes)]))
    if options.save:
        options.save.write_text(
            json.dumps(outcomes, indent=1, ensure_ascii=False) + "\n"
        )
    if options.out:
        options.out.write_text(with_section(options.out.read_text(), outcomes))
    return int(failed(outcomes))


if __name__ == "__main__":
    sys.exit(main())
