"""Token ids of one prompt: the shapes that are taken, and what is said of others."""

import pytest
import torch

from tl_coupling.arguments import ids_of_one_prompt


@pytest.mark.parametrize(
    "ids",
    [
        [3, 14],
        (3, 14),
        torch.tensor([3, 14], dtype=torch.int32),
        torch.tensor([[3, 14]]),
    ],
)
def test_a_batch_of_one_and_a_list_are_one_prompt(ids: object) -> None:
    tokens = ids_of_one_prompt(ids, "prompt")
    assert tokens.tolist() == [3, 14]
    assert tokens.dtype == torch.long


def test_several_prompts_or_none_are_refused_by_the_name_of_the_argument() -> None:
    with pytest.raises(
        ValueError,
        match=r"^`prompt` must be text, or token ids \[n_pos\] or \[1 n_pos\] of one "
        r"prompt; got shape \[2, 3\]: give each prompt by itself, unpadded$",
    ):
        ids_of_one_prompt(torch.ones(2, 3), "prompt")
    with pytest.raises(ValueError, match=r"^`tokens` must be token ids \[n_pos\]"):
        ids_of_one_prompt(torch.tensor(3), "tokens")
    with pytest.raises(ValueError, match="the prompt is empty: wanted at least one"):
        ids_of_one_prompt([], "tokens")
