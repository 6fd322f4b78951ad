"""What a coupling across depth takes, before it is computed: bytes, and products of
matrices.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from tl_coupling.arguments import Count, checked
from tl_coupling.jacobians.memory import MapSizes, Needs
from tl_coupling.jacobians.sizes import MemoryLimit, in_words, n_bytes
from tl_coupling.models import Memory, empty_model, facts_of
from tl_coupling.spectra import fitting_k, flops_of_svd
from tl_coupling.traces import Trace


@dataclass(frozen=True)
class Plan:
    """What `depth_coupling` of one prompt takes. Sizes are in bytes; printing it shows
    them.

    Attributes:
        model, n_layers, d_model, n_pos, k: what is measured.
        streamed: whether weights stay on disk.
        weights: all of them, as they are held, in memory or on disk.
        block: the largest block as it is computed, beside the weights; 0 where it is
            computed as it is held.
        jacobians: all of them; in memory, or in a temporary file if `spilled`.
        result: the matrices A.
        working: singular vectors, and what one Jacobian or the SVDs of some take at a
            time.
        peak: the estimate of what is in memory at most, beside the interpreter and its
            libraries.
        flops: of the products of matrices, by stage: "trace", "gate", "jacobians",
            "svd", "pairs".

    Example:
        >>> plan = tlc.plan(trace, k=8)
        >>> plan.jacobians, plan.result  # 2 of 32 × 32 and 4 of 8 × 8 numbers of 4 bytes
        (8192, 1024)
        >>> plan.peak == plan.weights + plan.jacobians + plan.result + plan.working
        True
    """

    model: str
    n_layers: int
    d_model: int
    n_pos: int
    k: int
    streamed: bool
    weights: int
    block: int
    jacobians: int
    spilled: bool
    result: int
    working: int
    flops: dict[str, float]

    @property
    def peak(self) -> int:
        """Bytes in memory at most."""
        held = 0 if self.streamed else self.weights
        return (
            held
            + self.block
            + (0 if self.spilled else self.jacobians)
            + self.result
            + self.working
        )

    def __str__(self) -> str:
        where = "on disk" if self.streamed else "in memory"
        kept = "in a temporary file" if self.spilled else "in memory"
        sizes = {
            f"weights, {where}": self.weights,
            "one block, computed at a time": self.block,
            f"Jacobians, {kept}": self.jacobians,
            "result": self.result,
            "working memory": self.working,
            "peak, beside the interpreter": self.peak,
        }
        head = f"{self.model}: {self.n_layers} layers of width {self.d_model}, {self.n_pos} tokens, k = {self.k}"
        products = (
            f"  {stage:<31}{flops / 1e9:>10.3g} GFLOP"
            for stage, flops in self.flops.items()
        )
        return "\n".join(
            [
                head,
                *(f"  {what:<31}{in_words(size):>10}" for what, size in sizes.items()),
                *products,
            ]
        )


@checked
def plan(
    trace: Trace | nn.Module | str,
    k: int | None = None,
    tokens: Count | None = None,
    *,
    memory: Memory | None = None,
    max_memory: MemoryLimit | None = None,
) -> Plan:
    """Bytes and matrix products of `depth_coupling` before it runs, for one prompt and
    one orientation.

    Of a model's name only the configuration is read.

    Args:
        trace: a traced prompt, a model, or a model's name as for `load_model`.
        k: as in `depth_coupling`.
        tokens: how long the prompt is; that of the trace by default, else 64.
        memory: how a model that is named would be loaded, `"resident"` in float32 by
            default.
        max_memory: as in `depth_coupling`.

    Raises:
        ValueError: `memory` for a model that is loaded, k out of range, less
            `max_memory` than is needed.
        ModelError: an unknown name.

    Flops count an addition and a multiplication as two, of products of matrices alone.
    "gate" is what a Jacobian is checked with: three forward passes and a backward one,
    with the MLP on one row; a stiff block takes more. "jacobians" are those of a block
    of attention and an MLP, at one token; of any other block (a mixture of experts) an
    upper bound, `d_model` rows through all its weights. "svd" has as many steps as the
    spectra of SmolLM2 take. The estimate of memory is of one process on a CPU or of one
    GPU.

    Example:
        >>> tlc.plan(trace, k=8).flops["pairs"]
        81920.0
    """
    if isinstance(trace, str):
        model = empty_model(trace)
        blocks = max(
            (m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_size
        )
        name, streamed = trace, memory == "stream"
        config: Any = model.config
        cfg: Any = config.get_text_config()
        d = int(cfg.hidden_size)
        held = computed = 4
    else:
        if memory is not None:
            raise ValueError(
                "`memory` is for a model's name: one that is loaded has its own"
            )
        model = trace.model if isinstance(trace, Trace) else trace
        blocks, weight = (
            getattr(model, "blocks", nn.ModuleList(model.children())),
            next(model.parameters()),
        )
        name = _name(trace)
        cfg = getattr(model, "cfg", None)
        d = trace.d_model if isinstance(trace, Trace) else int(cfg.d_model)
        streamed, held, computed = (
            facts_of(model).is_streamed,
            weight.element_size(),
            max(4, weight.element_size()),
        )
    k, n_layers = (
        fitting_k(k, d),
        trace.n_layers if isinstance(trace, Trace) else len(blocks),
    )
    n_pos = tokens or (trace.n_pos if isinstance(trace, Trace) else 64)
    needs = Needs.of(blocks[0], MapSizes(d, computed, n_layers, n_layers, k))
    limit = None if max_memory is None else n_bytes(max_memory)
    needs = needs if limit is None else needs.within(limit)
    of_blocks = [_flops(block, cfg, d, n_pos) for block in blocks]
    # A model may run its blocks several times.
    flops = {
        stage: sum(one[stage] for one in of_blocks) * n_layers / len(blocks)
        for stage in of_blocks[0]
    }
    if held < computed and not streamed:
        # The model's own call is repeated as well.
        flops["gate"] += flops["trace"]
    return Plan(
        model=name,
        n_layers=n_layers,
        d_model=d,
        n_pos=n_pos,
        k=k,
        streamed=streamed,
        weights=held * _size(model),
        block=computed * max(map(_size, blocks)) if streamed or held < computed else 0,
        jacobians=needs.jacobians,
        spilled=not needs.kept_in_memory(limit, blocks[0]),
        result=needs.result,
        working=needs.spectra + needs.working,
        flops=flops
        | {
            "svd": n_layers * flops_of_svd(d, min(k + 1, d)),
            "pairs": 2.0 * n_layers**2 * (k * d**2 + k**2 * d),
        },
    )


class _Standard(NamedTuple):
    """Sizes of a block of attention, `group` heads of which share keys, and an MLP of
    `n_mlp` matrices.
    """

    d_head: int
    d_z: int
    group: int
    d_mlp: int
    n_mlp: int

    @classmethod
    def of(cls, block: nn.Module, cfg: Any, d: int) -> "_Standard | None":
        """Those of a block whose matrices add up to these; a bridge has joint ones
        beside what it cut from them.
        """

        def size(*names: str, default: int) -> int:
            found = (getattr(cfg, name, None) for name in names)
            return next(
                (one for one in found if isinstance(one, int) and one > 0), default
            )

        n_heads = size("n_heads", "num_attention_heads", default=1)
        d_head = size("d_head", "head_dim", default=d // n_heads)
        n_shared = size("n_key_value_heads", "num_key_value_heads", default=n_heads)
        d_mlp = size("d_mlp", "intermediate_size", "ffn_dim", "n_inner", default=4 * d)
        matrices = [p for p in block.parameters() if p.ndim > 1]
        in_mlp = [
            p.numel()
            for p in matrices
            if p.ndim == 2 and {d_mlp, 2 * d_mlp} & set(p.shape)
        ]
        in_attention, joint = (
            sum(p.numel() for p in matrices) - sum(in_mlp),
            d_head * (n_heads + 2 * n_shared) * d,
        )
        expected = joint + d_head * n_heads * d
        adds_up = any(
            abs(in_attention - one) < 0.02 * one for one in (expected, expected + joint)
        )
        n_mlp = {2 * d * d_mlp: 2, 3 * d * d_mlp: 3, 5 * d * d_mlp: 3}.get(sum(in_mlp))
        if n_mlp is None or not adds_up:
            return None
        return cls(d_head, d_head * n_heads, n_heads // n_shared, d_mlp, n_mlp)


def _flops(block: nn.Module, cfg: Any, d: int, n_pos: int) -> dict[str, float]:
    """Those of one block, for one prompt and one token of it."""
    if (sizes := _Standard.of(block, cfg, d)) is None:
        row, meet = (
            2.0 * sum(p.numel() for p in block.parameters() if p.ndim > 1),
            4.0 * n_pos**2 * d,
        )
        return {
            "trace": n_pos * row + meet,
            "gate": 4 * n_pos * row + 5 * meet,
            "jacobians": d * row,
        }
    d_head, d_z, group, d_mlp, n_mlp = sizes
    qkv, mlp = 2.0 * d * (d_z + 2 * d_z // group), 2.0 * n_mlp * d * d_mlp
    attention, meet = qkv + 2.0 * d * d_z, 4.0 * n_pos**2 * d_z
    # W_out after the slopes, W_O after the heads' Jacobians, and in sequence the MLP's
    # Jacobian after attention's.
    products = (
        2.0 * d**2 * (d_mlp + d_z + d * (not getattr(cfg, "parallel_attn_mlp", False)))
    )
    heads = 6.0 * d_head * d_z * d + 4.0 * group * d_head * d_z * n_pos
    return {
        "trace": n_pos * (attention + mlp) + meet,
        # The backward pass of q Kᵀ and P V is two products for each.
        "gate": 4 * (n_pos * attention + mlp) + 5 * meet,
        # Keys and values of the prompt, and the block on the token, its MLP once more.
        "jacobians": products + heads + n_pos * qkv + attention + 2 * mlp,
    }


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _name(of: Trace | nn.Module) -> str:
    if isinstance(of, Trace):
        return str(of.provenance["model"])
    return str(
        facts_of(of).loaded_as.get("model")
        or getattr(getattr(of, "cfg", None), "model_name", type(of).__name__)
    )
