"""How Jacobians are computed: the options that all comparisons pass on together."""

from dataclasses import dataclass

from tl_coupling.progress import Progress


@dataclass(frozen=True)
class JacobianOptions:
    """How Jacobians are computed, as the public functions take it.

    Attributes:
        chunk_size: rows of a Jacobian to compute at a time; by default what fits.
        max_memory: bytes, or a text such as "3GiB", for all that is computed.
        progress: wraps the loop over Jacobians; by default a bar in a terminal or
            notebook, `False` for none.
    """

    chunk_size: int | None = None
    max_memory: int | str | None = None
    progress: Progress | None = None


DEFAULT_OPTIONS = JacobianOptions()
