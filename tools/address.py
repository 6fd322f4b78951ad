"""`make address`: write the project's public address, `Repository` in pyproject.toml,
wherever else it stands.

On GitHub, among its raw files, on Pages and on Colab.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = "tl-coupling"
ADDRESS = re.compile(
    r"(?:(?P<site>github\.com|raw\.githubusercontent\.com|colab\.research\.google\.com/github)/(?P<owner>[\w-]+)/"
    r"|(?P<pages_owner>[\w-]+)\.github\.io/)(?P<name>[\w-]+(?:\.(?!git\b)[\w-]+)*)"
)


def owner_and_name(text: str, key: str) -> tuple[str, str]:
    """Of the repository in the line that starts with the key."""
    line = re.search(
        rf'^{key}"https://github\.com/([\w-]+)/([\w.-]*\w)"$', text, re.MULTILINE
    )
    if line is None:
        sys.exit(f'wanted a line {key}"https://github.com/OWNER/NAME"')
    return line[1], line[2]


def rewritten(text: str, former: tuple[str, str], address: tuple[str, str]) -> str:
    """Return the text with this address in place of the former one, and of whatever has
    the project's name.
    """

    def one(found: re.Match[str]) -> str:
        said = found["owner"] or found["pages_owner"], found["name"]
        if said != former and said[1].replace("_", "-") != PROJECT:
            return found[0]
        owner, name = address
        return (
            f"{found['site']}/{owner}/{name}"
            if found["site"]
            else f"{owner}.github.io/{name}"
        )

    return ADDRESS.sub(one, text)


def deviations(root: Path = ROOT) -> dict[Path, str]:
    """Every file of the repository that has another address in it, and what it should
    say.
    """
    address = owner_and_name(
        (root / "pyproject.toml").read_text(encoding="utf-8"), "Repository = "
    )
    # Where the last run left its own.
    former = owner_and_name(
        (root / "CITATION.cff").read_text(encoding="utf-8"), "repository-code: "
    )
    listed = [
        "git",
        "grep",
        "--untracked",
        "--files-with-matches",
        "-I",
        "--null",
        "-i",
        "github",
    ]
    names = subprocess.run(
        listed, cwd=root, capture_output=True, text=True, check=True
    ).stdout
    texts = {
        root / name: (root / name).read_text(encoding="utf-8")
        for name in names.split("\0")
        if name
    }
    return {
        path: new
        for path, text in texts.items()
        if (new := rewritten(text, former, address)) != text
    }


if __name__ == "__main__":
    for path, text in deviations().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
