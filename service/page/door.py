"""The paths of the page on the metrics port: three files of this package, and the events that feed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from service.page.feed import Feed

PATH = "/ui"
EVENTS = "/ui/events"
OFF = "the page is off; start the server with --ui"
FULL = "as many pages are open as may be; close one of them"

_FOLDER = Path(__file__).resolve().parent
_FILES = {
    PATH: ("index.html", "text/html; charset=utf-8"),
    f"{PATH}/page.css": ("page.css", "text/css; charset=utf-8"),
    f"{PATH}/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        # The page loads nothing from elsewhere and nothing inline except the tab's icon; no page may frame it.
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)
"""Headers of every answer below PATH."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the page."""

    body: bytes
    content_type: str


class PageDoor:
    """The documents of the page by path, read when the server starts, and the `feed` of the EVENTS path."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._documents = {
            path: Document((_FOLDER / name).read_bytes(), content_type) for path, (name, content_type) in _FILES.items()
        }

    def document(self, path: str) -> Document | None:
        """The file at `path`; None if there is none."""
        return self._documents.get(path)


def is_below(path: str) -> bool:
    """Whether `path` belongs to the page, on or off."""
    return path == PATH or path.startswith(PATH + "/")
