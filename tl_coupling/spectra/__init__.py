"""Singular value decompositions, and what is read off them alone."""
# ruff: noqa: F401

from tl_coupling.spectra.decompositions import (
    Spectrum,
    singular_values,
    svd,
    svd_of_products,
)
from tl_coupling.spectra.readings import (
    InverseSingularValueFit,
    asymmetry,
    check_cut,
    check_entries,
    check_k,
    effective_rank,
    inverse_singular_value_fit,
    non_normality,
    participation_ratio,
    tail_energy,
)

__all__ = [
    "InverseSingularValueFit",
    "Spectrum",
    "asymmetry",
    "effective_rank",
    "inverse_singular_value_fit",
    "non_normality",
    "participation_ratio",
    "singular_values",
    "svd",
    "svd_of_products",
    "tail_energy",
]
