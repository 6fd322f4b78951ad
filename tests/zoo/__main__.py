"""`python -m zoo`: measure every architecture that the installed TransformerLens names,
and say what came of each.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

# Read when transformers is imported: nothing is looked up on the hub.
_HUB = tempfile.TemporaryDirectory(prefix="tl_coupling_zoo_")
os.environ |= {
    "HF_HOME": _HUB.name,
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zoo",
        description=__doc__,
        epilog="exit status 1: something is wrong or unclear",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="only architectures whose name contains one of these",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time"
    )
    parser.add_argument(
        "--own-modules",
        action="store_true",
        help="HuggingFace's modules by `trace_modules`, without a bridge; no --out",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="keep the findings as JSON"
    )
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="findings of other TransformerLens lines",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the page, docs/ARCHITECTURES.md"
    )
    options = parser.parse_args()

    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    from zoo.page import failed, lines, page
    from zoo.registry import names_of_this_line
    from zoo.run import measure_all

    names = [
        name
        for name in names_of_this_line()
        if not options.only
        or any(part.lower() in name.lower() for part in options.only)
    ]
    if not names:
        parser.error(
            f"no architecture has {' or '.join(map(repr, options.only))} in its name"
        )
    line = importlib.metadata.version("transformer-lens")
    rows = dict(
        tqdm(
            measure_all(names, options.jobs, options.own_modules),
            total=len(names),
            unit="architecture",
            disable=None,
        )
    )
    results = {line: {name: rows[name] for name in names}}
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(results, indent=1))
    for file in options.beside:
        results |= json.loads(file.read_text())
    print("\n".join(lines(results)))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(results))
    return int(failed(results))


if __name__ == "__main__":
    sys.exit(main())
