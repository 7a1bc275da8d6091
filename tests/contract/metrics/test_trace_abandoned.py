"""A client that asks for a trace and goes: the recorder is free for the next one at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from core.lanes import LaneRecorder
from service.metrics.http import MetricsServer
from service.metrics.trace import MAX_SECONDS, TraceDoor

PATIENCE = 20.0
assert PATIENCE < MAX_SECONDS


@pytest.fixture
def recorder() -> LaneRecorder:
    return LaneRecorder()


@pytest.fixture
def server(recorder: LaneRecorder) -> Iterator[MetricsServer]:
    made = MetricsServer("127.0.0.1", 0, CollectorRegistry(), TraceDoor("any", lambda: recorder, dict))
    yield made
    made.close()


def ask(server: MetricsServer, seconds: float, body: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST /trace?seconds={seconds} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


def within_patience(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    return any(condition() or pause.wait(0.01) for _ in range(int(PATIENCE / 0.01)))


def test_the_recorder_is_free_as_soon_as_the_client_is_gone(server: MetricsServer, recorder: LaneRecorder) -> None:
    abandoned = ask(server, MAX_SECONDS)
    assert within_patience(lambda: recorder.recording is not None)
    abandoned.close()
    assert within_patience(lambda: recorder.recording is None), "it would have been recorded for a minute"

    def answered() -> bool:
        with ask(server, 0.01) as after:
            return b" 200 OK" in after.makefile("rb").readline()

    assert within_patience(answered)


def test_a_client_that_sends_a_body_has_not_gone(server: MetricsServer) -> None:
    with ask(server, 0.05, b"nothing is asked for here") as client:
        assert b" 200 OK" in client.makefile("rb").readline()
