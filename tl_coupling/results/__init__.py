"""What all results share: their files, and what their provenances have in common."""
# ruff: noqa: F401

from tl_coupling.results.provenance import (
    check_alike,
    check_one_model,
    common_facts,
    differing_facts,
    joined_provenance,
)
from tl_coupling.results.saved import Saved

__all__ = ["Saved"]
