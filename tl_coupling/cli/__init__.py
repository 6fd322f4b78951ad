"""The `tl-coupling` command."""

from tl_coupling.cli import depth, report, tokens, trajectory
from tl_coupling.cli.app import app, main

__all__ = ["app", "depth", "main", "report", "tokens", "trajectory"]
