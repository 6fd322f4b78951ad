"""The `tl-coupling` command."""

# ruff: noqa: F401
from tl_coupling.cli import one_model, precision, several, surveys
from tl_coupling.cli.app import app, main
