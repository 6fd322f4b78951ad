"""The `tl-coupling` command."""

# The order of these imports is the order in which `--help` lists the commands.
# ruff: noqa: F401, I001
from tl_coupling.cli import (
    depth,
    carriers,
    compare,
    tokens,
    trajectory,
    directions,
    dynamics,
    report,
)
from tl_coupling.cli import checkpoints, survey, generalization
from tl_coupling.cli import precision, trajectories, redundancy
from tl_coupling.cli.app import app, main
