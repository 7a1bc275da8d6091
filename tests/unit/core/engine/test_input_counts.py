"""Chats that became prompts, and those that the template would not have, are counted."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.unit.core.engine.emulation import ask, read, running

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
