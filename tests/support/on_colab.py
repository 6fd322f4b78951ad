"""A machine like Colab's for notebooks: the package is installed from its wheel, the
folder is empty, and what a notebook fetches comes from this tree, without a network.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

import address

ROOT = Path(__file__).parents[2]
# What a photograph is fetched from, which is not in the repository.
PHOTOGRAPHS = "http://images.cocodataset.org/"
# In place of `wget -q URL` and `wget -q -O NAME URL`.
_WGET = """#!{python}
import shutil
import sys

*options, url = sys.argv[1:]
name = options[-1] if "-O" in options else url.rpartition("/")[2]
if url.startswith({files!r}):
    shutil.copy({root!r} + "/" + url.removeprefix({files!r}), name)
elif url.startswith({photographs!r}):
    shutil.copy({photograph!r}, name)
else:
    sys.exit(url + " is not there")
"""
_RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
_PLACE_OF_THE_PACKAGE = "import tl_coupling\nprint('package:', tl_coupling.__file__)"


def raw_files() -> str:
    """Return the address below which the files of the repository are fetched."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    owner, name = address.owner_and_name(project, "Repository = ")
    return f"https://raw.githubusercontent.com/{owner}/{name}/main/"


class Colab:
    """An environment with the wheel of this tree, whose dependencies are those of the
    environment that runs the tests.

    Args:
        folder: where it is made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = folder / "environment"
        self._python = self._environment / "bin" / "python"
        builder = ["-m", "hatchling", "build", "--target", "wheel"]
        _run([sys.executable, *builder, "--directory", str(folder / "dist")], cwd=ROOT)
        (wheel,) = (folder / "dist").glob("*.whl")
        venv.create(self._environment, symlinks=True)
        (packages,) = self._environment.glob("lib/python*/site-packages")
        # A path in a file `.pth` is searched, and files `.pth` that lie there are not
        # read: an editable install of the package has no effect here.
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        # Colab's kernel has imported its own package; libraries look for it.
        (packages / "google" / "colab").mkdir(parents=True)
        (packages / "google" / "colab" / "__init__.py").touch()
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
        self._run([*install, str(wheel)], folder)
        self._put_wget()

    def run(self, notebook: Path, folder: Path, hub: Path) -> Any:
        """Return the notebook as it is after it ran in this empty folder.

        Args:
            notebook: its file.
            folder: where it runs, and where what it fetches is written.
            hub: the folder that stands for the model hub.
        """
        content = nbformat.read(notebook, as_version=4)
        before = nbformat.v4.new_code_cell("import google.colab")
        after = nbformat.v4.new_code_cell(_PLACE_OF_THE_PACKAGE)
        content.cells = [before, *content.cells, after]
        given = self._folder / f"{notebook.stem}-given.ipynb"
        result = self._folder / f"{notebook.stem}-run.ipynb"
        nbformat.write(content, given)
        self._run(["-c", _RUN, str(given), str(result)], folder, HF_HOME=str(hub))
        run = nbformat.read(result, as_version=4)
        (place,) = run.cells[-1].outputs
        assert str(self._environment) in place["text"], place["text"]
        return run

    def _put_wget(self) -> None:
        photograph = self._folder / "photograph.jpg"
        Image.linear_gradient("L").convert("RGB").save(photograph)
        wget = self._environment / "bin" / "wget"
        wget.write_text(
            _WGET.format(
                python=sys.executable,
                root=str(ROOT),
                files=raw_files(),
                photographs=PHOTOGRAPHS,
                photograph=str(photograph),
            )
        )
        wget.chmod(0o755)

    def _run(self, arguments: list[str], folder: Path, **variables: str) -> None:
        path = f"{self._environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PIP_NO_INDEX": "1"} | variables
        # Nothing of this tree is found but what the wheel holds.
        environment.pop("PYTHONPATH", None)
        _run([str(self._python), *arguments], cwd=folder, env=environment)


def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
