"""A terminal that shows names of models, labels and paths as they are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tl_coupling.files import plain

# A log gets no line of a stage that is done sooner.
_SECONDS_TO_LINE = 5.0


class PlainConsole(Console):
    """A console that knows neither markup nor names of emoji, and shows escapes as
    text.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: object) -> Text:
        """Return the text to show.

        All strings come here: those that are printed; titles, cells and captions of
        tables.
        """
        return super().render_str(plain(text), **options)  # type: ignore[arg-type]

    def status(self, status: str, **options: object) -> Status:  # type: ignore[override]
        """Return a status as rich's, which would read markup in any string."""
        return super().status(Text(plain(status)), **options)  # type: ignore[arg-type]

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show a status while the block runs; in a log, which shows none, a line if it
        takes long.
        """
        line = threading.Timer(
            _SECONDS_TO_LINE, self.print, (text,), {"soft_wrap": True}
        )
        # A process that ends early must not wait for the line.
        line.daemon = True
        if not self.is_terminal:
            line.start()
        try:
            with self.status(text):
                yield
        finally:
            line.cancel()
