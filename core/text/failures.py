"""Turns exceptions of a tokenizer into an error of the one request on whose text it failed."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from core.errors import SlipstreamError, TextFailed
from core.invariants import InvariantViolation

log = logging.getLogger(__name__)

PASSED: Final = (
    SlipstreamError,
    InvariantViolation,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
)
"""Exceptions that are no failure of a tokenizer. Every other may be one, also beyond `Exception`: a panic in a Rust
library is a `BaseException`, and its class does not exist before the first panic."""


def is_failure(error: BaseException) -> bool:
    """Whether `error`, raised while text was encoded or decoded, is a failure of the tokenizer."""
    return not isinstance(error, PASSED)


class TextFailures:
    """Counts and logs the tokenizer's failures for one engine. Event-loop thread only."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that ended, or were refused, because of such a failure."""

    def noted(self, error: BaseException) -> TextFailed:
        """Count and log `error`, which `is_failure`; returns the error that ends the request.

        The log has the class and the place of `error`, but not its message: libraries quote the client's text there.
        """
        self.count += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        log.error("the tokenizer failed on a request: %s at %s", type(error).__name__, place)
        return TextFailed("the tokenizer failed on the text of this request")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raises TextFailed in place of a tokenizer failure inside the `with` block."""
        try:
            yield
        except BaseException as error:
            if not is_failure(error):
                raise
            # Without a cause: the message of `error` would travel along and could be logged.
            raise self.noted(error) from None
