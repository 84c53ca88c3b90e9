"""Configuration of the documentation site, which `make docs` builds from the root of the repository.

Pages are the Markdown files of docs/, the notebooks as they were executed, and the pages that `site_pages` writes into
docs/generated before each build: API, recipes, and tutorials.
"""

import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import site_pages  # noqa: E402

import pacs_trl  # noqa: E402


project = "pacs_trl"
author = "the authors of pacs_trl"
version = release = pacs_trl.__version__
html_title = f"pacs_trl {release}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/generated/**.md",
    "docs/tutorials/*.md",
    "docs/results/**.md",
    "notebooks/*.ipynb",
    "notebooks/README.md",
    "recipes/README.md",
    "examples/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
]
exclude_patterns = [
    ".venv*",
    ".git",
    "outputs",
    "build",
    "**/__pycache__",
    "docs/results/**/seed-*",
    "docs/results/**/smollm2",
]

nb_execution_mode = "off"  # their outputs are committed, and tests execute them
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables in outputs
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header", "config.cache"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
toc_object_entries = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
templates_path = ["templates"]
html_static_path = ["static"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
html_show_sphinx = False
html_show_copyright = False  # the license is LICENSE
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
linkcheck_timeout = 20  # of `make docs-links`, for addresses on the web; links between pages are checked by each build

# GitHub's anchors of headings, which the links between the pages use.
myst_heading_slug_func = site_pages.slug


def setup(app):
    site_pages.write(ROOT)
    app.connect("source-read", site_pages.add_navigation)
    app.connect("autodoc-process-docstring", site_pages.docstring_to_rst, priority=100)
