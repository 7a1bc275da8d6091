"""A call that has to be served: its refusal is a failure of the test and not an error in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio

from service.client import CallFailed


@contextmanager
def granted(what: str) -> Iterator[None]:
    """No call in the body may end with another status than OK; AssertionError says what was not granted, and how."""
    try:
        yield
    except (CallFailed, grpc.aio.AioRpcError) as refused:
        raise AssertionError(f"{what}: {refused}") from None
