"""What a coupling across depth takes, before it is computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tl_coupling.arguments import (
    Count,
    NamedFloatDtype,
    Positive,
    checked,
    dtype_named,
)
from tl_coupling.blocks import Trace
from tl_coupling.jacobians.budget import (
    Budget,
    JacobianOptions,
    MapSizes,
    MemoryLimit,
    Method,
    format_bytes,
    free_memory,
    n_bytes,
)
from tl_coupling.jacobians.matrix_free import N_PROBES
from tl_coupling.models import Memory, empty_model, facts_of
from tl_coupling.models.devices import present_device
from tl_coupling.models.own_model import input_device
from tl_coupling.spectra import fitting_k, flops_of_svd, products_of_triplets

# How much longer a flop takes in a row through a block's weights, which memory has to
# give for every few rows, than in products of large matrices, at the peak. Of ten
# triplets, committed by `benchmarks.gpu`: 7.6 to 8.4 on two cores, 10 to 49 on an H100.
_SLOWNESS_OF_ROWS = 8.0
_SLOWNESS_OF_ROWS_ON_GPU = 24.0
# Tokens of a prompt that is not there yet.
_DEFAULT_TOKENS = 64
# Rows of the square matrices whose product measures a rate: enough to reach the peak of
# a CPU, in a tenth of a second on two cores.
_ROWS_ON_CPU = 2048
_ROWS_ON_GPU = 8192
_N_MEASUREMENTS = 3


@dataclass(frozen=True)
class Plan:
    """What `depth_coupling` of one prompt takes.

    Sizes are in bytes; printing it shows them.

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
            libraries, and beside what grows with the prompt: the forward pass, and the
            attention weights of one block.
        flops: of the products of matrices, by stage: "trace", "gate", "jacobians",
            "svd", "pairs"; of `method="products"`, "triplets" for "jacobians" and
            "svd".
        cheaper: the method that takes less time, "jacobians" or "products": the one of
            fewer flops, where those of rows through a block's weights count 8 times, on
            a GPU 24 times, as memory bounds them and not arithmetic.
        work: the sum of `flops`, where those of such rows count as often: the time
            that all take, in flops at the peak.
        available: what the peak may take: the memory that was free on the device when
            this was planned, and what a loaded model's weights take there already;
            infinity where that is not known.
        rate: Tflop/s of the device, if it was given or measured, else None.

    Example:
        >>> plan = tlc.plan(trace, k=8)
        >>> # 2 of 32 × 32 and 4 of 8 × 8 numbers of 4 bytes
        >>> plan.jacobians, plan.result
        (8192, 1024)
        >>> plan.peak == plan.weights + plan.jacobians + plan.result + plan.working
        True
        >>> plan.fits("1GiB"), plan.fits(1000)
        (True, False)
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
    cheaper: Method
    work: float
    available: float
    rate: float | None = None

    @property
    def minutes(self) -> float | None:
        """`work` at `rate`, a lower bound (see `plan`); None without a rate."""
        if self.rate is None:
            return None
        return self.work / (self.rate * 1e12) / 60

    @checked
    def fits(self, memory: MemoryLimit | None = None) -> bool:
        """Say whether the peak fits into so many bytes, by default `available`.

        The interpreter with its libraries, and what grows with the prompt, come on top.

        Example:
            >>> tlc.plan(trace, k=8).fits()
            True
        """
        limit = self.available if memory is None else n_bytes(memory)
        return self.peak <= limit

    @property
    def peak(self) -> int:
        """Bytes in memory at most."""
        peak = self.block + self.result + self.working
        if not self.streamed:
            peak += self.weights
        if not self.spilled:
            peak += self.jacobians
        return peak

    def __str__(self) -> str:
        place_of_weights = "on disk" if self.streamed else "in memory"
        place_of_jacobians = "in a temporary file" if self.spilled else "in memory"
        sizes = {
            f"weights, {place_of_weights}": self.weights,
            "one block, computed at a time": self.block,
            f"Jacobians, {place_of_jacobians}": self.jacobians,
            "result": self.result,
            "working memory": self.working,
            "peak, beside the interpreter": self.peak,
        }
        head = (
            f"{self.model}: {self.n_layers} layers of width {self.d_model}, "
            f"{self.n_pos} tokens, k = {self.k}"
        )
        lines = [
            f"  {name:<31}{format_bytes(size):>10}" for name, size in sizes.items()
        ]
        for stage, flops in self.flops.items():
            lines.append(f"  {stage:<31}{flops / 1e9:>10.3g} GFLOP")
        lines.append(f"  {'method that takes less time':<31}{self.cheaper:>10}")
        if self.minutes is not None:
            label = f"at {self.rate:.3g} Tflop/s, at least"
            is_short = self.minutes < 1
            duration = 60 * self.minutes if is_short else self.minutes
            unit = "seconds" if is_short else "minutes"
            lines.append(f"  {label:<31}{duration:>10.3g} {unit}")
        if not self.fits():
            lines.append(
                f"  does not fit in {format_bytes(self.available)}: {self._remedy}"
            )
        return "\n".join([head, *lines])

    @property
    def _remedy(self) -> str:
        """What makes the largest part of the peak smaller."""
        sizes_by_remedy = {
            "measure fewer layers, or give a smaller k": self.result,
            "give `max_memory`, or a smaller `chunk_size`": self.working + self.block,
        }
        if not self.streamed:
            remedy = 'load the model with `memory="stream"`'
            # A block of weights in 16 bits is copied to be computed.
            if not self.block:
                remedy += ", or a `dtype` of 16 bits"
            sizes_by_remedy[remedy] = self.weights
        if not self.spilled:
            remedy = "give `max_memory`, which keeps Jacobians in a file"
            sizes_by_remedy[remedy] = self.jacobians
        return max(sizes_by_remedy, key=lambda remedy: sizes_by_remedy[remedy])


@checked
def plan(
    trace: Trace | nn.Module | str,
    k: int | None = None,
    tokens: Count | None = None,
    *,
    memory: Memory | None = None,
    dtype: NamedFloatDtype | None = None,
    max_memory: MemoryLimit | None = None,
    method: Method = "jacobians",
    rate: Positive | Literal["measured"] | None = None,
) -> Plan:
    """Return the bytes and matrix products of `depth_coupling` before it runs.

    They are of one prompt and one orientation. Of a model's name only the configuration
    is read.

    Args:
        trace: a traced prompt, a model, or a model's name as for `load_model`.
        k: as in `depth_coupling`.
        tokens: how long the prompt is; that of the trace by default, else 64.
        memory: how a model that is named would be loaded, `"resident"` in float32 by
            default.
        dtype: of the weights of a model that is named, as for `load_model`.
        max_memory, method: as in `depth_coupling`.
        rate: Tflop/s of products of large float32 matrices, for an estimate of minutes;
            "measured" measures them, in less than a second, on the model's device (of a
            name, where `load_model` puts it). By default there are no minutes.

    Raises:
        ValueError: `memory` or `dtype` for a model that is loaded, k out of range, a
            `max_memory` that is too small.
        ModelError: an unknown name.

    Flops count an addition and a multiplication as two, of products of matrices alone.
    "gate" is what a Jacobian is checked with: three forward passes and a backward one,
    with the MLP on one row; a stiff block takes more. "jacobians" are those of a block
    of attention and an MLP, at one token; of any other block (a mixture of experts) an
    upper bound, `d_model` rows through all its weights. "svd" has as many steps as the
    spectra of SmolLM2 take. The estimate of memory is of one process on a CPU or of one
    GPU.

    Minutes are a lower bound: a block that is small for the device does not reach its
    peak. In the benchmarks, models of widths 768 to 2048 took 2.5 to 3 times as long on
    two cores, blocks of widths 4096 to 8192 1.2 to 1.6 times; on an H100 blocks of
    width 8192 took twice as long, of 5120 four times, of 4096 nine times, and narrower
    ones far longer. Of experts, whose flops are an upper bound, they are an estimate.

    Example:
        >>> tlc.plan(trace, k=8).flops["pairs"]
        81920.0
        >>> plan = tlc.plan("smollm2-135m", k=10, rate=0.2)
        >>> f"{60 * plan.minutes:.1f} seconds"
        '0.6 seconds'
    """
    if isinstance(trace, str):
        planned = _Planned.from_name(
            trace, memory == "stream", dtype_named(dtype or torch.float32)
        )
        device = present_device(None)
        loaded_bytes = 0
    elif memory is not None or dtype is not None:
        raise ValueError(
            "`memory` and `dtype` are for a model given by its name: a loaded one has "
            "its own"
        )
    else:
        planned = _Planned.from_model(trace)
        device = input_device(planned.blocks[0])
        loaded_bytes = planned.held_itemsize * planned.n_weights
        if planned.is_streamed:
            loaded_bytes = 0
    d = planned.d_model
    n_layers = planned.n_layers
    k = fitting_k(k, d)
    n_pos = tokens or planned.n_pos
    # Blocks of one model are alike; the first stands for all.
    block = planned.blocks[0]
    # By products no Jacobian is kept.
    are_kept = method == "jacobians"
    sizes = MapSizes(
        *(d, planned.itemsize, n_layers, n_layers, k), rows_are_columns=are_kept
    )
    options = JacobianOptions(max_memory=max_memory)
    budget = Budget.from_block(block, sizes, options)
    stages = planned.flops_by_stage(n_pos)
    row = stages.pop("row")
    before = {stage: stages[stage] for stage in ("trace", "gate")}
    n_triplets = min(k + 1, d)
    n_pairs = n_layers**2
    by_jacobians = before | {
        "jacobians": stages["jacobians"],
        "svd": n_layers * flops_of_svd(d, n_triplets),
        "pairs": 2.0 * n_pairs * (k * d**2 + k**2 * d),
    }
    by_products = before | {
        "triplets": row * (N_PROBES + products_of_triplets(n_triplets)),
        "pairs": row * n_layers * k + 2.0 * n_pairs * k**2 * d,
    }
    # Triplets, and what couples them, are nothing but rows.
    rows_of_products = by_products["triplets"] + row * n_layers * k
    excess = planned.slowness_of_rows - 1
    time_by_products = sum(by_products.values()) + excess * rows_of_products
    time_by_jacobians = sum(by_jacobians.values())
    if rate == "measured":
        rate = _measured_rate(device)
    return Plan(
        model=planned.name,
        n_layers=n_layers,
        d_model=d,
        n_pos=n_pos,
        k=k,
        streamed=planned.is_streamed,
        weights=planned.held_itemsize * planned.n_weights,
        block=planned.block_bytes,
        jacobians=budget.jacobians,
        spilled=not budget.keeps_in_memory,
        result=budget.result,
        working=budget.spectra + budget.working,
        flops=by_jacobians if are_kept else by_products,
        cheaper="products" if time_by_products < time_by_jacobians else "jacobians",
        work=time_by_jacobians if are_kept else time_by_products,
        available=free_memory(device) + loaded_bytes,
        rate=rate,
    )


def _measured_rate(device: torch.device) -> float:
    """Return the Tflop/s of a product of large float32 matrices, the best of some."""
    n_rows = _ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_GPU
    X = torch.ones(n_rows, n_rows, device=device)
    seconds = []
    # The first one prepares the device.
    for _ in range(1 + _N_MEASUREMENTS):
        start = time.perf_counter()
        # Reading one number waits for the device.
        (X @ X)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2.0 * n_rows**3 / min(seconds[1:]) / 1e12


@dataclass(frozen=True)
class _Planned:
    """What is known of a model before it is measured.

    Attributes:
        name: what results call it.
        blocks: its blocks, which may run several times.
        cfg: its configuration, whoever made it.
        n_layers: how often a block runs in one pass.
        d_model: width of the stream.
        n_pos: tokens of the prompt.
        n_weights: how many there are.
        is_streamed: whether weights stay on disk.
        held_itemsize: bytes of a weight as it is held.
        itemsize: bytes of a number in what is computed.
        slowness_of_rows: how much longer a flop of rows takes where it is computed.
    """

    name: str
    blocks: Sequence[nn.Module]
    cfg: object
    n_layers: int
    d_model: int
    n_pos: int
    n_weights: int
    is_streamed: bool
    held_itemsize: int
    itemsize: int
    slowness_of_rows: float = _SLOWNESS_OF_ROWS

    @classmethod
    def from_name(cls, name: str, is_streamed: bool, dtype: torch.dtype) -> "_Planned":
        """Return what a model's configuration says, which is all that is read of it."""
        model = empty_model(name)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        # The blocks are the list of modules with the most weights.
        sizes = [_size(modules) for modules in lists]
        blocks = list(lists[sizes.index(max(sizes))])
        config: Any = model.config
        cfg = config.get_text_config()
        return cls(
            name=name,
            blocks=blocks,
            cfg=cfg,
            n_layers=len(blocks),
            d_model=_size_in(cfg, ("hidden_size",), default=0),
            n_pos=_DEFAULT_TOKENS,
            n_weights=_size(model),
            # Weights of a named model are converted to its dtype as they are read.
            is_streamed=is_streamed,
            held_itemsize=dtype.itemsize,
            # A model in 16 bits is linearised in float32.
            itemsize=max(4, dtype.itemsize),
        )

    @classmethod
    def from_model(cls, traced: Trace | nn.Module) -> "_Planned":
        """Return the facts of a model that is loaded, or of a traced prompt's."""
        trace = traced if isinstance(traced, Trace) else None
        model = traced.model if isinstance(traced, Trace) else traced
        blocks = list(getattr(model, "blocks", model.children()))
        cfg = getattr(model, "cfg", None)
        # A network need not have parameters.
        held = next(model.parameters(), torch.empty(0))
        held_itemsize = held.element_size()
        # Weights that stay on disk are computed on the CPU, or moved from it.
        is_on_cpu = held.device.type in ("cpu", "meta")
        return cls(
            name=_name(traced),
            blocks=blocks,
            cfg=cfg,
            n_layers=trace.n_layers if trace else len(blocks),
            d_model=trace.d_model if trace else _size_in(cfg, ("d_model",), default=0),
            n_pos=trace.n_pos if trace else _DEFAULT_TOKENS,
            n_weights=_size(model),
            is_streamed=facts_of(model).is_streamed,
            held_itemsize=held_itemsize,
            # A model in 16 bits is linearised in float32.
            itemsize=max(4, held_itemsize),
            slowness_of_rows=(
                _SLOWNESS_OF_ROWS if is_on_cpu else _SLOWNESS_OF_ROWS_ON_GPU
            ),
        )

    @property
    def block_bytes(self) -> int:
        """The largest block as it is computed; 0 where it is computed as it is held."""
        if self.is_streamed or self.held_itemsize < self.itemsize:
            return self.itemsize * max(map(_size, self.blocks))
        return 0

    def flops_by_stage(self, n_pos: int) -> dict[str, float]:
        """Return the flops of all layers, by stage: "trace", "gate", "jacobians".

        "row" is one row through all blocks' weights: a product with a Jacobian.
        """
        flops_by_block = [
            _block_flops(block, self.cfg, self.d_model, n_pos) for block in self.blocks
        ]
        # A model may run its blocks several times.
        flops = {
            stage: sum(block_flops[stage] for block_flops in flops_by_block)
            * self.n_layers
            / len(self.blocks)
            for stage in flops_by_block[0]
        }
        if self.held_itemsize < self.itemsize and not self.is_streamed:
            # The model's own call is repeated as well.
            flops["gate"] += flops["trace"]
        return flops


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _name(measured: Trace | nn.Module) -> str:
    if isinstance(measured, Trace):
        return str(measured.provenance["model"])
    loaded_as = facts_of(measured).loaded_as.get("model")
    cfg = getattr(measured, "cfg", None)
    return str(loaded_as or getattr(cfg, "model_name", type(measured).__name__))


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
        mlp_entries = sum(
            p.numel()
            for p in matrices
            if p.ndim == 2 and {d_mlp, 2 * d_mlp} & set(p.shape)
        )
        attention_entries = sum(p.numel() for p in matrices) - mlp_entries
        joint = d_head * (n_heads + 2 * n_shared) * d
        expected = joint + d_head * n_heads * d
        # A bridge has joint matrices beside what it cut from them.
        adds_up = any(
            abs(attention_entries - entries) < 0.02 * entries
            for entries in (expected, expected + joint)
        )
        n_mlp_by_entries = {2 * d * d_mlp: 2, 3 * d * d_mlp: 3, 5 * d * d_mlp: 3}
        n_mlp = n_mlp_by_entries.get(mlp_entries)
        if n_mlp is None or not adds_up:
            return None
        return cls(d_head, d_head * n_heads, n_heads // n_shared, d_mlp, n_mlp)

    def flops(self, d: int, n_pos: int, is_parallel: bool) -> dict[str, float]:
        """Return the flops for a stream of width d, by stage."""
        d_z = self.d_z
        group = self.group
        # Keys and values are shared by a group of heads.
        qkv = 2.0 * d * (d_z + 2 * d_z // group)
        mlp = 2.0 * self.n_mlp * d * self.d_mlp
        attention = qkv + 2.0 * d * d_z
        score_products = 4.0 * n_pos**2 * d_z
        return {
            "trace": n_pos * (attention + mlp) + score_products,
            # The backward pass of q Kᵀ and P V is two products for each.
            "gate": 4 * (n_pos * attention + mlp) + 5 * score_products,
            # The block on the token, and its tangents.
            "jacobians": attention + mlp + self._tangents(d, n_pos, is_parallel),
            "row": attention + mlp + 4.0 * n_pos * d_z,
        }

    def _tangents(self, d: int, n_pos: int, is_parallel: bool) -> float:
        """Return the flops of products of tangents: those of one token."""
        d_z = self.d_z
        d_kv = d_z // self.group
        n_heads = d_z // self.d_head
        # W_out after the slopes; in sequence, the MLP's Jacobian after attention's; and
        # W_Q.
        into = self.d_mlp + d_z * (not is_parallel) + d_z
        of_heads = self.d_head
        if self.group == 1:
            # W_V, and the scores by the token's own key.
            into += d_z + n_heads
        else:
            # W_K and W_V behind the heads that share them.
            into += 2 * d_kv
            of_heads += self.d_head + 1
        # The products of each head with its query (and value), and of its key with all
        # rows.
        heads = 2.0 * d_z * (of_heads + 1) * d
        rows = 2.0 * d_z * (self.d_head + 1) * n_pos
        return 2.0 * d**2 * into + heads + rows


def _size_in(cfg: object, names: Sequence[str], default: int) -> int:
    """Return the first of these sizes that a configuration has, above 0."""
    for name in names:
        size = getattr(cfg, name, None)
        if isinstance(size, int) and size > 0:
            return size
    return default


def _block_flops(block: nn.Module, cfg: object, d: int, n_pos: int) -> dict[str, float]:
    """Return the flops of one block for one prompt and one token of it, by stage.

    The stages are "trace", "gate" and "jacobians", as in `plan`, and "row".
    """
    sizes = _StandardBlock.from_block(block, cfg, d)
    if sizes is None:
        return _unknown_block_flops(block, d, n_pos)
    is_parallel = getattr(cfg, "parallel_attn_mlp", False)
    return sizes.flops(d, n_pos, is_parallel)


def _unknown_block_flops(block: nn.Module, d: int, n_pos: int) -> dict[str, float]:
    """Return an upper bound: every row goes through all weights."""
    row = 2.0 * sum(p.numel() for p in block.parameters() if p.ndim > 1)
    # q Kᵀ and P V, two flops for a multiplication and an addition each.
    score_products = 4.0 * n_pos**2 * d
    return {
        "trace": n_pos * row + score_products,
        "gate": 4 * n_pos * row + 5 * score_products,
        # By products of large matrices; of experts, of those alone that the token meets.
        "jacobians": d * row,
        "row": row + 4.0 * n_pos * d,
    }
