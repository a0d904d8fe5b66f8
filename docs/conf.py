"""The documentation site: Sphinx, with pages in MyST Markdown. scripts/docs builds it.

The reference is made from the code, by the extensions in _ext. Nothing is fetched from a network.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from hpcddp import __version__  # noqa: E402

project = "hpcddp"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "reference",
    "inner_links",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]
nitpicky = True  # a reference that leads nowhere is a warning, and scripts/docs makes it an error
# Types of other packages have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(?!hpcddp\.).*"),
    ("py:.*", r"hpcddp\.(train|topology|dask)\..*"),
]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "deflist"]
smartquotes = False  # -- and quotes are often meant for a shell

autodoc_mock_imports = ["lightning", "transformers"]  # slow to import, not needed by hpcddp
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"hpcddp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "monokai"

linkcheck_timeout = 20
linkcheck_retries = 2
