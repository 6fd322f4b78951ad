"""What to do about an error is said by its kind: a wrong name is not blamed for a file."""

import pytest

from tl_coupling.models.advice import advice


@pytest.mark.parametrize(
    ("error", "beginning"),
    [
        (
            OSError(
                "no-such is not a local folder and is not a valid model identifier"
            ),
            "wanted a HuggingFace hub name, a local folder in HuggingFace format, or ",
        ),
        (
            ValueError("Unrecognized model in folder. Should have a `model_type` key"),
            "wanted a HuggingFace hub name, a local folder in HuggingFace format, or ",
        ),
        (
            ImportError("it requires the timm library"),
            "a package is missing that it needs, or is of another version: install wh",
        ),
        (KeyError("hidden_size"), "transformers "),
        (RuntimeError("Sizes of tensors must match"), "transformers "),
    ],
)
def test_the_kind_of_an_error_decides(error: Exception, beginning: str) -> None:
    said = advice(error)
    assert said.startswith(beginning)
    assert said.endswith(f"({type(error).__name__}: {error})")
    assert ("hub name" in said) == beginning.startswith("wanted")
