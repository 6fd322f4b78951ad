"""GGUF files: converted once into a copy in the user's cache, by transformers, and read
from that copy later.

Most of the time of reading such a file goes to its tokenizer, which transformers and
gguf read several times. The copy is read as any folder is, and its weights may stay on
disk. It holds the dequantised weights in float32.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tl_coupling.arguments import warn_caller
from tl_coupling.models.cache import cache_root, is_whole, write_copy
from tl_coupling.models.completeness import LoadedWeights, check_depth, load_whole
from tl_coupling.models.errors import ModelError
from tl_coupling.models.loaded import version
from tl_coupling.models.weights.gguf_contents import CompletedConfig, GgufContents
from tl_coupling.models.weights.quantized import drop_quantization, needs_package
from tl_coupling.progress import with_progress

# The beginning of the names of a layer's weights.
_LAYER = re.compile(r"blk\.(\d+)\.")
# Bytes read at a time.
_CHUNK = 2**24
# Changes when the same file is read as another model, so that earlier copies are made
# again: 2 places scaled rotations and other keys that transformers skips.
_READING = 2


def is_gguf(name: str) -> bool:
    """Say whether a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


class GgufModel:
    """The model in a GGUF file: `folder`, the copy in HuggingFace format, or `loaded`
    where none could be written.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = Path(name)
        if not self.path.is_file():
            raise ModelError(
                f"there is no file {name!r}: wanted a GGUF file, or another model's name "
                "or folder"
            )
        needs_package(repr(name), "gguf")
        # transformers may read the same file differently in another version.
        made_by = f"transformers-{version('transformers')}-{_READING}"
        self.folder: Path | None = (
            cache_root() / f"gguf-{_checksum(self.path)}-{made_by}-float32"
        )
        self.loaded: LoadedWeights | None = None
        self.contents: GgufContents | None = None
        self.config: Any = None
        self.tokenizer: Any = None

    def convert(self, needs_folder: bool) -> None:
        """Write the copy unless it is there.

        Where the cache cannot be written, keep the model itself, with a warning.

        Raises:
            ModelError: a file that is damaged, lacks weights or has others than its
                configuration says, or is of an architecture that transformers does not
                know; the cache cannot be written, and `needs_folder`.
        """
        folder = self.folder
        assert folder is not None
        if is_whole(folder):
            return
        steps = (
            self._check_header,
            self._read_config,
            self._read_tokenizer,
            self._read_weights,
        )
        with self._errors_named():
            for step in with_progress(
                steps, None, f"converting {self.path.name}, once"
            ):
                step()
        try:
            write_copy(folder, self._save)
        except Exception as error:
            # Too little memory is no fault of the cache, nor of the file.
            if isinstance(error, MemoryError):
                raise
            # The writer of safetensors has errors of its own for a full disk.
            problem = (
                f"the converted copy of {self.name!r} cannot be kept in "
                f"{folder.parent} ({error})"
            )
            if needs_folder:
                raise ModelError(
                    f'{problem}, and `memory="stream"` reads from it: set '
                    "XDG_CACHE_HOME"
                ) from error
            warn_caller(
                f"{problem}: the file is converted again each time; XDG_CACHE_HOME says "
                "where caches are"
            )
            self.folder = None
            return
        self.loaded = None

    def untrained(self, fresh: Callable[[Any, Any], nn.Module]) -> nn.Module:
        """Return what `fresh` makes of HuggingFace's class and the configuration;
        weights are not read, neither from the copy nor from the file.
        """
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        assert self.folder is not None
        with self._errors_named():
            if is_whole(self.folder):
                self.config = AutoConfig.from_pretrained(self.folder)
                self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
            else:
                self._check_header()
                self._read_config()
                self._read_tokenizer()
            return _plain(fresh(AutoModelForCausalLM, self.config))

    @property
    def _file(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.path.parent,
            "gguf_file": self.path.name,
        }

    def _check_header(self) -> None:
        """Raise ModelError on a depth that nobody builds, and on layers beyond it,
        which transformers leaves out.
        """
        self.contents = GgufContents.from_file(self.name, self.path)
        n_layers = self.contents.settings.get("block_count")
        if n_layers is None:
            return
        check_depth(self.name, {"block_count": n_layers})
        matches = map(_LAYER.match, self.contents.tensors)
        layers = [int(match[1]) for match in matches if match]
        deepest = max(layers, default=-1)
        if deepest >= n_layers:
            raise ModelError(
                f"{self.name!r} holds weights of layer {deepest}, counted from 0, and "
                f"says that it has {n_layers} layers: its configuration is another "
                "model's; convert the model again"
            )

    def _read_config(self) -> None:
        from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

        assert self.contents is not None
        fields, _ = PretrainedConfig.get_config_dict(**self._file)
        if fields["model_type"] in CONFIG_MAPPING:
            self.config = CompletedConfig(self.contents, fields).config()
        else:
            self.config = AutoConfig.from_pretrained(**self._file)

    def _read_tokenizer(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(**self._file)

    def _read_weights(self) -> None:
        from transformers import AutoModelForCausalLM

        options = {
            "dtype": torch.float32,
            "attn_implementation": "eager",
            "config": self.config,
        }
        load = AutoModelForCausalLM.from_pretrained
        assert self.contents is not None
        self.loaded = load_whole(
            self.name, load, file=self.contents, **self._file, **options
        )
        _plain(self.loaded.model)

    def _save(self, folder: Path) -> None:
        assert self.loaded is not None
        model: Any = self.loaded.model
        state = model.state_dict()
        for key in self.loaded.missing_of_head:
            # Random numbers are not kept as if they were the file's: the copy lacks
            # them too.
            state.pop(key, None)
        model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Turn errors of transformers and gguf into a ModelError that says what to do."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            if isinstance(error, MemoryError) or "can't allocate memory" in message:
                raise
            advice = (
                "the file is damaged, or not a GGUF file; download it again and compare "
                "its checksum"
            )
            if "not supported" in message:
                advice = "load the same model from a folder or hub name in HuggingFace format"
            raise ModelError(
                f"could not load {self.name!r}: {advice} ({type(error).__name__}: "
                f"{message})"
            ) from error


def _plain(model: Any) -> nn.Module:
    """Return a model that came from a GGUF file so that it can be saved.

    It would refuse to, although its weights are plain float32 by now.
    """
    model.config = drop_quantization(model.config)
    model.config.architectures = [type(model).__name__]
    vars(model).pop("hf_quantizer", None)
    return model


def _checksum(path: Path) -> str:
    """Return the first half of the file's SHA-256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(_CHUNK), b"")
        title = f"checksum of {path.name}, in pieces of 16 MiB"
        for chunk in with_progress(chunks, None, title):
            digest.update(chunk)
    return digest.hexdigest()[:32]
