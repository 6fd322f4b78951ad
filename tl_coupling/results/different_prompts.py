"""Prompts that must differ, and what their provenances have in common."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_coupling.results.provenance import check_one_model, joined_provenance

# In a provenance: the digest of what entered the first block.
INPUT_DIGEST = "input_digest"
# Of two prompts in one line of a title, how many characters each has at most.
_LONGEST_NAME = 24


class DifferentPrompts:
    """Prompts that must differ: one that came twice would count as two, and intervals
    over prompts would be too narrow.

    A prompt is told by its tokens, or its pixels, and by a digest of what entered the
    first block, each with what else the model was called with. Its name does not count:
    only where none of these is known, its text or the name of its image tells.

    `argument` holds the prompts, for errors.
    """

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._names: list[str] = []
        self._name_of_identity: dict[object, str] = {}
        self._provenances: list[dict[str, Any]] = []
        # Facts that the next trace is compared with.
        self._reference: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._names)

    @property
    def provenance(self) -> dict[str, Any]:
        """Of a result over all traced prompts.

        Ask for it when all are measured: remarks are added until then.
        """
        return joined_provenance(self._provenances, self._names)

    def add(
        self,
        facts: Mapping[str, Any],
        name: str,
        *,
        token: object = None,
        numbers: Tensor | None = None,
    ) -> None:
        """Take a prompt; raise ValueError where it came before.

        Args:
            facts: what is known of it, as in a provenance.
            name: what the error calls it; by default its number.
            token: of a prompt that may come at several tokens, which one.
            numbers: what was measured of it, which tells it where no fact does.
        """
        name = name or str(len(self))
        found = list(_identities(facts))
        if not found and numbers is not None:
            found = [("numbers", digest_of(numbers))]
        identities = [(identity, token) for identity in found]
        for identity in identities:
            if identity in self._name_of_identity:
                called = repr(self._name_of_identity[identity])
                if called != repr(name):
                    called += f" and {name!r}"
                raise ValueError(
                    f"in `{self._argument}` one prompt is there twice, as {called}: give "
                    "each once, or it would count as two"
                )
        self._name_of_identity |= dict.fromkeys(identities, name)
        self._names.append(name)

    def add_traced(self, trace: Any, name: str | None = None) -> None:
        """Take a traced prompt, as `add` does; ValueError for one of another model.

        `trace` is a `Trace`, or what has a stream, `residual`, and no provenance.
        """
        facts: dict[str, Any] = getattr(trace, "provenance", {})
        self._reference = check_one_model(
            self._reference or facts, facts, self._argument
        )
        # A trace that `trace` did not make has no digest. The stream of others may be
        # on disk.
        digest = facts.get(INPUT_DIGEST) or digest_of(trace.residual[0])
        self.add({**facts, INPUT_DIGEST: digest}, name or prompt_name(facts))
        self._provenances.append(facts)


def digest_of(numbers: Float[Tensor, "..."]) -> str:
    """Return the SHA-256 of numbers, in float32: the same in every wider dtype."""
    content = numbers.detach().cpu().float().contiguous().numpy()
    return hashlib.sha256(content.tobytes()).hexdigest()


def prompt_name(facts: Mapping[str, Any]) -> str:
    """Return a prompt's text; of token ids their texts, of an image its name."""
    image = facts.get("image") or {}
    name = facts.get("prompt") or image.get("name")
    texts = list(facts.get("str_tokens") or ())
    # Without a tokenizer they are numbers, which would run into each other.
    is_numbers = texts == [str(token) for token in facts.get("tokens") or ()]
    return name or (" " if is_numbers else "").join(texts)


def prompts_in_words(provenance: Mapping[str, Any]) -> str:
    """Return the first and the last prompt of a result over several, each cut short;
    nothing where they are not known.
    """
    names = [" ".join(name.split()) for name in provenance.get("prompts") or () if name]
    if len(names) < 2:
        return ""
    ends = [
        name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1].rstrip() + "…"
        for name in (names[0], names[-1])
    ]
    between = ", " if len(names) == 2 else " … "
    return between.join(f"“{end}”" for end in ends)


def _identities(facts: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what tells a prompt from others; the same of any two is the same prompt."""
    image = facts.get("image") or {}
    tokens = facts.get("tokens")
    content = {
        "tokens": None if tokens is None else tuple(tokens),
        "pixels": image.get("pixels_sha256"),
        "input": facts.get(INPUT_DIGEST),
    }
    # Two images may have one name, and two lists of tokens one text.
    called = {"text": facts.get("prompt"), "image": image.get("name")}
    is_known = any(value is not None for value in content.values())
    # Arguments of the model beside a prompt (its `position_ids`) are part of the
    # prompt.
    beside = json.dumps(facts.get("inputs"), sort_keys=True, default=str)
    for kind, value in (content if is_known else called).items():
        if value is not None:
            yield kind, (value, beside)
