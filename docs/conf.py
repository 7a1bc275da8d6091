"""Sphinx over the whole repository: a page is where its file is, so links that work on the forge work on the site.

Read are the documents alone. What `HUBS` link to, section by section, is the navigation; a page that none of them links
to, a link or an anchor that leads nowhere, is a warning, and `make docs` takes warnings for errors.
"""

from __future__ import annotations

import posixpath
import re

from sphinx.application import Sphinx

project = "Slipstream"
html_title = "Slipstream"
extensions = ["myst_parser"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "core/**.md", "service/**.md", "helm/**.md", "tests/**.md"]
# Pruned, not only left out: folders in which there is nothing to read, or too much.
exclude_patterns = [".*", "build", "dist", "*.egg-info", "**/__pycache__", "**/node_modules", "helm/slipstream"]

myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_extra_path = ["redirect"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Of `make links`, which alone asks other servers.
linkcheck_timeout = 20
linkcheck_retries = 2

HUBS = ("docs/index", "core/decisions/README")
"""Pages that are lists of others."""

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([\w./-]+)\.md\)")


def contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add to a hub what Sphinx wants to be told: its own links, once more, as a table of contents."""
    if docname not in HUBS:
        return
    folder = posixpath.dirname(docname)
    start, *rest = _HEADING.split(source[0])
    for title, body in [("", start), *zip(rest[::2], rest[1::2], strict=True)]:
        linked = dict.fromkeys(posixpath.normpath(posixpath.join(folder, each)) for each in _LINK.findall(body))
        pages = "\n".join(f"/{page}" for page in linked if page not in HUBS or docname == root_doc)
        if pages:
            caption = f":caption: {title}\n" if title else ""
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n{caption}\n{pages}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls it."""
    app.connect("source-read", contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
