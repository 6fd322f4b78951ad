"""Datasets, and the hub of `fake_hub` with what HuggingFace's `datasets` asks of it.

A dataset is a folder as on the hub: a card (`README.md`) whose header lists
configurations, and Parquet files.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from fake_hub import FakeHub, _etag, _Handler, commit_of


def write_dataset(
    folder: Path, config: str, splits: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Write a configuration of a dataset beside those already there, laid out as the
    hub's own conversion to Parquet does.
    """
    listed = "".join(
        f"      - split: {split}\n        path: {config}/{split}-*\n"
        for split in splits
    )
    (folder / config).mkdir(parents=True)
    card, head = folder / "README.md", "---\nconfigs:\n"
    earlier_configs = (
        card.read_text().removeprefix(head).removesuffix("---\n")
        if card.exists()
        else ""
    )
    card.write_text(
        f"{head}{earlier_configs}  - config_name: {config}\n    data_files:\n{listed}---\n"
    )
    for split, rows in splits.items():
        Dataset.from_list([dict(row) for row in rows]).to_parquet(
            folder / config / f"{split}-00000-of-00001.parquet"
        )


class FakeDatasetsHub(FakeHub):
    """`with FakeDatasetsHub({"owner/name": folder, …}) as hub:` serves datasets until
    the block ends.
    """

    def __init__(self, datasets: Mapping[str, Path]) -> None:
        super().__init__(
            {f"datasets/{name}": {"main": folder} for name, folder in datasets.items()}
        )
        self._server.RequestHandlerClass = type(
            "Handler", (_DatasetsHandler,), {"hub": self}
        )


class _DatasetsHandler(_Handler):
    def _api(self, path: str) -> None:
        match = re.fullmatch(
            r"/api/(datasets/[^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.+))?", path
        )
        if match is None or match[1] not in self.hub.repos:
            return self._refuse("RepoNotFound")
        repo, what, wanted, below = match.groups()
        revision = self.hub.revision(repo, wanted)
        if revision is None:
            return self._refuse("RevisionNotFound")
        folder = self.hub.repos[repo][revision]
        if what == "revision":
            return self._json(
                {
                    "_id": "1",
                    "id": repo.removeprefix("datasets/"),
                    "sha": commit_of(repo, revision),
                }
            )
        if not (folder / (below or "")).is_dir():
            return self._refuse("EntryNotFound")
        self._json(
            [
                _entry(folder, path)
                for path in sorted((folder / (below or "")).iterdir())
            ]
        )


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    content = path.read_bytes()
    return {"type": "file", "path": name, "oid": _etag(content), "size": len(content)}
