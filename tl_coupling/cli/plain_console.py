"""A terminal that shows names of models, labels and paths as they are."""

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tl_coupling.files import plain


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
