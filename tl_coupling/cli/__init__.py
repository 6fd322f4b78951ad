"""The `tl-coupling` command."""
# ruff: noqa: F401

from tl_coupling.cli.app import COMMANDS, main
