"""One argument of one call, and what a kind of argument must be able to do."""

from abc import ABC, abstractmethod
from typing import NamedTuple


class WrongType(Exception):
    """A value has the wrong type; the message is a hint at what to do, or empty."""


class Size(NamedTuple):
    """The lengths of a named axis, or of the axes that `*name` stands for.

    `source` is the argument that set them.
    """

    lengths: list[int]
    source: str


# Of the axes that were named in a call so far.
Sizes = dict[str, Size]


class Argument(NamedTuple):
    """A value that was passed to a function, or an item of one.

    `sizes` holds the axes of the arguments that were checked before, and belongs to the
    whole call.
    """

    value: object
    name: str
    sizes: Sizes

    def item(self, value: object) -> "Argument":
        """Return a value that this argument holds, as an argument of the same name."""
        return self._replace(value=value)


class Kind(ABC):
    """What an annotation asks for."""

    @abstractmethod
    def take(self, argument: Argument) -> object:
        """Return the value, converted where it is clear what is meant.

        Raises:
            WrongType: the value has the wrong type.
            ValueError: it has a wrong shape, or is excluded; the message continues a
                sentence that begins with the name of the argument.
        """

    @abstractmethod
    def words(self, several: bool = False) -> str:
        """Return what is accepted in words, in the singular or in the plural."""
