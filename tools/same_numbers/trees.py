"""Trees of the project: commits, checked out in a temporary folder, and the files of
the working tree.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKING_TREE = "the working tree"


class InputError(ValueError):
    """What was asked for cannot be compared; the message is one line."""


def commit_of(revision: str) -> str:
    """Return the full name of a commit.

    Raises:
        InputError: there is none of this name.
    """
    # An option in place of a revision is none.
    name = f"{revision}^{{commit}}"
    answer = _git("rev-parse", "--verify", "--quiet", "--end-of-options", name)
    if answer.returncode != 0:
        raise InputError(f"wanted a commit of {ROOT}, got {revision!r}")
    return answer.stdout.strip()


@contextmanager
def checked_out(commit: str | None, folder: Path) -> Iterator[Path]:
    """Enter a tree in a new folder, which is gone afterwards.

    Args:
        commit: the full name of one; None is the working tree, copied as it is now:
            files that git tracks or would add.
        folder: where; it does not exist yet.
    """
    if commit is None:
        _copy_working_tree(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
        return
    added = _git("worktree", "add", "--detach", str(folder), commit)
    if added.returncode != 0:
        raise InputError(f"could not check out {commit}: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _copy_working_tree(folder: Path) -> None:
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        # Git lists what was deleted and not yet committed, too.
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
