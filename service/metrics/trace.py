"""Records traces for clients of the metrics port: one at a time, for a bounded time.

A trace starts something, so it is a POST. It costs the server a little, so by default only processes of the server's
own user, or of root, on this machine may ask. Each recording, and each client that is refused one, is a line of the
audit log.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs

from core.lanes import LaneRecorder
from service.metrics.chrome_trace import chrome_trace
from service.process import audit_log
from service.process.audit_log import Floods

PATH = "/trace"
MAX_SECONDS = 60.0
LAST_RESULT_SECONDS = 0.05
"""Seconds of waiting for the newest steps: the lanes of a step are written with its result."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The HTTP answer where there is no trace."""

    status: HTTPStatus
    message: str


NO_STEPS = (
    "no steps run in this process: the model is still being loaded, or --data-parallel has engines in processes of "
    "their own"
)
ABANDONED = Refusal(HTTPStatus.REQUEST_TIMEOUT, "the client left before its trace was made")


def _stays(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class TraceDoor:
    """Answers requests for traces. `lanes` gives the engine's recorder, None before there is an engine.

    `who` is `off` (no client), `local` (clients on this machine of the server's own user or root) or `any`. Called from
    the threads of the metrics server.
    """

    def __init__(
        self, who: str, lanes: Callable[[], LaneRecorder | None], about: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._who, self._lanes, self._about = who, lanes, about
        self._busy = threading.Lock()
        self._floods = Floods()

    def record(
        self,
        peer: str,
        query: str,
        user: Callable[[], int | None] = os.geteuid,
        left_within: Callable[[float], bool] = _stays,
    ) -> Iterable[bytes] | Refusal:
        """Record for the seconds in the `query` (`seconds=5`), and return the trace in pieces; blocks meanwhile.

        `user()` is the user id of the client's process, None if it is not known. `left_within(seconds)` waits, and
        returns early if the client closes its connection; it returns whether the client did. The recording ends then.
        """
        found = self._record(peer, query, user, left_within)
        if found is ABANDONED:
            audit_log.write("act", method=PATH, peer=peer, outcome="CANCELLED")
        elif not isinstance(found, Refusal):
            audit_log.write("act", method=PATH, peer=peer, outcome="OK")
        elif found.status is HTTPStatus.FORBIDDEN and self._floods.admits(peer):
            left_out = self._floods.take_left_out()
            audit_log.write("refused", method=PATH, peer=peer, reason="NOT_PERMITTED", left_out=left_out)
        return found

    def _record(
        self, peer: str, query: str, user: Callable[[], int | None], left_within: Callable[[float], bool]
    ) -> Iterable[bytes] | Refusal:
        mine = self._who == "any" or (self._who == "local" and _is_local(peer) and user() in (0, os.geteuid()))
        if not mine:
            return Refusal(HTTPStatus.FORBIDDEN, "traces are not given to you here; see --trace-endpoint")
        seconds = _seconds(query)
        if seconds is None:
            return Refusal(HTTPStatus.BAD_REQUEST, f"seconds must be a number above 0 and at most {MAX_SECONDS:g}")
        lanes = self._lanes()
        if lanes is None:
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, NO_STEPS)
        if not self._busy.acquire(blocking=False):
            return Refusal(HTTPStatus.CONFLICT, "a trace is being recorded")
        try:
            recording, began = lanes.start(), time.monotonic()
            try:
                if left_within(seconds):
                    return ABANDONED
            finally:
                lanes.stop()
            time.sleep(LAST_RESULT_SECONDS)
            return chrome_trace(recording.lanes(began), began, self._about())
        finally:
            self._busy.release()


def _is_local(peer: str) -> bool:
    address = ip_address(peer.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _seconds(query: str) -> float | None:
    try:
        seconds = float(parse_qs(query).get("seconds", ["5"])[-1])
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_SECONDS else None
