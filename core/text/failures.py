"""What a tokenizer raises becomes an error of the one request whose text it was to make or to read."""

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
"""What is no failure of a tokenizer. Anything else may be one, also beyond `Exception`: a panic in a Rust library is a
`BaseException` here, and its class cannot be named before there was one."""


def is_failure(error: BaseException) -> bool:
    """Whether `error`, raised while text was made or read, is one of the tokenizer."""
    return not isinstance(error, PASSED)


class TextFailures:
    """Counts and logs them for one engine. Event-loop thread only."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that ended for it, or were refused."""

    def noted(self, error: BaseException) -> TextFailed:
        """What a request ends with on which `error` was raised, which `is_failure`.

        The log has its class and its place and not its message, in which libraries quote text of the client.
        """
        self.count += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        log.error("the tokenizer failed on a request: %s at %s", type(error).__name__, place)
        return TextFailed("the tokenizer failed on the text of this request")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raises TextFailed for what a tokenizer raises inside."""
        try:
            yield
        except BaseException as error:
            if not is_failure(error):
                raise
            # Without a cause: the message of `error` would travel along and could be logged.
            raise self.noted(error) from None
