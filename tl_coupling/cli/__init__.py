"""The `tl-coupling` command."""

from tl_coupling.cli import checkpoints, depth, generalization, report, survey, tokens, trajectory
from tl_coupling.cli.app import app, main

__all__ = ["app", "checkpoints", "depth", "generalization", "main", "report", "survey", "tokens", "trajectory"]
