"""Token ids, made from text as the model's own tokenizer means it, and their names."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from tl_coupling.arguments import check_text, ids_of_one_prompt
from tl_coupling.models.facts import facts_of
from tl_coupling.models.loaded import config_of, context_length, is_bridge
from tl_coupling.models.own_model import OwnModel

_GIVE_IDS = "give the prompt as token ids"
_ALREADY = (
    "the text {} with {!r} already, so that the tokenizer's was not added: give token "
    "ids for both"
)
# Files that tokenizers are made of: vocabularies by their many names.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "*.model",
    "vocab*",
    "*vocab",
    "merges*",
    "*.tiktoken",
    "tekken.json",
    "bpe.codes",
)
# No tokenizer of text has so few pieces, and no more of these are special.
_MOST_SPECIAL = 2000


class Tokens(NamedTuple):
    """One prompt's token ids, how they were made, JSON-able, and what a user would not
    expect of it.
    """

    ids: Int[Tensor, " n_pos"]
    provenance: dict[str, object]
    remarks: tuple[str, ...] = ()


def tokenize(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> tuple[Int[Tensor, " n_pos"], dict[str, object]]:
    """Return the token ids of one prompt, and their provenance. Ids are taken as they
    are.

    Text begins with what the tokenizer prepends by itself (`prepend_bos=None`), nothing
    (`False`), or at least a BOS token (`True`). Text that begins with it already, as
    chat templates write it, gets no second one. What a tokenizer appends (`</s>`) is
    left off, so that the last position is the last token of the text. Models that read
    both ways (BERT) keep it: their other tokens see the `[SEP]`, and were trained to.

    Raises:
        ValueError: an empty prompt, ids of more than one prompt, text without a
            tokenizer or with lone surrogates, no BOS token.

    Example:
        >>> tokens, provenance = tlc.models.tokenize(model, "w3 w14 w15", prepend_bos=True)
        >>> tokens
        tensor([ 0,  3, 14, 15])
    """
    tokens = tokens_of(model, prompt, prepend_bos)
    return tokens.ids, tokens.provenance


def tokens_of(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> Tokens:
    """Return the same with remarks: on a BOS token that the text has already, and on a
    tokenizer that does not know the text.
    """
    if not isinstance(prompt, str):
        unknown = "token ids given"
        provenance: dict[str, object] = {"prepend_bos": unknown, "append_eos": unknown}
        return Tokens(ids_of_one_prompt(prompt, "prompt"), provenance)
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not knows_text(tokenizer):
        raise ValueError(f"this model has no tokenizer: {_GIVE_IDS}")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    check_text(prompt, "prompt")
    # The text alone; what the tokenizer puts around it is found by comparison.
    text = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    remarks = _remark_on_unknown(text, tokenizer)
    prefix, suffix = _special_tokens_around(text, prompt, saved_tokenizer(model))
    if prepend_bos is False:
        prefix = []
    elif prepend_bos and not prefix:
        if tokenizer.bos_token_id is None:
            raise ValueError(
                "`prepend_bos=True`, but this model's tokenizer has no BOS token"
            )
        prefix = [tokenizer.bos_token_id]
    if suffix and not _reads_both_ways(model):
        suffix = []
    # A special token that is there twice is taken once: a chat template writes it, and
    # the tokenizer adds it. Ids alone do not tell: an unknown word may have that of the
    # BOS token.
    beginning = _written(prefix, tokenizer)
    if text[: len(prefix)] == prefix != [] and prompt.lstrip().startswith(beginning):
        text = text[len(prefix) :]
        remarks.append(_ALREADY.format("begins", beginning))
    end = _written(suffix, tokenizer)
    if text[-len(suffix) :] == suffix != [] and prompt.rstrip().endswith(end):
        text = text[: -len(suffix)]
        remarks.append(_ALREADY.format("ends", end))
    ids = torch.tensor([*prefix, *text, *suffix], dtype=torch.long)
    provenance = {"prepend_bos": bool(prefix), "append_eos": bool(suffix)}
    return Tokens(ids, provenance, tuple(remarks))


def _written(ids: list[int], tokenizer: Any) -> str:
    """Return special tokens as a text would hold them."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def knows_text(tokenizer: Any) -> bool:
    """Say whether a tokenizer has words, or pieces of words.

    Of a folder without a tokenizer's files transformers makes, for some architectures,
    one of special tokens alone.
    """
    if tokenizer is None:
        return False
    # Known at once, unlike the vocabulary.
    n_pieces = getattr(tokenizer, "vocab_size", None)
    if isinstance(n_pieces, int) and n_pieces > _MOST_SPECIAL:
        return True
    try:
        vocabulary = set(tokenizer.get_vocab())
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    except (AttributeError, NotImplementedError):
        # One of another make, which need not list its vocabulary.
        return True
    # SentencePiece's mark of a space may be left.
    return len(vocabulary - special) > 1


def lacks_tokenizer(source: str) -> bool:
    """Say whether a model is a folder without any file of which a tokenizer is made,
    and transformers makes none, or one without words, of nothing.
    """
    from transformers import AutoTokenizer

    folder = Path(source)
    files = (path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern))
    if not folder.is_dir() or any(files) or _brings_tokenizer(folder):
        return False
    try:
        # Some read bytes or characters, and need no files.
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # The kind of the exception depends on the architecture.
    except Exception:
        return True
    return not knows_text(tokenizer)


def _brings_tokenizer(folder: Path) -> bool:
    """Say whether a folder names code of its own for its tokenizer: beside that, it may
    need no file.
    """
    for file in ("tokenizer_config.json", "config.json"):
        # Damage to these files is reported when the tokenizer is loaded.
        with suppress(OSError, ValueError, AttributeError):
            fields = json.loads((folder / file).read_text())
            if "AutoTokenizer" in fields.get("auto_map", {}):
                return True
    return False


def wordless_tokenizer() -> Any:
    """Return a tokenizer that has no words, to stand for none."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # With a BOS token, TransformerLens would load it anew, to have it prepended.
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate(special.values())}
    words = Tokenizer(WordLevel(vocabulary, unk_token=special["unk_token"]))
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def _remark_on_unknown(text: list[int], tokenizer: Any) -> list[str]:
    """Return a remark where the tokenizer does not know most of a text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    n_unknown = 0 if unknown is None else text.count(unknown)
    # Single unknown words are common; most of a text is a sign of a wrong tokenizer.
    if 2 * n_unknown <= len(text):
        return []
    return [
        f"{n_unknown} of the text's {len(text)} tokens are "
        f"{tokenizer.unk_token!r}, which this model's tokenizer gives for what it does "
        "not know: the tokenizer may be another model's, or not whole"
    ]


def saved_tokenizer(model: Any) -> Any:
    """Return the model's tokenizer as it was saved, or given with a model in memory.

    TransformerLens may have replaced it by one that always prepends a BOS token.
    """
    tokenizer = model.tokenizer
    # TransformerLens has not seen it, or it prepends no BOS token and was not replaced.
    if isinstance(model, OwnModel) or tokenizer("a")["input_ids"][:1] != [
        tokenizer.bos_token_id
    ]:
        return tokenizer
    trusted = facts_of(model).loaded_as.get("trust_remote_code", False)
    return _reloaded_tokenizer(tokenizer.name_or_path, trusted) or tokenizer


def _special_tokens_around(
    text: list[int], prompt: str, tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after those of the prompt's
    text.
    """
    encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    is_special = encoded["special_tokens_mask"]
    # The mask tells an appended token from the same token in the text, but not every
    # tokenizer fills it in: then the text is looked for from the end.
    masked_start = is_special.index(0) if 0 in is_special else 0
    n_text = len(text)
    for start in (masked_start, *range(len(ids) - n_text, -1, -1)):
        if ids[start : start + n_text] == text:
            return ids[:start], ids[start + n_text :]
    raise ValueError(
        "this model's tokenizer splits the text differently when it adds special "
        f"tokens: {_GIVE_IDS}"
    )


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        # Always passed: without it HuggingFace asks on the terminal.
        return AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None


def _reads_both_ways(model: Any) -> bool:
    """Say whether tokens also see those after them (BERT), so that an appended token
    changes them.
    """
    from transformer_lens.utilities.architectures import MASKED_LM_ARCHITECTURES

    if is_bridge(model) and getattr(config_of(model), "is_decoder", False):
        return False
    if getattr(model.cfg, "architecture", None) in MASKED_LM_ARCHITECTURES:
        return True
    if isinstance(model, OwnModel):
        return model.reads_both_ways
    return getattr(model.cfg, "attention_dir", "causal") == "bidirectional"


def check_tokens(model: Any, tokens: Int[Tensor, " n_pos"]) -> None:
    """Raise ValueError unless a model can be run on token ids."""
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: wanted at least one token")
    n_ctx = context_length(model)
    if n_ctx is not None and n_ctx < len(tokens):
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, this model's context holds {n_ctx}: "
            "shorten the prompt"
        )
    d_vocab = model.cfg.d_vocab
    if d_vocab is None or d_vocab <= 0:
        return
    lowest = int(tokens.min())
    highest = int(tokens.max())
    if lowest < 0 or highest >= d_vocab:
        raise ValueError(
            f"token ids must lie in [0, {d_vocab - 1}], got {lowest} … {highest}"
        )


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Return each token as text; its id where the model has no tokenizer."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not knows_text(tokenizer):
        return tuple(map(str, tokens.tolist()))
    return tuple(
        # Cleaning up would take the space from before a full stop.
        tokenizer.decode([token], clean_up_tokenization_spaces=False)
        for token in tokens.tolist()
    )
