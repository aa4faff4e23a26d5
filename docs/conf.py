"""The documentation site: ``sphinx-build -W docs site`` makes it of these pages and gpuq."""

from gpuq import __version__

project = "gpuq"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
myst_heading_anchors = 3

# Docstrings say `name` for code, as NumPy's do.
default_role = "literal"
numpydoc_show_class_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say the types, in fewer words
add_module_names = False

html_theme = "furo"
html_title = "gpuq"
html_copy_source = False
html_show_copyright = False
