"""What provenances have in common: a fact that is missing, one that is None, and order."""

from itertools import permutations

import pytest

from tl_coupling.results import (
    check_one_model,
    common_facts,
    differing_facts,
    joined_provenance,
)

NEWER = {"model": "a", "checkpoint": None, "device": "cpu", "seed": 0}
OLDER = {"model": "a", "device": "cuda"}
OTHER = {"model": "a", "checkpoint": 1000, "device": "cpu", "seed": 0}


def test_what_all_hold_alike_is_common_in_any_order() -> None:
    """None where others lack the fact is not what these say, whichever comes first."""
    for provenances in permutations([NEWER, OLDER]):
        assert common_facts(*provenances) == {"model": "a"}
    for provenances in permutations([NEWER, NEWER, OTHER]):
        assert common_facts(*provenances) == {"model": "a", "device": "cpu", "seed": 0}
    assert common_facts(NEWER) == common_facts(NEWER, NEWER) == NEWER


def test_facts_in_common_may_be_taken_one_after_the_other() -> None:
    for first, second, third in permutations([NEWER, OLDER, OTHER]):
        at_once = common_facts(first, second, third)
        assert common_facts(common_facts(first, second), third) == at_once


def test_a_fact_that_is_missing_does_not_contradict_none() -> None:
    names = ["model", "checkpoint", "device", "seed", "nothing"]
    for provenances in permutations([NEWER, OLDER]):
        assert differing_facts(provenances, names) == ["device", "seed"]
    assert differing_facts([NEWER, OLDER, OTHER], names) == [
        "checkpoint",
        "device",
        "seed",
    ]


def test_an_unknown_digest_contradicts_no_other_and_hides_none() -> None:
    first, second = {"weights_digest": "1"}, {"weights_digest": "2"}
    for unknown in ({}, {"weights_digest": None}):
        assert not differing_facts([unknown, first], ["weights_digest"])
        for provenances in permutations([unknown, first, second]):
            assert differing_facts(provenances, ["weights_digest"])


@pytest.mark.parametrize("fact", ["model", "quantization", "hooks", "part"])
def test_another_model_or_another_way_is_named(fact: str) -> None:
    with pytest.raises(
        ValueError, match=f"^`maps` must be .* same {fact}, got None and"
    ):
        check_one_model({}, {fact: "x"}, "maps")


def test_two_weights_under_one_name_need_labels() -> None:
    first = {"model": "m", "weights_digest": "1"}
    with pytest.raises(ValueError, match=r"both called 'm'.*`label`"):
        check_one_model(first, first | {"weights_digest": "2"}, "maps")


def test_remarks_on_any_prompt_are_there_once() -> None:
    provenances = [{"remarks": ["x", "y"]}, {}, {"remarks": ["y", "z"]}]
    joined = joined_provenance(provenances, ["p", "q", None])
    assert joined == {"prompts": ["p", "q", None], "remarks": ["x", "y", "z"]}
