"""Sphinx configuration."""

from __future__ import annotations

import abft_tsm2

project = "abft_tsm2"
author = "abft_tsm2 developers"
copyright = "2026, abft_tsm2 developers"
version = release = abft_tsm2.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["_build"]
default_role = "autolink"

autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "none"  # the docstrings give the types, with shapes
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"abft_tsm2 {release}"
html_theme_options = {"show_toc_level": 2, "secondary_sidebar_items": ["page-toc"]}
html_sidebars = {"index": []}
