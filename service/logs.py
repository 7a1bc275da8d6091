"""Logging of the worker: one line per record on stderr, without grpc's traceback for every client that hung up."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
GRPC_LOGGER = "grpc._cython.cygrpc"
CHATTY = ("torchao", "torch.utils._pytree")
"""They warn at import of what an operator can do nothing about, also where no weight is quantised."""


def hush_libraries() -> None:
    """Before they are imported, have CHATTY libraries tell errors only."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def configure(level: str) -> None:
    """Log records of at least `level` to stderr."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=FORMAT)
    logging.getLogger(GRPC_LOGGER).addFilter(not_a_lost_client)
    hush_libraries()


def not_a_lost_client(record: logging.LogRecord) -> bool:
    """False for grpc's report that a status could not be sent because its client is gone: that is no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"
