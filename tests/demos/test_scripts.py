"""Every demo and study starts as a script, without the paths that the tests have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMOS = Path(__file__).parents[2] / "demos"
SCRIPTS = sorted(
    path
    for path in DEMOS.rglob("*.py")
    # Those that parse arguments, or have another study's `main` do it.
    if "__main__" in path.read_text()
    and any(words in path.read_text() for words in ("argparse", "main(__doc__"))
)

# One after another in one process, because importing torch takes longer than all of
# them. Each finds what `python SCRIPT --help` would find: its own folder first on the
# path, and no module that an earlier one brought from the demos.
_EACH_SCRIPT = """
import contextlib, io, json, runpy, sys, traceback
from pathlib import Path

demos, *scripts = sys.argv[1:]
path_without_script = sys.path[1:]
answers = {}
for script in scripts:
    sys.path[:] = [str(Path(script).parent), *path_without_script]
    sys.argv[:] = [script, "--help"]
    printed = io.StringIO()
    status = "did not stop"
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code or 0
        except Exception:
            status = traceback.format_exc()
    answers[Path(script).stem] = [status, printed.getvalue()]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(demos):
            del sys.modules[name]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[int | str, str]]:
    """Return how each script ended that was asked for help, and its answer."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    ended = subprocess.run(
        [sys.executable, "-c", _EACH_SCRIPT, DEMOS, *SCRIPTS],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_script_says_what_it_does(
    script: str, answers: dict[str, tuple[int | str, str]]
) -> None:
    status, help_text = answers[script]
    assert status == 0, status
    assert "--out" in help_text


def test_all_studies_are_among_them() -> None:
    assert {
        "capacity",
        "early_surge",
        "gap",
        "ladder",
        "lens_products_later",
        "train_and_trace",
        "vit",
    } <= {path.stem for path in SCRIPTS}
