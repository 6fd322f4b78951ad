"""The extensions of the site, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def module(name: str) -> ModuleType:
    """Load one of `docs/_ext`."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"_ext/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules[name] = extension
    spec.loader.exec_module(extension)
    return extension
