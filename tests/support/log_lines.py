"""What a server in this process logs during a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class LogLines(logging.Handler):
    """Every record at INFO and above, as it would be written."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line, with its traceback if it has one."""
        self.lines.append(logging.Formatter("%(name)s %(message)s").format(record))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def logged() -> Iterator[LogLines]:
    """What the server logs during the test."""
    handler, root = LogLines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)
