"""Names of the models that studies measure, as pictures show them."""

# By the name of the file or the model that is measured.
MODEL_NAMES = {
    "all-MiniLM-L6-v2": "MiniLM-L6",
    "gemma-3-270m-q4_k_m": "Gemma-3-270M",
    "qwen2.5-coder-0.5b-instruct-q4_k_m": "Qwen2.5-Coder-0.5B",
    "smollm2-135m": "SmolLM2-135M",
}


def model_name(source: str) -> str:
    """Return what pictures call a model; of one that is not known, its own name."""
    return MODEL_NAMES.get(source, source)
