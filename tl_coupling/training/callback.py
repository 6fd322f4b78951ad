"""Coupling at every so many steps of HuggingFace's `Trainer`, or of any loop."""

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from tl_coupling.arguments import Count, Positive, Text, checked, warn_caller
from tl_coupling.measures import mean_name, null_name
from tl_coupling.results import DifferentPrompts, check_alike
from tl_coupling.training.measuring import CouplingOfStep, measure
from tl_coupling.training.parallel import refuse_sharded, unwrapped

if TYPE_CHECKING:
    import xarray

Ids = Sequence[int] | Tensor
# Provenance that all steps of a run have in common.
_FACTS = ("model", "n_layers", "d_model")


@checked
class CouplingCallback(TrainerCallback):
    """Measure coupling on some prompts as a model is trained.

    With HuggingFace's `Trainer`::

        coupling = CouplingCallback(prompts, every=100, k=10)
        trainer = Trainer(model, …, callbacks=[coupling])
        coupling.log = trainer.log  # to what the trainer reports to

    in any other loop, Lightning's `on_train_batch_start` or accelerate's on the main
    process::

        coupling.step(step, model)

    Training is not disturbed: losses are the same to the bit (`measure`). Under DDP the
    first process measures. The model is measured without wrappers of DDP, DataParallel,
    Fabric, DeepSpeed and `torch.compile`; under FSDP and ZeRO-3 no process has all
    weights, which is refused. A callback holds one run: each model gets its own.

    Args:
        prompts: texts, or token ids.
        every: steps between measurements; the first is before training.
        k: numbers of top singular vectors, one or several.
        tokenizer: of texts; by default the trainer's `processing_class`.
        blocks: gives a model's residual blocks, in order; by default its longest list
            of modules of one class.
        max_seconds: for all measurements together; after that there are none, with a
            warning.

    Attributes:
        log: is called with each measurement's numbers, by name.
        steps: measured steps.

    Raises:
        ValueError: no prompts, one twice, or an empty one; no k; texts without a
            tokenizer; blocks that are not found. At a step, token ids beyond the model's
            vocabulary, a model of another depth or width than before, another model at a
            step that was measured, and weights that are spread over processes.

    Example:
        >>> Layer = torch.nn.TransformerEncoderLayer
        >>> network = torch.nn.Sequential(*[Layer(16, 2, 32, norm_first=True)] * 2)
        >>> callback = tlc.training.CouplingCallback([[1, 2, 3]], every=10, k=4)
        >>> callback.every, callback.steps
        (10, [])
    """

    def __init__(
        self,
        prompts: Text | Sequence[Text] | Sequence[Sequence[int]],
        every: Count = 100,
        k: Count | Sequence[Count] = (10,),
        *,
        tokenizer: Any = None,
        blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        max_seconds: Positive | None = None,
    ) -> None:
        self.prompts: list[str | Ids] = (
            [prompts] if isinstance(prompts, str) else list(prompts)
        )
        if not self.prompts:
            raise ValueError("`prompts` is empty: wanted at least one")
        for number, prompt in enumerate(self.prompts):
            _check_holds_tokens(len(prompt), number)
        different = DifferentPrompts("prompts")
        for prompt in self.prompts:
            is_text = isinstance(prompt, str)
            facts = {"prompt": prompt} if is_text else {"tokens": list(prompt)}
            different.add(facts, str(prompt))
        self.every = every
        self.ks = sorted({k} if isinstance(k, int) else set(k))
        if not self.ks:
            raise ValueError("`k` is empty: wanted at least one number")
        self.tokenizer = tokenizer
        self.blocks = blocks or residual_blocks
        self.max_seconds = max_seconds
        self.log: Callable[[dict[str, float]], object] | None = None
        self.seconds = 0.0
        # Numbers alone: a trace would keep the activations of every step.
        self._datasets: dict[int, xarray.Dataset] = {}
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        self._facts: dict[str, Any] = {}

    @property
    def steps(self) -> list[int]:
        """The steps that were measured."""
        return list(self._datasets)

    def step(self, step: int, model: nn.Module) -> dict[str, float] | None:
        """Measure the model if it is the turn of this step; return what is logged.

        Raises as `measure`, and ValueError as the class says.
        """
        if step % self.every:
            return None
        refuse_sharded(model)
        model = unwrapped(model)
        if step in self._datasets:
            if self._models[step]() is not model:
                raise ValueError(
                    f"step {step} was measured already, of another model: make a "
                    "CouplingCallback for each model"
                )
            return None
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            warn_caller(
                f"coupling took {self.seconds:.0f} s of {self.max_seconds:.0f} s "
                f"(`max_seconds`): it is not measured at step {step} and later ones"
            )
            return None
        blocks = list(self.blocks(model))
        device = next(model.parameters()).device
        start = time.perf_counter()
        measured: list[CouplingOfStep] = []
        losses: list[float] = []
        # Two texts may be one prompt to the model.
        different = DifferentPrompts("prompts")
        for number, prompt in enumerate(self.prompts):
            ids = self._ids(prompt, number, device)
            outputs: list[Any] = []

            def run(
                ids: Tensor = ids, number: int = number, outputs: list[Any] = outputs
            ) -> None:
                with _RowsChecked(number):
                    outputs.append(model(ids))

            measured.append(measure(blocks, run, self.ks[-1]))
            different.add_traced(measured[-1].trace, str(prompt))
            losses.append(_loss(outputs[0], ids))
        self._check_same_run(measured[0])
        self._datasets[step] = self._dataset_of_step(measured, losses)
        self._models[step] = weakref.ref(model)
        taken = time.perf_counter() - start
        self.seconds += taken
        logs = self._logs(measured) | {"coupling/seconds": taken}
        if self.log is not None:
            self.log(logs)
        return logs

    def _check_same_run(self, measured: CouplingOfStep) -> None:
        """Raise ValueError for a model that cannot be the one of the steps before."""
        provenance = measured.depth.provenance
        facts = {name: provenance.get(name) for name in _FACTS}
        check_alike(
            self._facts or facts,
            facts,
            _FACTS,
            "`model` must be that of the steps before: wanted",
            "make a CouplingCallback for each model",
        )
        self._facts = facts

    def to_dataset(self) -> "xarray.Dataset":
        """Return the run as `checkpoint_sweep` does: `plot_emergence` and others take it.

        Example:
            >>> Layer = torch.nn.TransformerEncoderLayer
            >>> tlc.training.CouplingCallback([[1]], k=4).to_dataset()
            Traceback (most recent call last):
            ValueError: nothing was measured yet: train, or call `step`
        """
        import xarray

        if not self._datasets:
            raise ValueError("nothing was measured yet: train, or call `step`")
        run = xarray.concat(self._datasets.values(), "checkpoint")
        return run.assign_coords(checkpoint=self.steps)

    def _dataset_of_step(
        self, measured: Sequence[CouplingOfStep], losses: Sequence[float]
    ) -> "xarray.Dataset":
        """Return what is kept of a step, along `prompt` and `k`."""
        import xarray

        maps = [result.depth for result in measured]
        coupling = [[depth.coupling(k).tolist() for k in self.ks] for depth in maps]
        means = [[depth.mean(k) for k in self.ks] for depth in maps]
        nulls = [[depth.null(k) for k in self.ks] for depth in maps]
        scores = [result.line_shape_score for result in measured]
        dims = ("prompt", "k")
        return xarray.Dataset(
            {
                "coupling": ((*dims, "layer", "other_layer"), coupling),
                mean_name("coupling"): (dims, means),
                null_name("coupling"): (dims, nulls),
                "line_shape_score": ("prompt", scores),
                "loss": ("prompt", list(losses)),
            },
            {
                "prompt": [str(i) for i in range(len(self.prompts))],
                "k": self.ks,
                "layer": list(maps[0].row_layers),
                "other_layer": list(maps[0].col_layers),
            },
            {"model": maps[0].provenance.get("model"), "diagonal": 0},
        )

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure the model before its first step."""
        # In every process: where one alone ended, the others would wait for it.
        refuse_sharded(kwargs["model"])
        self._on_step(state, control, kwargs)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure the model every so many steps."""
        self._on_step(state, control, kwargs)

    def _on_step(
        self, state: TrainerState, control: TrainerControl, given: dict[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self.tokenizer is None:
            self.tokenizer = given.get("processing_class")
        # A log in between would stand for the one of the loss that is due.
        logs_loss = control.should_log
        self.step(state.global_step, given["model"])
        control.should_log = logs_loss

    def _ids(self, prompt: str | Ids, number: int, device: torch.device) -> Tensor:
        if not isinstance(prompt, str):
            return torch.as_tensor(prompt, device=device).reshape(1, -1)
        if self.tokenizer is None:
            raise ValueError(
                "`tokenizer` is needed for prompts that are texts: give it, or give the "
                "trainer a `processing_class`"
            )
        ids: Tensor = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        _check_holds_tokens(ids.shape[-1], number)
        return ids.to(device)

    def _logs(self, measured: Sequence[CouplingOfStep]) -> dict[str, float]:
        """Return the means over prompts."""
        logs_of_prompts = [result.logs() for result in measured]
        return {
            name: sum(logs[name] for logs in logs_of_prompts) / len(measured)
            for name in logs_of_prompts[0]
        }


def residual_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the residual blocks of a HuggingFace model: its longest list of modules of
    one class.

    Raises ValueError where there is none, or two are as long.
    """
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len({type(part) for part in module}) == 1
    ]
    longest = max(map(len, lists), default=0)
    found = [blocks for blocks in lists if len(blocks) == longest]
    if longest < 2 or len(found) > 1:
        raise ValueError(
            f"`blocks` must say which modules of {type(model).__name__} are its residual "
            "blocks: `blocks=lambda model: model.layers`"
        )
    return found[0]


def _check_holds_tokens(n_tokens: int, number: int) -> None:
    if n_tokens == 0:
        raise ValueError(f"`prompts[{number}]` is empty: wanted at least one token")


class _RowsChecked(TorchFunctionMode):
    """Raises ValueError where a table of embeddings lacks a row that a prompt asks for.

    torch's own error names neither, and on a GPU ends all work there. Not by hooks on
    modules: some tables of positions are called with something else than their rows.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call a function of torch, of which look-ups are checked."""
        kwargs = kwargs or {}
        if func is nn.functional.embedding:
            self._check(*args, **kwargs)
        return func(*args, **kwargs)

    def _check(self, input: Tensor, weight: Tensor, *_: object, **__: object) -> None:
        if not input.numel():
            return
        lowest = int(input.min())
        highest = int(input.max())
        if lowest < 0 or highest >= len(weight):
            raise ValueError(
                f"`prompts[{self.number}]` asks for rows {lowest} … {highest} of a table "
                f"of embeddings that has {len(weight)}: give ids of the model's "
                "vocabulary, and no more tokens than its context holds"
            )


def _loss(output: Any, ids: Tensor) -> float:
    """Return the loss per token of what a language model gave; NaN for any other."""
    logits = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3 or ids.shape[1] < 2:
        return float("nan")
    return float(
        nn.functional.cross_entropy(
            logits[0, :-1].float(), ids[0, 1:].to(logits.device)
        )
    )
