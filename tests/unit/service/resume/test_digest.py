"""What a kept request is known by: the same for the same request, and made where it holds up no other stream."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.chat import ChatMessage
from core.types.io import GenerateRequest
from service.resume import retention
from service.resume.retention import Retention, _digest

SHOWN = ChatMessage("user", "", parts=("what is ", b"a picture"))


def test_it_tells_pictures_apart_by_their_bytes() -> None:
    asked = GenerateRequest(chat=(SHOWN,))
    assert _digest(asked) == _digest(GenerateRequest(chat=(SHOWN,)))
    other = ChatMessage("user", "", parts=("what is ", b"a pictura"))
    assert _digest(asked) != _digest(GenerateRequest(chat=(other,)))
    assert _digest(GenerateRequest(text="a", images=(b"1", b"2"))) != _digest(
        GenerateRequest(text="a", images=(b"2", b"1"))
    )


@pytest.mark.parametrize(("images", "is_apart"), [((b"a picture",), True), ((), False)])
async def test_pictures_are_read_on_no_thread_that_streams_run_on(
    images: tuple[bytes, ...], is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes of them would hold up every stream of the server."""
    seen = list[threading.Thread]()

    def noted(asked: GenerateRequest) -> bytes:
        seen.append(threading.current_thread())
        raise LookupError("far enough")

    monkeypatch.setattr(retention, "_digest", noted)
    opening: Any = SimpleNamespace(_seconds=1.0, _opening={})
    with pytest.raises(LookupError):
        await Retention.open(opening, GenerateRequest(text="a", images=images), None, None)  # type: ignore[arg-type]
    assert (seen[0] is not threading.current_thread()) is is_apart
