"""The application that the commands hang on, and its entry point."""

import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from tl_coupling.cli.interrupts import stoppable

app = typer.Typer(
    help="Transformer block coupling and residual-stream trajectories for TransformerLens models.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tl_coupling import __version__

        typer.echo(f"tl-coupling {__version__}")
        raise typer.Exit()


@app.callback()
def _for_every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    pass


def command(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command by its function's name.

    A parameter whose type is a dataclass (`options.py`) stands for the dataclass's fields, an option each.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        groups: dict[str, tuple[type, list[str]]] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind: Any = parameter.annotation
            if not is_dataclass(kind):
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
                continue
            annotations = get_type_hints(kind, include_extras=True)
            # What a dataclass inherits comes last.
            options = sorted(fields(kind), key=lambda field: field.name not in vars(kind)["__annotations__"])
            groups[name] = (kind, [option.name for option in options])  # type: ignore[assignment]
            parameters += [
                inspect.Parameter(o.name, parameter.KEYWORD_ONLY, default=o.default, annotation=annotations[o.name])
                for o in options
            ]

        def run(**options: Any) -> None:
            grouped = {name: kind(**{o: options.pop(o) for o in names}) for name, (kind, names) in groups.items()}
            function(**options, **grouped)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(function.__name__, help=help)(run)
        return function

    return register


def main() -> None:
    """Entry point: bad input is one line on standard error and exit status 2, an interrupt one line and 130.

    Anything else that is raised is a bug, and one line that says where to report it; a traceback with `--debug`.
    """
    try:
        with stoppable():
            sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except Exception as error:
        # Typer's own errors say how they are shown; what else comes from a library is made one line.
        told = hasattr(error, "format_message")
        said, status = (error.format_message(), error.exit_code) if told else (str(error), 2)  # type: ignore[attr-defined]
        if isinstance(error, typer.Abort):
            said, status = "interrupted", 130
        elif isinstance(error, MemoryError):
            said, status = f"out of memory: {said}", 1
        elif not (told or isinstance(error, ValueError | TypeError | OSError)):
            status = 1
            said = (
                f"{type(error).__name__}: {said}. This should not happen: please report what `tl-coupling --debug …` "
                "prints as an issue of the project"
            )
        elif not said:
            said = type(error).__name__
        if "--debug" in sys.argv and not told:
            traceback.print_exc()
        typer.echo(f"tl-coupling: {' '.join(said.split())}", err=True)
        sys.exit(status)
