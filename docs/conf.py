"""Configuration of Sphinx: ``make docs``."""

from __future__ import annotations

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

import foretrain

project = "foretrain"
copyright = "the foretrain developers"
release = version = foretrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_figures/*.md"]
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_title = f"foretrain {version}"
myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath", "deflist", "attrs_inline"]
myst_heading_anchors = 3
default_role = "py:obj"
autodoc_mock_imports = ["mxnet"]  # it wants an old NumPy, and so an environment of its own
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_default_options = {"exclude-members": "__init__, __new__"}


def _show_indented_blocks_as_code(app, what, name, obj, options, lines):
    """Put '::' before indented formulas and examples of docstrings, as reStructuredText wants it."""
    found, inside = [], False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1].strip() and _is_text(found):
            found += ["::", ""]
            inside = True
        elif line.strip() and not indented:
            inside = False
        found.append(line)
    lines[:] = found


def _keep_colons(app, what, name, obj, options, lines):
    """Begin a constant's docstring with an empty comment: napoleon takes the text before a colon for its type."""
    if what in ("data", "attribute"):
        lines[:0] = ["..", ""]


def _is_text(before: list[str]) -> bool:
    """Return whether the paragraph before is flush text, and neither a directive nor a section such as ``Args:``."""
    last = next((line for line in reversed(before) if line.strip()), "")
    return not last.startswith((" ", "..", ":", "-"))


def _inline(translator, node):
    translator.body.append(convert(node.astext()))
    raise SkipNode


def _block(translator, node):
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def setup(app):
    """Connect to Sphinx."""
    # Before napoleon, which listens with the usual priority.
    app.connect("autodoc-process-docstring", _show_indented_blocks_as_code, priority=100)
    app.connect("autodoc-process-docstring", _keep_colons, priority=101)
    # MathML, which browsers draw by themselves: Sphinx's own renderers need the network or TeX.
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
