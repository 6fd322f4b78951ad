"""What an intervention does to a model's predictions."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_coupling.arguments import checked
from tl_coupling.blocks import own_arithmetic, trace
from tl_coupling.directions.interventions import Hook
from tl_coupling.models import input_device, model_input
from tl_coupling.prompts import Prompt
from tl_coupling.results import DifferentPrompts, Saved
from tl_coupling.statistics import Difference, paired_difference

if TYPE_CHECKING:
    import pandas

# How much memory the logits of one pass may take.
_BYTES_OF_LOGITS = 200_000_000
# Log-probabilities are in float64 unless a caller asks for less.
_BYTES_OF_NUMBER = 8


class Effects(Saved):
    """Effects on prompts of conditions of several kinds; the others control the first.

    A subclass has the tensors `EFFECTS`, over conditions first and prompts last.

    Attributes:
        EFFECTS: the one that tables and differences are of by default comes first.
        FIRST: what the first kind is called in the columns of a table.
        kinds: of each condition.
        prompts: ids.
    """

    EFFECTS: ClassVar[tuple[str, ...]]
    FIRST: ClassVar[str]
    kinds: tuple[str, ...]
    prompts: tuple[str, ...]

    @checked
    def of(
        self, kind: str | None = None, effect: str | None = None
    ) -> Float[np.ndarray, "n_prompts ..."]:
        """Return an effect on each prompt, mean over draws; of the first kind by default.

        Raises:
            ValueError: a kind or an effect that is not here.
        """
        return self._drawn(kind, effect).mean(0).T

    @checked
    def against(self, control: str, effect: str | None = None) -> Difference:
        """Return the effect of the first kind minus that of another.

        The interval is over prompts: a paired t interval of each prompt's means over
        draws.
        """
        return paired_difference(self.of(control, effect), self.of(None, effect))

    @checked
    def draws(
        self, kind: str | None = None, effect: str | None = None
    ) -> Float[np.ndarray, "n_draws ..."]:
        """Return the mean effect over prompts of each draw of a kind."""
        return self._drawn(kind, effect).mean(-1)

    @checked
    def to_dataframe(self) -> "pandas.DataFrame":
        """Return one row for each kind: means, and intervals over prompts.

        `draws_low` and `draws_high` are the smallest and the largest mean of a draw.

        Example:
            >>> result = tlc.directions.rotate(model, ["w1 w2 w3", "w4 w5"], [0], n_draws=2)
            >>> result.to_dataframe().kind.tolist()
            ['alone', 'shrunk']
        """
        import pandas

        rows: list[dict[str, object]] = []
        for kind in dict.fromkeys(self.kinds):
            effect, less = self._intervals(kind)
            rows.append(
                {
                    "kind": kind,
                    self.EFFECTS[0]: float(effect.estimate),
                    "low": float(effect.low),
                    "high": float(effect.high),
                    "draws_low": self.draws(kind).min(),
                    "draws_high": self.draws(kind).max(),
                    f"{self.FIRST}_less_this": float(less.estimate),
                    f"{self.FIRST}_less_this_low": float(less.low),
                    f"{self.FIRST}_less_this_high": float(less.high),
                    "kl": self._drawn(kind, "kl").mean(),
                    "n_prompts": len(self.prompts),
                }
            )
        return pandas.DataFrame(rows)

    def _intervals(self, kind: str) -> tuple[Difference, Difference]:
        """Return the effect of a kind with its interval, and the first kind's less it."""
        values = self.of(kind)
        # Beside zeros the paired interval is the t interval of the effect itself.
        return paired_difference(np.zeros_like(values), values), self.against(kind)

    def _drawn(
        self, kind: str | None, effect: str | None
    ) -> Float[np.ndarray, "n_draws ... n_prompts"]:
        """Return an effect of each draw of a kind on each prompt, in float64."""
        kind = kind or self.kinds[0]
        effect = effect or self.EFFECTS[0]
        for name, names in ((kind, self.kinds), (effect, self.EFFECTS)):
            if name not in names:
                raise ValueError(
                    f"there is no {name!r} here, only {', '.join(dict.fromkeys(names))}"
                )
        drawn: np.ndarray = getattr(self, effect).double().cpu().numpy()
        return drawn[np.array(self.kinds) == kind]


def tokens_by_id(
    model: nn.Module,
    prompts: Sequence[Prompt],
    prepend_bos: bool | None,
    first_position: int,
) -> dict[str, Tensor]:
    """Return the tokens of each prompt, by its id, as many as it has.

    Raises ValueError for one that is too short, and for two that are the same.
    """
    tokens_of_prompts: dict[str, Tensor] = {}
    different = DifferentPrompts("prompts")
    for prompt in prompts:
        tokens = _tokens(model, prompt, prepend_bos)
        if len(tokens) < 2:
            raise ValueError(
                f"prompt {prompt.id!r}: wanted at least 2 tokens, to predict one from "
                f"the other, got {len(tokens)}"
            )
        if first_position >= len(tokens):
            raise ValueError(
                f"`first_position` must be below {len(tokens)}, the number of tokens of "
                f"prompt {prompt.id!r}, got {first_position}: nothing would be changed"
            )
        # Prompts are told apart by their tokens: one text under two names is one
        # prompt.
        different.add({"tokens": tokens.tolist()}, prompt.id)
        tokens_of_prompts[prompt.id] = tokens
    return tokens_of_prompts


def _tokens(
    model: nn.Module, prompt: Prompt, prepend_bos: bool | None
) -> Int[Tensor, " n_pos"]:
    tokens = model_input(model, prompt.content, prepend_bos).tokens
    if tokens is None:
        raise ValueError(
            f"prompt {prompt.id!r}: interventions are measured by the next token, and "
            "this model reads images: wanted a model of text"
        )
    return tokens


def measured_model(model: nn.Module, prompts: Iterable[Tensor]) -> nn.Module:
    """Return the model that `trace` measures on these prompts.

    It is this one, unless it is a bridge that computes something else than the
    HuggingFace model that it was made of.
    """
    for tokens in prompts:
        measured = trace(model, tokens).model
        if measured is not model:
            return measured
    return model


def rows_at_once(n_pos: int, d_vocab: int) -> int:
    """Return how many rows of a batch have logits that fit into memory."""
    return max(1, _BYTES_OF_LOGITS // (n_pos * d_vocab * _BYTES_OF_NUMBER))


def log_probabilities(
    model: Any,
    tokens: Int[Tensor, " n_pos"],
    hooks: Sequence[Hook] = (),
    n_rows: int = 1,
    positions: slice = slice(None),
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "n_rows n_some d_vocab"]:
    """Return log-probabilities of a batch of copies of one prompt, with hooks in place,
    at some of its positions.
    """
    batch = tokens.to(input_device(model)).expand(n_rows, -1)
    with torch.no_grad(), own_arithmetic(model), model.hooks(fwd_hooks=list(hooks)):
        logits = model(batch, return_type="logits")
    return logits[:, positions].to(dtype).log_softmax(-1)


def kl(
    log_p_before: Float[Tensor, "... d_vocab"],
    log_p_after: Float[Tensor, "n_rows ... d_vocab"],
) -> Float[Tensor, "n_rows ..."]:
    """Return `KL(before ‖ after)` of each row, in nats, from log-probabilities."""
    return (log_p_before.exp() * (log_p_before - log_p_after)).sum(-1)


def losses(
    log_p: Float[Tensor, "n_rows n_pos d_vocab"], tokens: Int[Tensor, " n_pos"]
) -> Float[Tensor, " n_rows"]:
    """Return the mean negative log-likelihood of the tokens from the second on, nats."""
    # Position t predicts token t + 1: the last position predicts none that is known.
    next_tokens = tokens[1:].to(log_p.device).expand(len(log_p), -1)[..., None]
    return -log_p[:, :-1].gather(-1, next_tokens).double().mean((1, 2))
