"""Measure a model that is being trained, and leave it as it was."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from tl_coupling.arguments import checked, shared_changes
from tl_coupling.blocks import Trace, trace_modules
from tl_coupling.comparisons import CouplingMap, depth_coupling
from tl_coupling.training.parallel import refuse_sharded, refuse_sharded_weights
from tl_coupling.trajectories import expodistance, line_shape_score

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class CouplingOfStep:
    """What was measured at one step of training, at one token of one input.

    Attributes:
        coupling: mean coupling of different blocks at k.
        null: what random subspaces would give.
        line_shape_score: of the token's path; 1 is a straight line.
        expodistance: of the token's path; 0 is exponential growth.
        depth: coupling of every two blocks, up to k.
        trace: the traced input.

    Example:
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
        >>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
        >>> step = tlc.training.measure(blocks, lambda: network(x), k=4)
        >>> sorted(step.logs())[:2]
        ['coupling/expodistance', 'coupling/line_shape_score']
    """

    coupling: float
    null: float
    line_shape_score: float
    expodistance: float
    depth: CouplingMap
    trace: Trace

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the table of the map, with the numbers of the token's path in each row.

        Example:
            >>> Layer = torch.nn.TransformerEncoderLayer
            >>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
            >>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
            >>> step = tlc.training.measure(blocks, lambda: network(x), k=4)
            >>> len(step.to_dataframe()), "expodistance" in step.to_dataframe()
            (36, True)
        """
        return self.depth.to_dataframe().assign(
            line_shape_score=self.line_shape_score, expodistance=self.expodistance
        )

    def logs(self) -> dict[str, float]:
        """Return the numbers by the names under which they are logged."""
        return {
            "coupling/mean": self.coupling,
            "coupling/null": self.null,
            "coupling/line_shape_score": self.line_shape_score,
            "coupling/expodistance": self.expodistance,
        }


@checked
def measure(
    blocks: Sequence[nn.Module] | nn.ModuleList | nn.Sequential,
    run: Callable[[], object],
    k: int | None = None,
    *,
    position: int = -1,
) -> CouplingOfStep:
    """Measure coupling across depth of a model in training, and leave it as it was.

    The model runs once in eval mode, without gradients, its blocks in the dtype of their
    weights also under autocast. Whatever happens, the mode of every module, the
    gradients, and the states of random numbers are as before, so that losses that
    follow are the same to the bit.

    Args:
        blocks: the model's residual blocks, in order, as in `trace_modules`: of a
            HuggingFace model `model.model.layers` or `model.transformer.h`.
        run: runs the model once, on one input: `lambda: model(ids)`. Under DDP the
            wrapped model, `lambda: ddp.module(ids)`, on one rank: a call of DDP itself
            would wait for the others.
        k: how many top singular vectors: 50, or all of a narrower model, by default.
        position: the token; the last by default.

    Raises:
        ValueError: as `trace_modules` and `depth_coupling`; weights that are spread over
            processes (FSDP, DeepSpeed's ZeRO-3).

    Cost: a forward pass, and `depth_coupling`.

    Example:
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> blocks = [Layer(16, 2, 32, norm_first=True) for _ in range(3)]
        >>> network, x = torch.nn.Sequential(*blocks), torch.randn(5, 1, 16)
        >>> step = tlc.training.measure(blocks, lambda: network(x), k=4)
        >>> 0 < step.coupling < 1, round(step.null, 3)
        (True, 0.134)
    """
    modules = list(blocks)
    with undisturbed(modules):
        trace = trace_modules(modules, run)
        depth = depth_coupling(trace, k, position, progress=False)
    path = trace.residual[:, trace.position_index(position)]
    return CouplingOfStep(
        coupling=depth.mean(),
        null=depth.null(),
        line_shape_score=float(line_shape_score(path)),
        expodistance=float(expodistance(path)),
        depth=depth,
        trace=trace,
    )


@contextmanager
def undisturbed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Put the blocks, and every module that is called here, in eval mode for a while.

    Random numbers that are drawn here are drawn again afterwards. Raises ValueError for a
    module whose weights are spread over processes, before it is called.
    """
    # Before any of them is changed.
    for block in blocks:
        refuse_sharded(block)
    thread = threading.get_ident()
    devices = {p.device for block in blocks for p in block.parameters()}
    accelerators = [device for device in devices if device.type == "cuda"]
    python_state = random.getstate()
    # The legacy generator is the one that training code shares.
    numpy_state = np.random.get_state()  # noqa: NPY002
    with shared_changes() as undo:

        def switch(module: nn.Module, _: object = None) -> None:
            # Other threads may be training other models.
            if threading.get_ident() != thread:
                return
            # Before its own hooks, in which FSDP and ZeRO-3 wait for other processes.
            refuse_sharded_weights(module)
            if module.training:
                undo.callback(setattr, module, "training", True)
                module.training = False

        for block in blocks:
            for module in block.modules():
                switch(module)
        # `run` calls other modules beside the blocks (embeddings with dropout), and
        # each is known only when it is called. A parent is called before its parts.
        hook = nn.modules.module.register_module_forward_pre_hook(switch)
        undo.enter_context(hook)
        try:
            with torch.random.fork_rng(accelerators), torch.no_grad():
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
