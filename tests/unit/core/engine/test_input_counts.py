"""Chats that became prompts, and those that the template would not have, are counted."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Draining, InvalidRequest, Overloaded, RequestFailed, SlipstreamError
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams
from service.metrics import names
from tests.unit.core.engine.emulation import ask, read, running

COUNTED = ("chats", "chat_refusals", "images", "image_tokens", "sounds")
ONE = SamplingParams(temperature=0.0, max_tokens=1)


async def test_chats_and_refused_chats(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        assert (engine.stats.chats, engine.stats.chat_refusals) == (0, 0)
        await read(engine, ask())
        for _ in range(2):
            await read(engine, GenerateRequest(chat=(ChatMessage("user", "hello"),), sampling=ONE))
        with pytest.raises(InvalidRequest):
            await engine.generate(GenerateRequest(chat=(ChatMessage("user", "\ud800"),), sampling=ONE))
        assert (engine.stats.chats, engine.stats.chat_refusals) == (2, 1)
        assert (engine.stats.images, engine.stats.sounds) == (0, 0)


@pytest.mark.parametrize(
    "error",
    [Overloaded("no processor", reason="CHAT_TEMPLATE"), Draining("ends"), RequestFailed("no process")],
    ids=["full", "drain", "gone"],
)
async def test_what_is_no_fault_of_a_chat_is_no_refusal(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, error: SlipstreamError
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    async with running(tokenizer) as engine:
        monkeypatch.setattr(tokenizer, "render_literally", fails)
        with pytest.raises(type(error)):
            await engine.generate(GenerateRequest(chat=(ChatMessage("user", "hello"),), sampling=ONE))
        assert (engine.stats.chats, engine.stats.chat_refusals) == (0, 0)


def test_each_figure_is_shown_as_itself() -> None:
    shown = {metric.name: metric.field for metric in names.SNAPSHOT if metric.field in COUNTED}
    assert shown == {f"slipstream_{name}": name for name in COUNTED}
