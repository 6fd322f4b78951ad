"""The application that the commands hang on, its entry point, and how Ctrl-C and
SIGTERM stop it.
"""

import importlib
import inspect
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tl_coupling.files import plain

# By what they are for, and in each group in this order: the commands, the modules of
# `cli/` that have them, and what the list of commands says of each. A line of 80
# characters holds the longest name and 55 characters.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "One model, one prompt or several": {
        "depth": ("depth", "Coupling of every two layers, at one token"),
        "carriers": ("carriers", "Heads and MLPs that carry coupling across depth"),
        "tokens": ("tokens", "Coupling of every two tokens, at one pair of layers"),
        "trajectory": ("trajectory", "Paths of tokens through the residual stream"),
        "directions": ("directions", "What singular vectors read, write and do"),
        "rotate": ("rotate", "The loss as blocks are rotated together or apart"),
        "dynamics": ("dynamics", "Products of blocks, and the blocks' eigenvalues"),
        "lens-audit": ("lens_audit", "Whether a Jacobian lens can be trusted"),
        "report": ("report", "One HTML page on a model and a prompt, or an image"),
    },
    "Several models": {
        "compare": ("compare", "Coupling of two models, revisions or prompt sets"),
        "checkpoints": ("checkpoints", "Coupling, spectra, loss at every checkpoint"),
        "survey": ("survey", "Coupling, spectra, loss of many models and prompts"),
        "generalization": ("generalization", "Coupling against a score across models"),
        "precision": ("precision", "How far measures move when weights are rounded"),
        "atlas": ("atlas", "One HTML page of the maps of many models and tasks"),
        "redundancy": ("redundancy", "The loss as blocks are dropped or swapped"),
        "compare-trajectories": (
            "trajectories",
            "Paths of one prompt in several models",
        ),
    },
}
COMMANDS = {name: told for group in GROUPS.values() for name, told in group.items()}
# Old names, which no help lists.
RENAMED = {"trajectories": "compare-trajectories"}


class _Commands(TyperGroup):
    """The commands, each imported when it is asked for: torch takes seconds."""

    def list_commands(self, ctx: object) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none of this name."""
        name = RENAMED.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        if name != cmd_name:
            typer.echo(f"tl-coupling: {cmd_name} is now called {name}", err=True)
        module, _ = COMMANDS[name]
        with _seen_to_start():
            importlib.import_module(f"tl_coupling.cli.{module}")
        return typer.main.get_group(app).commands[name]

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """List the commands by group."""
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, text) for name, (_, text) in commands.items()]
                )


# Stands for "-" until lines are broken, which would be broken within `--no-untrained`.
_HYPHEN_IN_WORD = "\N{NON-BREAKING HYPHEN}"


class _Command(TyperCommand):
    """A command whose help text has its own options first, and then the panels."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text, with hyphens that can be pasted."""
        return super().get_help(ctx).replace(_HYPHEN_IN_WORD, "-")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the options by panel; those that are in none come first."""
        records: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                names, meaning = record
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                records.setdefault(panel, []).append(
                    (names, meaning.replace("-", _HYPHEN_IN_WORD))
                )
        for panel, listed in records.items():
            with formatter.section(panel):
                formatter.write_dl(listed)


@contextmanager
def _seen_to_start() -> Iterator[None]:
    """Say in a terminal that something happens while torch is imported."""
    is_watched = sys.stderr.isatty()
    if is_watched:
        print("starting …", end="", file=sys.stderr, flush=True)
    yield
    if is_watched:
        # The line is free again.
        print("\r\033[K", end="", file=sys.stderr, flush=True)


app = typer.Typer(
    cls=_Commands,
    help="Transformer block coupling and residual-stream trajectories for "
    "TransformerLens models.",
    # Help texts hold brackets such as [all], which rich would read as markup.
    rich_markup_mode=None,
    # `main` says in one line what went wrong.
    pretty_exceptions_enable=False,
    add_completion=False,
)
# The width is 80 characters without the margins and ` \\`.
_EXAMPLE_WIDTH = 72
# Within this time after the first signal the command is still busy stopping.
_STOPPING_SECONDS = 10.0


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
    name = function.__name__.replace("_", "-")
    help_text = _help_text(function.__doc__ or "").replace("-", _HYPHEN_IN_WORD)
    app.command(name, cls=_Command, help=help_text)(run)
    return function


def _help_text(docstring: str) -> str:
    """Return a docstring whose examples can be pasted as they are printed."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(
        _pasteable(paragraph)
        if paragraph.lstrip().startswith("tl-coupling ")
        else paragraph
        for paragraph in paragraphs
    )


def _pasteable(example: str) -> str:
    """Break a command only between its options, with a backslash."""
    # Text in quotes is one word, and a value stays with its option.
    words = re.findall(
        r'(?:--[\w-]+\s+(?!-))?(?:"[^"]*"|[^\s"]+)', " ".join(example.split())
    )
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < _EXAMPLE_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    # The mark of a paragraph that is printed as it is.
    return "\b\n  " + " \\\n  ".join(lines)


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
    # Typer makes this of an interrupt.
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

    handlers_before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            # An interrupted process only ends from here on.
            signal.signal(number, signal.SIG_IGN if first_at > 0 else handler)
