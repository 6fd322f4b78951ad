"""The extensions of the site, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def module(name: str) -> ModuleType:
    """One of `docs/_ext`."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"_ext/{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found
