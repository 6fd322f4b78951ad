"""Options that several benchmarks take, with one meaning and one default."""

import argparse
from pathlib import Path

from tl_coupling.models import EMBEDDED_MODEL


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=EMBEDDED_MODEL,
        help="as tl_coupling loads it (default: %(default)s)",
    )


def add_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=int,
        default=64,
        help="length of the prompt (default: %(default)s)",
    )


def add_k(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--k", type=int, default=50, help="singular vectors (default: %(default)s)"
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder for the JSON",
    )
