"""The application that the commands hang on, its entry point, and how Ctrl-C and
SIGTERM stop it.
"""

import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from tl_coupling.files import plain

app = typer.Typer(
    help="Transformer block coupling and residual-stream trajectories for TransformerLens models.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Within this time after the first signal the command is still busy stopping.
_STOPPING_SECONDS = 10.0


def _print_version(wanted: bool) -> None:
    if wanted:
        from tl_coupling import __version__

        typer.echo(f"tl-coupling {__version__}")
        raise typer.Exit()


@app.callback()
def _for_every_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback when something fails.")
    ] = False,
) -> None:
    context.ensure_object(dict)["debug"] = debug


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command by its function's name and docstring.

    A parameter whose type is a dataclass (`options.py`) stands for the dataclass's
    fields, an option each.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        options, kind = [parameter], parameter.annotation
        if is_dataclass(kind):
            own = inspect.get_annotations(kind)  # type: ignore[arg-type]
            # What a dataclass inherits comes last.
            options = sorted(
                inspect.signature(kind).parameters.values(),  # type: ignore[arg-type]
                key=lambda option: option.name not in own,
            )
            groups[name] = kind, [option.name for option in options]  # type: ignore[assignment]
        parameters += [
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options
        ]

    @wraps(function)
    def run(**options: Any) -> None:
        grouped = {
            name: kind(**{o: options.pop(o) for o in names})
            for name, (kind, names) in groups.items()
        }
        function(**options, **grouped)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    app.command(function.__name__)(run)
    return function


def main() -> None:
    """Entry point: bad input is one line on standard error and exit status 2, an
    interrupt one line and 130.

    Anything else that is raised is a bug, and one line that says where to report it; a
    traceback with `--debug`.
    """
    asked: dict[str, bool] = {}
    try:
        with _stoppable():
            sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False, obj=asked))
    except Exception as error:
        said, status = str(error) or type(error).__name__, 2
        # Typer's own errors say how they are shown; what else comes from a library is
        # made one line.
        if hasattr(error, "format_message"):
            said, status = error.format_message(), error.exit_code  # type: ignore[attr-defined]
        elif isinstance(error, typer.Abort):
            said, status = "interrupted", 130
        elif isinstance(error, MemoryError):
            said, status = f"out of memory: {error}", 1
        elif not isinstance(error, ValueError | TypeError | OSError):
            please = "please report what `tl-coupling --debug …` prints as an issue of the project"
            said, status = (
                f"{type(error).__name__}: {error}. This should not happen: {please}",
                1,
            )
        if asked.get("debug"):
            typer.echo(plain(traceback.format_exc()), err=True, nl=False)
        typer.echo(plain(f"tl-coupling: {' '.join(said.split())}"), err=True)
        sys.exit(status)


class _Interrupted(KeyboardInterrupt):
    """What the signals raise; `status` is what shells expect of a command that the
    signal ended.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.status = 128 + signal_number


@contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, the first signal raises, wherever the main thread is; more of them do not
    disturb how it stops.
    """
    first = -_STOPPING_SECONDS

    def stop(number: int, _: object) -> None:
        nonlocal first
        if time.monotonic() - first >= _STOPPING_SECONDS:
            first = time.monotonic()
            raise _Interrupted(number)

    def raised_where_nobody_can_catch_it(unraisable: "sys.UnraisableHookArgs") -> None:
        """In a destructor or a callback Python prints the exception and goes on: the
        signal is sent once more.
        """
        nonlocal first
        if not isinstance(unraisable.exc_value, _Interrupted):
            return before_hook(unraisable)
        first = -_STOPPING_SECONDS
        threading.Timer(
            0.05, os.kill, (os.getpid(), unraisable.exc_value.status - 128)
        ).start()

    before: dict[int, Any] = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    before_hook, sys.unraisablehook = (
        sys.unraisablehook,
        raised_where_nobody_can_catch_it,
    )
    try:
        yield
    finally:
        sys.unraisablehook = before_hook
        for number, handler in before.items():
            # An interrupted process only ends from here on.
            signal.signal(number, signal.SIG_IGN if first > 0 else handler)
