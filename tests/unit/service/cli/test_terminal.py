"""What operators see while it loads and what they are spared in the log."""

from __future__ import annotations

import io
import logging
import sys

from service.cli.progress import TerminalProgress
from service.process.logs import GRPC_LOGGER, configure, not_a_lost_client


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_per_stage_redrawn() -> None:
    screen = Terminal()
    progress = TerminalProgress(screen)
    for fraction in (0.0, 0.001, 0.5, 1.0):
        progress("weights", fraction)
    progress("self-check", 0.0)
    progress.close()
    text = screen.getvalue()
    assert text.count("\n") == 2
    assert "100%" in text and "self-check" in text
    assert text.count("\r") < 8, "not redrawn for every step"


def test_progress_elsewhere_is_one_line_per_stage() -> None:
    log = io.StringIO()
    progress = TerminalProgress(log)
    for stage in ("weights", "weights", "self-check"):
        progress(stage, 0.5)
    progress.close()
    assert log.getvalue() == "weights ...\nself-check ...\n"


def record(error: Exception | None) -> logging.LogRecord:
    try:
        if error is not None:
            raise error
    except Exception:
        return logging.LogRecord("grpc", logging.ERROR, "f", 1, "m", (), sys.exc_info())
    return logging.LogRecord("grpc", logging.ERROR, "f", 1, "m", (), None)


def test_only_the_report_of_a_lost_client_is_left_out_of_the_log() -> None:
    lost = type("ExecuteBatchError", (Exception,), {})
    assert not not_a_lost_client(record(lost()))
    assert not_a_lost_client(record(ValueError()))
    assert not_a_lost_client(record(None))


def test_the_log_is_configured_without_that_report() -> None:
    logger = logging.getLogger(GRPC_LOGGER)
    lost = type("ExecuteBatchError", (Exception,), {})
    configure("warning")
    try:
        assert not logger.filter(record(lost()))
        assert logger.filter(record(ValueError()))
    finally:
        logging.captureWarnings(False)
        logger.removeFilter(not_a_lost_client)
