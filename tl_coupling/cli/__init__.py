"""The `tl-coupling` command."""

from tl_coupling.cli import depth
from tl_coupling.cli.app import app, main

__all__ = ["app", "depth", "main"]
