"""The application that the commands hang on, and its entry point."""

import sys

import typer

from tl_coupling.cli.interrupts import stoppable

app = typer.Typer(
    help="Transformer block coupling and residual-stream trajectories for TransformerLens models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Entry point: bad input is one line on standard error and exit status 2, an interrupt one line and 130."""
    try:
        with stoppable():
            app()
    except (ValueError, TypeError, OSError) as error:
        # One line, whatever a library below put into its message.
        typer.echo(f"tl-coupling: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
