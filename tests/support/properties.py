"""What property tests share: how many examples, of which shapes, and how close is equal."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

few = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)
batches = st.sampled_from([(), (1,), (3,), (2, 3)])


def close(got: Tensor, wanted: object, tolerance: float = 1e-12) -> None:
    wanted = torch.as_tensor(wanted, dtype=got.dtype)
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True
    )
