"""Coupling and alignment matrices, their measures, and what chance would give.

Pure tensors.
"""
# ruff: noqa: F401

from tl_coupling.measures.coordinates import (
    Change,
    Metric,
    Without,
    in_metric,
    stream_metric,
)
from tl_coupling.measures.matrices import (
    Norm,
    Orientation,
    captured_energy,
    coupling_matrix,
    diagonal_shares,
    energy_shares,
    miscoupling,
    nan_where_zero,
    normalized_miscoupling,
    safe_scale,
    spectral_miscoupling,
)
from tl_coupling.measures.measure import (
    MEASURES,
    OWN_MEASURES,
    AnyMeasure,
    Measure,
    MeasureName,
    OwnMeasure,
    facts_of_own,
    label_of,
    mean_name,
    measure_named,
    measure_of,
    measured_in,
    measures_at_every_k,
    measures_of_map,
    null_name,
    own_measures,
    words_of,
)
from tl_coupling.measures.nulls import (
    Null,
    draws_of_measure,
    draws_of_random_subspaces,
    mean_random_coupling,
    nulls_at_every_k,
    random_rotations,
    random_subspace_null,
    rotation_null,
    seeded,
)
from tl_coupling.measures.overlaps import (
    Sides,
    alignment_matrices,
    draws_of_nuclear_overlap,
    nuclear_overlap,
    subspace_overlap,
    vector_alignment,
)
from tl_coupling.measures.own_functions import (
    MeasureFunction,
    check_reaches_processes,
)
from tl_coupling.measures.removals import (
    without_identity,
    without_shared,
    without_top,
)

__all__ = [
    "alignment_matrices",
    "captured_energy",
    "coupling_matrix",
    "draws_of_nuclear_overlap",
    "draws_of_random_subspaces",
    "in_metric",
    "mean_random_coupling",
    "measure_of",
    "miscoupling",
    "normalized_miscoupling",
    "nuclear_overlap",
    "random_subspace_null",
    "rotation_null",
    "spectral_miscoupling",
    "stream_metric",
    "subspace_overlap",
    "vector_alignment",
    "without_identity",
    "without_shared",
    "without_top",
]
__dir__ = __all__.copy
