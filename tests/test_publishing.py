"""What is said of the project in several places agrees: its address, its authors and
version, its make targets.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import address
import tl_coupling as tlc

tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")


ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text())
    for path in (ROOT / ".github/workflows").glob("*.yml")
}
MAKEFILE = (ROOT / "Makefile").read_text()
# Made when the site is built.
MADE = ("_build/", "_made/", "api/", "gallery/")


def jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for file, workflow in WORKFLOWS.items():
        yield from ((file, name, job) for name, job in workflow["jobs"].items())


def matrix(job: dict[str, Any]) -> dict[str, list[str]]:
    values = job.get("strategy", {}).get("matrix", {})
    return {name: of_name for name, of_name in values.items() if name != "exclude"}


def targets(job: dict[str, Any]) -> set[str]:
    """What `make` is called with, for every value of the job's matrix."""
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    for name, values in matrix(job).items():
        commands = "\n".join(
            commands.replace(f"${{{{ matrix.{name} }}}}", value) for value in values
        )
    return set(re.findall(r"\bmake ([\w-]+)", commands))


def test_no_file_has_another_address() -> None:
    assert [str(path) for path in address.deviations()] == []


@pytest.mark.parametrize(
    "said",
    [
        "https://github.com/{}/{}",
        "(https://github.com/{}/{}/issues).",
        "https://github.com/{}/{}.git",
        "https://{}.github.io/{}/a.html",
        "https://colab.research.google.com/github/{}/{}/blob/main/demos/vision.ipynb",
        "https://raw.githubusercontent.com/{}/{}/main/x.png",
    ],
)
def test_a_project_that_moves_takes_its_address_along(said: str) -> None:
    first, second = ("some-lab", "coupling"), ("another-lab", "block-coupling.js")
    for misspelt in ("tl-coupling", "tl_coupling"):
        assert address.rewritten(
            said.format("someone", misspelt), first, second
        ) == said.format(*second)
    assert address.rewritten(said.format(*first), first, second) == said.format(*second)
    assert address.rewritten(said.format(*second), second, first) == said.format(*first)
    for other in (("some-lab", "another"), ("sugolov", "coupling")):
        assert address.rewritten(said.format(*other), first, second) == said.format(
            *other
        )


def test_pyproject_and_citation_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["authors"] == [
        {"name": author["name"]} for author in citation["authors"]
    ]
    assert citation["version"] == tlc.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    paper, package = re.findall(
        r"@\w+\{.*?\n\}", (ROOT / "README.md").read_text(), re.DOTALL
    )
    (cited,) = citation["references"]
    authors = [
        f"{who['family-names']}, {who['given-names']}" for who in cited["authors"]
    ]
    for entry, fields in (
        (
            paper,
            {
                "title": cited["title"].replace("LLMs", "{LLMs}"),
                "author": " and ".join(authors),
                "booktitle": cited["collection-title"],
                "year": cited["year"],
                "url": cited["url"],
            },
        ),
        (
            package,
            {
                "title": citation["title"].replace("_", r"\_"),
                "author": f"{{{citation['authors'][0]['name']}}}".replace("_", r"\_"),
                "version": citation["version"],
                "url": citation["repository-code"],
            },
        ),
    ):
        found = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry, re.MULTILINE))
        assert found == {name: str(value) for name, value in fields.items()}


def test_every_link_of_readme_leads_somewhere_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text()
    relative = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert relative
    assert all((ROOT / name).exists() for name in relative)
    for part in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(part["pattern"], part["replacement"], text)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    assert all(url.startswith(("https://", "#")) for _, url in links)
    pictures = {url for mark, url in links if mark}
    own = PROJECT["urls"]["Repository"].replace(
        "github.com", "raw.githubusercontent.com"
    )
    assert f"{own}/main/docs/coupling.png" in pictures


def test_workflows_call_make_targets_that_are_there() -> None:
    called = set().union(*(targets(job) for _, _, job in jobs()))
    assert called == {
        "check",
        "test-tl4",
        "test-tl3",
        "test-lowest",
        "test-newest",
        "test-long-tl4",
        "test-long-tl3",
        "docs",
        "check-docs",
        "check-dist",
    }
    assert not {
        target
        for target in called
        if not re.search(rf"^([\w-]+ )*{target}[ :]", MAKEFILE, re.MULTILINE)
    }


def test_the_parts_of_the_long_tier_are_all_of_it() -> None:
    """The last part ignores what the others run, and nothing else."""
    long_tier = WORKFLOWS["ci.yml"]["jobs"]["test-long"]
    *parts, rest = matrix(long_tier)["part"]
    named = " ".join(parts).split()
    assert all((ROOT / name).exists() for name in named)
    assert rest.split() == ["tests", *(f"--ignore={name}" for name in named)]
    for excluded in long_tier["strategy"]["matrix"]["exclude"]:
        assert excluded["line"] == "tl3"
        part = ROOT / excluded["part"]
        for path in [part] if part.is_file() else sorted(part.glob("*.py")):
            assert "both_lines" not in path.read_text(), path


def test_workflows_may_not_do_more_than_they_need() -> None:
    assert all(
        workflow["permissions"] == {"contents": "read"}
        for workflow in WORKFLOWS.values()
    )
    privileged = {
        (file, name): job for file, name, job in jobs() if "permissions" in job
    }
    assert {where: job["permissions"] for where, job in privileged.items()} == {
        ("docs.yml", "deploy"): {"pages": "write", "id-token": "write"},
        ("release.yml", "publish"): {"id-token": "write"},
    }
    # Those run nothing of the checkout, and no job is given a secret.
    assert not [
        step
        for job in privileged.values()
        for step in job["steps"]
        if "run" in step or "checkout" in str(step)
    ]
    assert "secrets." not in str(WORKFLOWS)


def test_python_versions_are_those_that_are_tested() -> None:
    classified = {
        name.split(" :: ")[-1]
        for name in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", name)
    }
    assert PROJECT["requires-python"].removeprefix(">=") in classified
    assert (
        set().union(*(matrix(job).get("python", []) for _, _, job in jobs()))
        == classified
    )


# Extras with what the package itself uses; the others are tools.
USED_EXTRAS = PROJECT["optional-dependencies"].keys() - {"dev", "docs"}


def requirements(texts: list[str]) -> dict[str, Requirement]:
    """Return requirements by name, but those of the package's own extras."""
    named = {r.name.lower(): r for r in map(Requirement, texts)}
    return {name: named[name] for name in named.keys() - {PROJECT["name"]}}


REQUIRED = requirements(PROJECT["dependencies"])
OPTIONAL = requirements(
    [text for extra in USED_EXTRAS for text in PROJECT["optional-dependencies"][extra]]
)


def imported_distributions(node: ast.AST, at_import: bool) -> set[str]:
    """Return the distributions that a tree imports from.

    Args:
        node: the tree.
        at_import: whether imports within functions and conditions are left out.
    """
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    tops = {name.partition(".")[0] for name in names}
    others = tops - set(sys.stdlib_module_names) - {"tl_coupling"}
    named = {
        (DISTRIBUTIONS[top][0] if top in DISTRIBUTIONS else top).lower()
        for top in others
    }
    found = {name.replace("_", "-") for name in named}
    # Type checkers read what stands behind a condition.
    if not (at_import and isinstance(node, ast.FunctionDef | ast.If)):
        for child in ast.iter_child_nodes(node):
            found |= imported_distributions(child, at_import)
    return found


DISTRIBUTIONS = importlib.metadata.packages_distributions()
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tl_coupling").rglob("*.py"))
}
# A class of a library that need not be there; imported by the function that makes one.
ON_REQUEST = ROOT / "tl_coupling/interactive/widget.py"


def test_what_the_package_imports_is_declared() -> None:
    first, later = (
        {
            path: imported_distributions(tree, at_import=at_import)
            for path, tree in TREES.items()
        }
        for at_import in (True, False)
    )
    assert not first.pop(ON_REQUEST) <= REQUIRED.keys()
    code = "import sys, tl_coupling.interactive; print('anywidget' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "False"
    first, later = (set().union(*found.values()) for found in (first, later))
    assert first <= REQUIRED.keys()
    assert later <= REQUIRED.keys() | OPTIONAL.keys()
    # xarray imports it, because files are written with `engine="netcdf4"`.
    assert REQUIRED.keys() - later == {"netcdf4"}


def test_everything_that_the_package_uses_has_an_oldest_version() -> None:
    without = {
        name
        for name, requirement in (REQUIRED | OPTIONAL).items()
        if not any(part.operator == ">=" for part in requirement.specifier)
    }
    assert not without
    assert {
        name
        for name, requirement in (REQUIRED | OPTIONAL).items()
        if any(part.operator in ("<", "<=", "==") for part in requirement.specifier)
    } == {"transformer-lens"}


def test_the_oldest_versions_are_installed_with_every_extra_that_is_used() -> None:
    (extras,) = re.findall("^EXTRAS = (.*)$", MAKEFILE, re.MULTILINE)
    named = set(extras.split())
    for extra in extras.split():
        for text in PROJECT["optional-dependencies"][extra]:
            named |= Requirement(text).extras & USED_EXTRAS
    assert named == USED_EXTRAS


def test_pages_for_language_models_are_those_of_the_site() -> None:
    text = (ROOT / "llms.txt").read_text()
    site = PROJECT["urls"]["Documentation"]
    named = re.findall(
        rf"^- \[.+?\]\({re.escape(site)}(\S+)\.html\): .+$", text, re.MULTILINE
    )
    assert len(named) == len(re.findall(r"^- ", text, re.MULTILINE))
    docs = ROOT / "docs"
    written = {
        path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")
    }
    assert set(named) - {"api/index"} == {
        name for name in written if not name.startswith(MADE)
    } - {"index"}
