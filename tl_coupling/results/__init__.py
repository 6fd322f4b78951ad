"""What all results share: their files."""

from tl_coupling.results.saved import Saved, load_result

__all__ = ["Saved", "load_result"]
