"""Logging of the worker: one line per record on stderr, without grpc's traceback for every client that hung up."""

from __future__ import annotations

import logging
import os
import sys

from service.process.log_writer import LogWriter

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GRPC_LOGGER = "grpc._cython.cygrpc"
CHATTY = ("torchao", "torch.utils._pytree")
"""They warn at import of what an operator can do nothing about, also where no weight is quantised."""


def hush_libraries() -> None:
    """Before they are imported, have CHATTY libraries tell errors only."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def configure(level: str) -> None:
    """Log records of at least `level` to stderr, warnings of libraries among them. Before grpc is imported."""
    logging.basicConfig(handlers=[LogWriter(sys.stderr.fileno())], level=level.upper(), format=FORMAT)
    logging.captureWarnings(True)
    hush_grpc()
    logging.getLogger(GRPC_LOGGER).addFilter(not_a_lost_client)
    hush_libraries()


def hush_grpc() -> None:
    """Have grpc's core write nothing: a line for each broken handshake, from the thread that serves every connection,
    straight to stderr, and so at the pace of its reader. An operator's own GRPC_VERBOSITY stands.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def not_a_lost_client(record: logging.LogRecord) -> bool:
    """False for grpc's report that a status could not be sent because its client is gone: that is no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"
