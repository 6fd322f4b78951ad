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
from types import FrameType
from typing import Annotated

import typer

from tl_coupling.files import plain

app = typer.Typer(
    help="Transformer block coupling and residual-stream trajectories for "
    "TransformerLens models.",
    # Help texts hold brackets such as [all], which rich would read as markup.
    rich_markup_mode=None,
    # `main` says in one line what went wrong.
    pretty_exceptions_enable=False,
    add_completion=False,
)
# Within this time after the first signal the command is still busy stopping.
_STOPPING_SECONDS = 10.0
# So soon after an interrupt that was lost it is sent again.
_AGAIN_SECONDS = 0.05


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from tl_coupling import __version__

        typer.echo(f"tl-coupling {__version__}")
        raise typer.Exit()


@app.callback()
def _set_shared_options(
    context: typer.Context,
    _version: Annotated[
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
    options_of_all: list[inspect.Parameter] = []
    # By parameter: the dataclass, and the names of its fields.
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            options = _options_of(kind)
            groups[name] = (kind, [option.name for option in options])
        else:
            options = [parameter]
        for option in options:
            # In a signature a parameter with a default may not stand before one
            # without, unless both are keywords; those of groups are mixed.
            keyword = option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            options_of_all.append(keyword)

    @wraps(function)
    def run(**options: object) -> None:
        for parameter_name, (kind, names) in groups.items():
            fields = {name: options.pop(name) for name in names}
            options[parameter_name] = kind(**fields)
        function(**options)

    # typer reads these.
    signature = inspect.Signature(options_of_all)
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options_of_all}
    app.command(function.__name__.replace("_", "-"))(run)
    return function


def renamed(old_name: str, function: Callable[..., None]) -> None:
    """Let a command answer to its old name too, which no help lists, with a hint."""
    new_name = function.__name__.replace("_", "-")
    # The command as `command` registered it, with its groups taken apart.
    (registered,) = [c for c in app.registered_commands if c.name == new_name]
    run = registered.callback
    assert run is not None

    @wraps(run)
    def run_with_hint(**options: object) -> None:
        typer.echo(f"tl-coupling: {old_name} is now called {new_name}", err=True)
        run(**options)

    app.command(old_name, hidden=True)(run_with_hint)


def _options_of(kind: type) -> list[inspect.Parameter]:
    """Return a dataclass's fields as parameters; what it inherits comes last."""
    own_names = inspect.get_annotations(kind)
    options = inspect.signature(kind).parameters.values()
    # `sorted` keeps the order within both halves.
    return sorted(options, key=lambda option: option.name not in own_names)


def main() -> None:
    """Run the command line, and exit.

    Bad input is one line on standard error and exit status 2, an interrupt one line and
    130. Anything else that is raised is a bug, and one line that says where to report
    it; a traceback with `--debug`.
    """
    shared: dict[str, bool] = {}
    try:
        with _stoppable():
            # Not standalone: errors come here instead of being printed by typer, and a
            # command that exits gives its status back.
            sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False, obj=shared))
    except Exception as error:
        message, status = _message_and_status(error)
        if shared.get("debug"):
            typer.echo(plain(traceback.format_exc()), err=True, nl=False)
        typer.echo(plain(f"tl-coupling: {' '.join(message.split())}"), err=True)
        sys.exit(status)


def _message_and_status(error: Exception) -> tuple[str, int]:
    """Return what users read of an error, and the exit status."""
    message = str(error) or type(error).__name__
    # Typer's own errors say how they are shown.
    if hasattr(error, "format_message"):
        return error.format_message(), error.exit_code  # type: ignore[attr-defined]
    # What typer makes of an interrupt.
    if isinstance(error, typer.Abort):
        return "interrupted", 130
    if isinstance(error, MemoryError):
        return f"out of memory: {error}", 1
    if isinstance(error, ValueError | TypeError | OSError):
        return message, 2
    return (
        f"{type(error).__name__}: {error}. This should not happen: please report what "
        "`tl-coupling --debug …` prints as an issue of the project"
    ), 1


class _Interrupted(KeyboardInterrupt):
    """What the signals raise; `status` is what shells expect of a command that the
    signal ended.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.status = 128 + signal_number


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let the first signal raise inside, wherever the main thread is.

    More of them do not disturb how it stops.
    """
    first_at = -_STOPPING_SECONDS

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal first_at
        # After that time it may hang, and another signal is heard again.
        if time.monotonic() - first_at >= _STOPPING_SECONDS:
            first_at = time.monotonic()
            raise _Interrupted(number)

    def raised_where_nobody_can_catch_it(unraisable: "sys.UnraisableHookArgs") -> None:
        """Send the signal once more.

        In a destructor or a callback Python prints the exception and goes on.
        """
        nonlocal first_at
        if not isinstance(unraisable.exc_value, _Interrupted):
            hook_before(unraisable)
            return
        first_at = -_STOPPING_SECONDS
        number = unraisable.exc_value.status - 128
        # From another thread and later: a signal sent here would arrive in the same
        # place.
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number)).start()

    handlers_before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    hook_before = sys.unraisablehook
    sys.unraisablehook = raised_where_nobody_can_catch_it
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        for number, handler in handlers_before.items():
            # An interrupted process only ends from here on.
            signal.signal(number, signal.SIG_IGN if first_at > 0 else handler)
