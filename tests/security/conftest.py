"""A tiny real checkpoint, a server over it, one over a scripted engine, and the two token strings of these tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import conftest as scripted
from tests.support.checkpoints import make_checkpoint

# `serve(engine, **config)` as in the tests of the service.
checkpoint = scripted.checkpoint
config = scripted.config
serve = scripted.serve


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real Llama checkpoint of 320 tokens of vocabulary and 1024 of context."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint-of-the-operator") / "tiny")


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
