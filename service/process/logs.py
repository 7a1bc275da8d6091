"""Logging of the worker: one line per record on stderr, without grpc's traceback for every client that disconnects."""

from __future__ import annotations

import logging
import os
import sys

from service.process.log_writer import LogWriter

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GRPC_LOGGER = "grpc._cython.cygrpc"
CHATTY = ("torchao", "torch.utils._pytree")
"""Libraries that warn at import about things that an operator cannot change, even if no weight is quantised."""


def hush_libraries() -> None:
    """Have CHATTY libraries log errors only. Call it before they are imported."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def configure(level: str, part: str = "") -> None:
    """Log records of at least `level` to stderr, warnings of libraries included. Call it before grpc is imported.

    `part` of the server that this process is stands in every line; it has no percent signs.
    """
    form = FORMAT.replace("%(levelname)s", f"%(levelname)s {part}") if part else FORMAT
    logging.basicConfig(handlers=[LogWriter(sys.stderr.fileno())], level=level.upper(), format=form)
    logging.captureWarnings(True)
    hush_grpc()
    logging.getLogger(GRPC_LOGGER).addFilter(not_a_lost_client)
    hush_libraries()


def hush_grpc() -> None:
    """Have grpc's core write nothing to stderr, unless the operator has set GRPC_VERBOSITY.

    It would write a line for each broken handshake, directly from the thread that serves every connection. That thread
    would then wait for the reader of stderr.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def not_a_lost_client(record: logging.LogRecord) -> bool:
    """False for grpc's report that a status could not be sent because the client is gone, which is no error here."""
    return not is_lost_client(record.exc_info[1] if record.exc_info else None)


def is_lost_client(error: BaseException | None) -> bool:
    """Whether `error` is grpc's way to say that nothing can be written on a call whose client is gone."""
    return type(error).__name__ == "ExecuteBatchError"
