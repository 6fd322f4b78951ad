"""What all results share: their files and short tables, what their provenances have in
common, prompts that must differ, and the names of controls and nulls.
"""
# ruff: noqa: F401

from tl_coupling.results.different_prompts import (
    INPUT_DIGEST,
    DifferentPrompts,
    digest_of,
    prompt_name,
    prompts_in_words,
)
from tl_coupling.results.names import (
    CONTROLS,
    OWN_CONTROLS,
    RANDOM_AXES,
    RANDOM_BASES,
    RANDOM_FRAMES,
    RANDOM_MATRIX,
    RANDOM_STEPS,
    RANDOM_SUBSPACES,
    ROTATIONS,
    TURNED_BLOCKS,
)
from tl_coupling.results.provenance import (
    changes_in_words,
    check_alike,
    check_one_model,
    common_facts,
    differing_facts,
    joined_provenance,
)
from tl_coupling.results.saved import Saved
from tl_coupling.results.short_tables import (
    ShortTable,
    first_rows,
    interval_text,
    plural,
)
from tl_coupling.results.small_maps import (
    DIVERGING,
    SEQUENTIAL,
    small_map,
    small_map_html,
)
from tl_coupling.results.tables import tidy_table

__all__ = ["Saved"]
