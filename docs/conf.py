"""The documentation site: `make docs`."""

import os
import sys
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext"), str(ROOT / "tests" / "support")]
# Notebooks ask no hub, show no bars, and import what stands beside them in `demos`.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
os.environ["PYTHONPATH"] = os.pathsep.join(
    map(str, (ROOT, ROOT / "demos", ROOT / "demos/studies"))
)

import tl_coupling  # noqa: E402
from made import digest  # noqa: E402

metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The one place of the public address.
REPOSITORY = metadata["urls"]["Repository"].removesuffix("/")

project = metadata["name"]
release = version = tl_coupling.__version__
html_title = project
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    "made",
    "mathjax",
    "figures",
    "start_map",
    "atlas_page",
    "reference",
    "whole_words",
    "indices",
]
exclude_patterns = ["_build", "_made", "_ext"]
nitpicky = True
default_role = "py:obj"
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
# Files of the repository, and its notebooks on Colab: `[…](repo:CITATION.cff)`,
# `[…](colab:demos/quickstart.ipynb)`.
myst_url_schemes = {
    **dict.fromkeys(("http", "https", "mailto")),
    "repo": f"{REPOSITORY}/blob/main/{{{{path}}}}",
    "colab": REPOSITORY.replace("github.com", "colab.research.google.com/github")
    + "/blob/main/{{path}}",
}
nb_execution_mode = "cache"
# What the same code printed before is not run again.
nb_execution_cache_path = str(HERE / "_build/notebooks" / digest())
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
napoleon_use_admonition_for_examples = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
# Filled when the build begins; Sphinx looks for it before.
(HERE / "_made/site").mkdir(parents=True, exist_ok=True)
html_extra_path = ["_made/site", "../llms.txt"]
html_copy_source = False
# What a shared link shows: the page's title, its first words, and README's picture.
ogp_site_url = metadata["urls"]["Documentation"]
ogp_image = "_images/coupling.png"
ogp_image_alt = "Coupling between every two layers, trained and untrained"
ogp_social_cards = {"enable": False}
ogp_enable_meta_description = True
ogp_custom_meta_tags = ['<meta name="twitter:card" content="summary_large_image">']
# Functions before the methods of the same name.
html_search_scorer = str(HERE / "search_scorer.js")
html_css_files = ["site.css"]
html_js_files = [("gallery.js", {"defer": "defer"}), ("names.js", {"defer": "defer"})]
html_show_copyright = False
html_theme_options = {
    "footer_icons": [
        {
            "name": "Repository",
            "url": REPOSITORY,
            "class": "repository",
            "html": "Repository",
        }
    ]
}
