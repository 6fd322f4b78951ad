"""What the provenances of several results have in common, and where they must agree."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

Provenance = Mapping[str, Any]
# Facts that provenances of one model, traced in one way, have in common.
_MODEL_FACTS = (
    "model",
    "checkpoint",
    "untrained",
    "quantization",
    "architecture",
    "adapter",
    "weight_processing",
    "weights_digest",
    "spliced",
    "final_norm",
    "hooks",
    # The part of a block that `part_coupling` compares.
    "part",
    # Done to the Jacobians before they were compared.
    "without",
    "metric",
)
# None where it is not known: of streamed models, and of results of earlier versions.
_UNKNOWN_IS_NONE = ("weights_digest",)


def common_facts(*provenances: Provenance) -> dict[str, Any]:
    """Return the facts that all provenances hold, and alike.

    A fact that one of them lacks is not common, even where it is None in the others:
    the version that wrote this one did not look.
    """
    first, *others = provenances
    return {
        name: fact
        for name, fact in first.items()
        if all(name in other and other[name] == fact for other in others)
    }


def differing_facts(
    provenances: Sequence[Provenance], names: Iterable[str]
) -> list[str]:
    """Return the names of facts in which two provenances contradict each other.

    One that is missing is None. A digest of weights that is not known contradicts no
    other.
    """
    differing = []
    for name in names:
        values = [provenance.get(name) for provenance in provenances]
        if name in _UNKNOWN_IS_NONE:
            values = [value for value in values if value is not None]
        if any(value != values[0] for value in values[1:]):
            differing.append(name)
    return differing


def changes_in_words(provenance: Provenance) -> list[str]:
    """Say what was done to the Jacobians before they were compared."""
    words = []
    if without := provenance.get("without"):
        words.append(f"without the {without}")
    if provenance.get("metric"):
        words.append("in another metric")
    return words


def check_alike(
    first: Provenance,
    other: Provenance,
    names: Iterable[str],
    wanted: str,
    hint: str = "",
) -> None:
    """Raise ValueError for the first of some facts that differs.

    Args:
        first, other: what is compared.
        names: of the facts.
        wanted: how the error's sentence begins: "`maps` must be of".
        hint: what to do instead.
    """
    for name in differing_facts([first, other], names):
        got = f"got {first.get(name)!r} and {other.get(name)!r}"
        raise ValueError(f"{wanted} the same {name}, {got}{hint and f'; {hint}'}")


def check_one_model(
    first: Provenance, other: Provenance, argument: str
) -> dict[str, Any]:
    """Raise ValueError unless two provenances are of one model, traced in one way.

    Returns what the next one is compared with: the first, with a digest that only the
    other knows. Results without a digest agree with all others, and these need not
    agree with each other.

    Args:
        first: the provenance of the first result.
        other: that of another one.
        argument: the name of what holds both, for the error.
    """
    wanted = f"`{argument}` must be of one model, traced in one way: of"
    hint = ""
    if differing_facts([first, other], _MODEL_FACTS) == ["weights_digest"]:
        hint = (
            f"two models of different weights are both called {first.get('model')!r}: "
            "take each alone, and give each a `label` of its own"
        )
    check_alike(first, other, _MODEL_FACTS, wanted, hint)
    learned = {
        name: other[name]
        for name in _UNKNOWN_IS_NONE
        if first.get(name) is None and other.get(name) is not None
    }
    return {**first, **learned}


def joined_provenance(
    provenances: Sequence[Provenance], prompts: Sequence[str | None]
) -> dict[str, Any]:
    """Return the provenance of a result over several prompts.

    It has what all have in common, the names of the prompts, and the remarks on any of
    them, each once.
    """
    remarks = chain.from_iterable(
        provenance.get("remarks", ()) for provenance in provenances
    )
    return common_facts(*provenances) | {
        "prompts": list(prompts),
        "remarks": list(dict.fromkeys(remarks)),
    }
