"""The metrics as text, rendered once for all requests that wait for it.

A rendering takes milliseconds of the interpreter, which the event loop needs too. Requests that wait while one is made
share the next one. A request never gets a rendering that was begun before the request came.
"""

from __future__ import annotations

import threading
from itertools import count

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


class Exposition:
    """The metrics of `registry` as text, in the format that a client asks for. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._moments = count()
        self._made: tuple[int, bytes, str] = (-1, b"", "")
        """The newest rendering: the moment at which it was begun, its text and its content type."""

    def text(self, accept: str) -> tuple[bytes, str]:
        """The text and its content type, for a request that is there now with the header `Accept: accept`."""
        # `_moments` orders arrivals and renderings, so that no clock has to tell which came first.
        encode, content_type = choose_encoder(accept)
        asked = next(self._moments)
        with self._lock:
            began, text, kind = self._made
            if began < asked or kind != content_type:
                began = next(self._moments)
                text = encode(self._registry)
                self._made = (began, text, content_type)
            return text, content_type
