"""Coupling and alignment matrices, their measures, and what random subspaces would
give. Pure tensors.
"""
# ruff: noqa: F401

from tl_coupling.measures.alignment import (
    Sides,
    alignment_matrices,
    subspace_overlap,
    vector_alignment,
)
from tl_coupling.measures.measures import (
    BOUNDED_BY_1,
    MEASURES,
    RELEASED,
    Measure,
    Norm,
    Orientation,
    captured_energy,
    coupling_matrix,
    measure_of,
    measures_at_every_k,
    miscoupling,
    normalized_miscoupling,
    spectral_miscoupling,
)
from tl_coupling.measures.nulls import (
    Null,
    draws_of_random_subspaces,
    nulls_at_every_k,
    random_rotations,
    random_subspace_null,
    rotation_null,
)
from tl_coupling.measures.removals import without_shared, without_top

__all__ = [
    "alignment_matrices",
    "captured_energy",
    "coupling_matrix",
    "draws_of_random_subspaces",
    "measure_of",
    "miscoupling",
    "normalized_miscoupling",
    "random_subspace_null",
    "rotation_null",
    "spectral_miscoupling",
    "subspace_overlap",
    "vector_alignment",
    "without_shared",
    "without_top",
]
