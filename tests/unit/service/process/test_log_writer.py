"""The log is written by a thread that may wait for its reader; nothing else does."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from service.process import log_writer
from service.process.log_writer import MAX_CHARS, MAX_LINES, LogWriter

MANY = 5 * MAX_LINES


class Pipe:
    """What the log goes to; nothing is read of it until `read`."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        self.writer = LogWriter(self.theirs)
        self.logger = logging.Logger("test", logging.INFO)
        self.logger.addHandler(self.writer)

    def read(self, lines: int) -> list[str]:
        """So many lines."""
        found = b""
        while found.count(b"\n") < lines:
            found += os.read(self.ours, 1 << 16)
        return found.decode().splitlines()

    def lines(self) -> Iterator[str]:
        """Line after line, as they come."""
        with open(self.ours, closefd=False) as reader:
            yield from reader


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.ours)  # whatever is still written ends with an error, and the thread with the process
    made.writer.flush()
    os.close(made.theirs)


def test_lines_come_in_order(pipe: Pipe) -> None:
    for number in range(100):
        pipe.logger.info("line %d", number)
    assert pipe.read(100) == [f"line {number}" for number in range(100)]


def test_a_log_that_is_not_read_is_bounded_and_says_what_is_missing(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 0.05)
    logging_all = threading.Thread(target=lambda: [pipe.logger.info("line %d %s", n, "x" * 200) for n in range(MANY)])
    logging_all.daemon = True
    logging_all.start()
    logging_all.join(30.0)
    assert not logging_all.is_alive(), "nothing that logs waits for the reader"
    pipe.writer.flush()
    assert pipe.writer._waiting.qsize() <= MAX_LINES + 1
    assert MANY - MAX_LINES - 1000 < pipe.writer.dropped < MANY
    monkeypatch.undo()
    written = missing = 0
    for line in pipe.lines():
        written += line.startswith("line ")
        # Several of them where the writer got the processor while the pipe had room.
        missing += int(line.split()[1]) if line.startswith("... ") else 0
        if written + missing >= MANY:
            break
    assert (written + missing, missing) == (MANY, pipe.writer.dropped)


def test_a_record_is_bounded(pipe: Pipe) -> None:
    pipe.logger.error("x" * (3 * MAX_CHARS))
    assert pipe.read(1) == ["x" * MAX_CHARS]


def test_a_record_that_cannot_be_formatted_is_counted(pipe: Pipe, capfd: pytest.CaptureFixture[str]) -> None:
    pipe.logger.info("one %d %d", 1)
    pipe.logger.info("two")
    assert pipe.read(1)[0] == "two" and pipe.writer.dropped == 1
    assert capfd.readouterr().err == "", "logging itself would print a traceback, and wait for that"


def test_flush_waits_for_what_was_logged(pipe: Pipe) -> None:
    pipe.logger.info("last words")
    pipe.writer.flush()
    os.set_blocking(pipe.ours, False)
    assert os.read(pipe.ours, 100) == b"last words\n"


def test_a_reader_that_is_gone_is_no_error(pipe: Pipe) -> None:
    reading, pipe.ours = pipe.ours, os.open(os.devnull, os.O_RDONLY)
    os.close(reading)
    for _ in range(10):
        pipe.logger.info("unread")
    pipe.writer.flush()
    assert pipe.writer.dropped == 0
