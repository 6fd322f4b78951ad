"""Products of matrices that a block's Jacobian takes, counted from the block's sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class _StandardBlock:
    """Sizes of a block of attention and an MLP.

    Attributes:
        d_head: width of a head.
        d_z: width of all heads together.
        group: heads that share keys.
        d_mlp: width of the MLP.
        n_mlp: matrices of the MLP: two, or three if it is gated.
    """

    d_head: int
    d_z: int
    group: int
    d_mlp: int
    n_mlp: int

    @classmethod
    def from_block(
        cls, block: nn.Module, cfg: object, d: int
    ) -> "_StandardBlock | None":
        """Return the sizes of a block whose matrices add up to them, or else None."""
        n_heads = _size_in(cfg, ("n_heads", "num_attention_heads"), default=1)
        d_head = _size_in(cfg, ("d_head", "head_dim"), default=d // n_heads)
        n_shared = _size_in(
            cfg, ("n_key_value_heads", "num_key_value_heads"), default=n_heads
        )
        d_mlp = _size_in(
            cfg, ("d_mlp", "intermediate_size", "ffn_dim", "n_inner"), default=4 * d
        )
        matrices = [p for p in block.parameters() if p.ndim > 1]
        entries_of_mlp = sum(
            p.numel()
            for p in matrices
            if p.ndim == 2 and {d_mlp, 2 * d_mlp} & set(p.shape)
        )
        entries_of_attention = sum(p.numel() for p in matrices) - entries_of_mlp
        joint = d_head * (n_heads + 2 * n_shared) * d
        expected = joint + d_head * n_heads * d
        # A bridge has joint matrices beside what it cut from them.
        adds_up = any(
            abs(entries_of_attention - entries) < 0.02 * entries
            for entries in (expected, expected + joint)
        )
        n_mlp_of_entries = {2 * d * d_mlp: 2, 3 * d * d_mlp: 3, 5 * d * d_mlp: 3}
        n_mlp = n_mlp_of_entries.get(entries_of_mlp)
        if n_mlp is None or not adds_up:
            return None
        return cls(d_head, d_head * n_heads, n_heads // n_shared, d_mlp, n_mlp)


def _size_in(cfg: object, names: Sequence[str], default: int) -> int:
    """Return the first of these sizes that a configuration has, above 0."""
    for name in names:
        size = getattr(cfg, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return default


def flops_of_block(
    block: nn.Module, cfg: object, d: int, n_pos: int
) -> dict[str, float]:
    """Return the flops of one block for one prompt and one token of it, by stage.

    The stages are "trace", "gate" and "jacobians", as in `plan`.
    """
    sizes = _StandardBlock.from_block(block, cfg, d)
    if sizes is None:
        return _flops_of_unknown(block, d, n_pos)
    is_parallel = getattr(cfg, "parallel_attn_mlp", False)
    return _flops_of_standard(sizes, d, n_pos, is_parallel)


def _flops_of_unknown(block: nn.Module, d: int, n_pos: int) -> dict[str, float]:
    """Return an upper bound: every row goes through all weights."""
    row = 2.0 * sum(p.numel() for p in block.parameters() if p.ndim > 1)
    # q Kᵀ and P V, two flops for a multiplication and an addition each.
    rows_meet = 4.0 * n_pos**2 * d
    return {
        "trace": n_pos * row + rows_meet,
        "gate": 4 * n_pos * row + 5 * rows_meet,
        # One backward pass of one row for each row of J.
        "jacobians": d * row,
    }


def _flops_of_standard(
    sizes: _StandardBlock, d: int, n_pos: int, is_parallel: bool
) -> dict[str, float]:
    d_head, d_z, group = sizes.d_head, sizes.d_z, sizes.group
    # Keys and values are shared by a group of heads.
    qkv = 2.0 * d * (d_z + 2 * d_z // group)
    mlp = 2.0 * sizes.n_mlp * d * sizes.d_mlp
    mlp_before = 2.0 * (sizes.n_mlp - 1) * d * sizes.d_mlp
    attention = qkv + 2.0 * d * d_z
    rows_meet = 4.0 * n_pos**2 * d_z
    # W_out after the slopes, W_O after the heads' Jacobians, and in sequence the MLP's
    # Jacobian after attention's.
    products = 2.0 * d**2 * (sizes.d_mlp + d_z + d * (not is_parallel))
    # W_Q, W_K and W_V behind the gradients of q, k and v, and the rows that meet.
    heads = 6.0 * d_head * d_z * d + 4.0 * group * d_head * d_z * n_pos
    return {
        "trace": n_pos * (attention + mlp) + rows_meet,
        # The backward pass of q Kᵀ and P V is two products for each.
        "gate": 4 * (n_pos * attention + mlp) + 5 * rows_meet,
        # The block on the token, and its queries, keys, values and what enters the
        # MLP's nonlinearity once more.
        "jacobians": products + heads + attention + mlp + qkv + mlp_before,
    }
