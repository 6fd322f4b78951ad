"""Singular value decompositions, and what is read off them alone."""
# ruff: noqa: F401

from tl_coupling.spectra.checks import (
    DEFAULT_K,
    check_cut,
    check_entries,
    check_k,
    check_matrices,
    fitting_k,
)
from tl_coupling.spectra.decompositions import (
    SimilarRanks,
    flops_of_svd,
    singular_values,
    svd,
)
from tl_coupling.spectra.iteration import (
    Matrix,
    Products,
    products_of_triplets,
    triplets_of_products,
)
from tl_coupling.spectra.matrix_readings import (
    InverseSingularValueFit,
    asymmetry,
    effective_rank,
    inverse_singular_value_fit,
    non_normality,
    participation_ratio,
    tail_energy,
)
from tl_coupling.spectra.parallel import parallel_map
from tl_coupling.spectra.spectrum import Spectrum
from tl_coupling.spectra.symmetric import eigh, eigvalsh

__all__ = [
    "InverseSingularValueFit",
    "SimilarRanks",
    "Spectrum",
    "asymmetry",
    "effective_rank",
    "inverse_singular_value_fit",
    "non_normality",
    "participation_ratio",
    "singular_values",
    "svd",
    "tail_energy",
]
__dir__ = __all__.copy
