"""How a request walks from its open call to the scheduler: the rooms whose functions are handed it, in their order.

A short way is what lets a reader follow a request, so it has a bound: at most 8 rooms, and at most 3 returns to a room
that it had left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from core.types.io import GenerateRequest
from core.types.request import Req
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.repository import ROOT
from tests.support.servers import serve_checkpoint

ROOMS, RETURNS = 8, 3
REQUESTS = (pb.GenerateRequest, GenerateRequest, Req)
GROUND = ("core/types", "service/pb")
"""What a request is made of. Its own methods are no rooms on its way."""


class Walk:
    """Notes the rooms of all functions that are called with a request on this thread, up to the scheduler."""

    def __init__(self) -> None:
        self.rooms: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.rooms[-1:] == ["core/scheduler"]:
            return
        room = _room(frame.f_code)
        if room is not None and _is_handed_a_request(frame) and self.rooms[-1:] != [room]:
            self.rooms.append(room)

    @property
    def returns(self) -> int:
        return sum(room in self.rooms[:place] for place, room in enumerate(self.rooms))


def _room(code: CodeType) -> str | None:
    """The folder below `core` or `service` that the code stands in."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT).parts
    room = "/".join(parts[:2])
    return room if parts[0] in ("core", "service") and not room.startswith(GROUND) else None


def _is_handed_a_request(frame: FrameType) -> bool:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    return any(isinstance(frame.f_locals.get(name), REQUESTS) for name in names)


async def test_a_request_reaches_the_scheduler_by_few_rooms(checkpoint_of: Callable[[str], Path]) -> None:
    async with serve_checkpoint(checkpoint_of("llama"), native="off") as (_, client):
        ask = partial(client.complete, [5, 6, 7], max_tokens=2, temperature=0.0)
        # What is imported with the first call is no part of the way.
        assert await ask()
        walk = Walk()
        sys.setprofile(walk)
        try:
            assert await ask()
        finally:
            sys.setprofile(None)
    assert walk.rooms[0].startswith("service/") and walk.rooms[-1] == "core/scheduler", walk.rooms
    assert len(set(walk.rooms)) <= ROOMS and walk.returns <= RETURNS, walk.rooms
