"""What is said of the project in several places agrees: its address, its authors and
version, its make targets.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
