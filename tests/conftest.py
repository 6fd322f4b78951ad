"""Shape and type annotations are checked in the tests, by jaxtyping and beartype; nowhere else."""

from jaxtyping import install_import_hook

install_import_hook("tl_coupling", "beartype.beartype")

import os  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
