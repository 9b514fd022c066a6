"""Formulas as MathML, which browsers render without scripts and without network access."""

from docutils import nodes
from docutils.utils.math import pick_math_environment
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the renderer ``mathml``."""
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_inline, None), block_renderers=(_block, None)
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    formula = node.astext().strip()
    if pick_math_environment(formula).startswith("align"):
        formula = rf"\begin{{aligned}}{formula}\end{{aligned}}"
    translator.body.append(f'<div class="formula">{tex2mathml(formula, as_block=True)}</div>\n')
    raise nodes.SkipNode
