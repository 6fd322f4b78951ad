"""The survey that is attacked, and what must hold of its folder whatever happened to
it.
"""

import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import xarray

import tiny
import tl_coupling as tlc
from attack.child import Child, done

_MODELS = {"a": "gpt2", "b": "llama"}
PROMPTS = ["w3 w14 w15 w92", "w5 w6 w7", "w8 w9 w10 w11 w12"]
_COSTS = ["seconds", "peak_memory"]
# By name: the bytes of a finished result and when it was written.
Finished = dict[str, tuple[bytes, int]]


class Subject:
    """Two tiny models on three prompts, a unit each; the same survey undisturbed is
    what every other must equal.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, architecture in _MODELS.items():
            tiny.huggingface_model(architecture).save_pretrained(root / name)
            tiny.save_tokenizer(root / name)
        settings = tlc.Settings(k=(2, 4), n_singular_values=4)
        models = {name: str(root / name) for name in _MODELS}
        self.survey = tlc.Survey(models, PROMPTS, settings=settings, prompts_per_unit=1)
        self.calm = root / "calm"
        # The first run pays for imports.
        tlc.run_survey(self.survey, progress=False)
        start = time.perf_counter()
        self.whole = without_costs(
            tlc.run_survey(self.survey, self.calm, progress=False)
        )
        self.seconds = time.perf_counter() - start
        self._values = {
            path.name: xarray.load_dataset(path) for path in self.calm.glob("*.nc")
        }
        self.n_units, self._n_folders = len(self._values), 0

    def new_folder(self) -> Path:
        """Return a place for results."""
        self._n_folders += 1
        return self.root / f"attacked-{self._n_folders}"

    def run(self, folder: Path, **options: Any) -> None:
        """Start the survey, or resume it."""
        tlc.run_survey(self.survey, folder, progress=False, **options)

    def start(self, folder: Path, **options: Any) -> Child:
        """Start or resume it in a process of its own."""
        return Child(lambda: self.run(folder, **options))

    def faults(self, folder: Path, before: Finished, what: str) -> list[str]:
        """Return what is wrong in the folder: a value, a finished unit that is gone or
        was computed again.
        """
        now = finished(folder)
        wrong = [
            name
            for name, (content, _) in now.items()
            if not self._is_right(name, content)
        ]
        again = [name for name, content in before.items() if now.get(name) != content]
        found = [f"wrong value: {name} after {what}" for name in wrong]
        return found + [f"recomputed or lost: {name} after {what}" for name in again]

    def _is_right(self, name: str, content: bytes) -> bool:
        copy = self.root / "copy.nc"
        copy.write_bytes(content)
        return name in self._values and xarray.load_dataset(copy).equals(
            self._values[name]
        )

    def check_opened(self, folder: Path) -> None:
        """Open the folder: what is there must be right, however much is missing."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "[0-9]+ of [0-9]+ units in .* are missing"
            )
            data = without_costs(tlc.open_survey(folder))
        wanted = self.whole.reindex_like(data)
        for name, values in data.data_vars.items():
            if not bool((values.isnull() | (values == wanted[name])).all()):
                raise AssertionError(f"wrong value: {name}")

    def completed(
        self, folder: Path, what: str, expected: tuple[int, ...] = (0,)
    ) -> list[str]:
        """Return the faults of a run that does the rest, whose results must be those of
        the undisturbed one.
        """

        return done(
            lambda: check_run(self.survey, folder, self.whole),
            f"run again after {what}",
            expected,
        )


def check_run(survey: tlc.Survey, folder: Path, whole: xarray.Dataset) -> None:
    """Run a survey, start or end: the results must be those of the undisturbed one,
    `without_costs`.
    """
    data = tlc.run_survey(survey, folder, progress=False)
    for one in (data, tlc.open_survey(folder)):
        if not without_costs(one).equals(whole):
            raise AssertionError("wrong value")


def finished(folder: Path) -> Finished:
    """Return the finished units, read without the library: a record that says so, and a
    result with its checksum.
    """
    found: Finished = {}
    for path in sorted(folder.glob("[!.]*.json")) if folder.is_dir() else []:
        result = path.with_suffix(".nc")
        try:
            record, content = json.loads(path.read_text()), result.read_bytes()
        except (OSError, ValueError, RecursionError):
            continue
        same = (
            isinstance(record, dict)
            and record.get("sha256") == hashlib.sha256(content).hexdigest()
        )
        if same and record.get("status") == "finished":
            found[result.name] = (content, result.stat().st_mtime_ns)
    return found


def without_costs(data: xarray.Dataset) -> xarray.Dataset:
    """Return what must be the same however a survey came about."""
    return data.drop_vars(_COSTS).load()
