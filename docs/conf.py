"""How the documentation is built: ``make docs``."""

import sys
from importlib import metadata
from pathlib import Path

from pygments.lexers.shell import BashLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Stateline"
author = "The Stateline maintainers"
release = version = metadata.version("stateline")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "generated_tables",
    "mathml",
]
exclude_patterns = ["_build", "_ext"]
smartquotes_action = "De"  # dashes, not quotes: what is quoted shall be copied as it is

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["stateline.css"]
html_title = f"Stateline {release}"
html_math_renderer = "mathml"
html_show_copyright = False
html_copy_source = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_default_options = {"no-value": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 88
pygments_style = "friendly"
pygments_dark_style = "native"


def setup(app: Sphinx) -> None:
    """Commands stand without a prompt; fields of named tuples are in the signature already."""
    app.add_lexer("console", BashLexer)
    app.connect("autodoc-skip-member", _skip_fields)


def _skip_fields(_app: Sphinx, _what: str, _name: str, value: object, *_: object) -> bool | None:
    return True if type(value).__name__ == "_tuplegetter" else None
