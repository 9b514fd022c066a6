"""Sphinx configuration of the documentation, which ``make docs`` builds."""

import re
import sys
from importlib import metadata
from pathlib import Path

from pygments.lexers.shell import BashLexer
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Stateline"
author = "The Stateline maintainers"
release = version = metadata.version("stateline")

extensions = [
    "myst_nb",  # includes the parser of Markdown
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "gallery",
    "generated_tables",
    "mathml",
]
exclude_patterns = ["_build", "_ext"]
smartquotes_action = "De"  # dashes, but no quotes, so that quoted text can be copied

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["stateline.css"]
html_title = f"Stateline {release}"
html_math_renderer = "mathml"
html_show_copyright = False
html_copy_source = False

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebook is stored with its outputs, which the tests compare

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
    """Highlight consoles as shell commands, and adapt the reference.

    Fields of named tuples are left out, since their signature shows them.
    """
    app.add_lexer("console", BashLexer)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-docstring", _escape_types, priority=900)  # after napoleon
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"


def _skip_fields(_app: Sphinx, _what: str, _name: str, value: object, *_: object) -> bool | None:
    return True if type(value).__name__ == "_tuplegetter" else None


def _shorten_signature(
    _app: Sphinx, _what: str, _name: str, _value: object, _options: object, shown: str, _to: str
) -> tuple[str, str] | None:
    """Show ``...`` for defaults that a dataclass makes anew, and types without ranges."""
    if not shown:
        return None
    plain = re.sub(r"~?(?:typing\.)?Annotated\[(\w+), [^\]]*\]", r"\1", shown)
    return plain.replace("<factory>", "..."), _to


def _escape_types(
    _app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Let a star in the type of an attribute, a name of axes, begin no emphasis."""
    for number, line in enumerate(lines):
        if line.startswith(":vartype"):
            lines[number] = line.replace("*", "\\*")
