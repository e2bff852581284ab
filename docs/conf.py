"""The docs site, made by Sphinx from the pages of docs/, the notebooks and the docstrings: `make site`.

Sphinx and MyST-NB, and not MkDocs with Material: MkDocs 1 has had no release since 2024, and Material for
MkDocs takes security fixes only while its authors work on its successor. Sphinx is maintained, renders
notebooks with the outputs that they were saved with, makes the reference itself, and its search is a file of
the site, so that it works with no network and from a disk.

The sources are the whole repository, with this folder for its configuration, so that a page's link to a
notebook or to the README holds on the site as it does in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nbgpu.version import VERSION as __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).with_name("_site")))

project = "nbgpu"
author = "the authors of nbgpu"
project_copyright = "the authors of nbgpu, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["docs/_site/**"]
nitpicky = False

# ---- pages and notebooks -------------------------------------------------------------------------------
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
# Notebooks are shown with the outputs that they were saved with: a site is built where no ranks are started.
nb_execution_mode = "off"
# By its name, because Sphinx keeps the configuration in a file.
nb_custom_formats = {".ipynb": ("live_figures.read", {}, False)}
nb_render_image_options = {"alt": "an output of the cell above"}

# ---- reference -----------------------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# ---- look ----------------------------------------------------------------------------------------------
html_theme = "furo"
html_title = f"nbgpu {version}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_js_files = ["figures.js"]
html_extra_path = ["_site/root"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "source_repository": "https://github.com/nbgpu/nbgpu/",
    "source_branch": "main",
    "source_directory": "",
}


def setup(app: Sphinx) -> None:
    """Let Sphinx call what the site needs beside its extensions."""
    # Here, because it is found only by the path that stands above.
    from live_figures import write_plotly

    app.connect("build-finished", write_plotly)
