"""Results as tables in which each row is one entry."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import pandas

# Facts about the result that every table has, where they are known.
_FACTS = ("model", "prompt")


def tidy_table(
    columns: Mapping[str, tuple[str, Tensor]],
    axes: Mapping[str, Sequence[object]],
    provenance: Mapping[str, Any],
) -> "pandas.DataFrame":
    """Return a row for each entry along all axes that the columns have.

    Args:
        columns: by name, the axes of each, separated by spaces, and its values. Those
            of fewer axes are repeated along the others.
        axes: what stands along an axis; its places, from 0, where it is not named.
        provenance: of the result: `model` and `prompt` are the last columns.
    """
    import xarray

    data = xarray.Dataset(
        {
            name: (dims.split(), values.detach().cpu().double().numpy())
            for name, (dims, values) in columns.items()
        },
        {axis: list(names) for axis, names in axes.items()},
    )
    table = data.to_dataframe().reset_index()
    facts = {name: provenance[name] for name in _FACTS if name in provenance}
    return table.assign(**facts)
