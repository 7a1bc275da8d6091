"""Chat templates that take their time hold up other chats, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from core.errors import Draining
from core.text.chat_renderer import PROCESSES, ChatRenderer
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from core.types.io import GenerateRequest
from tests.unit.core.engine.emulation import ask, read, running
from tests.unit.core.text.test_chat_renderer import IF_ASKED, PATIENCE, cpu_seconds, forks_of


async def test_texts_need_none_of_what_templates_hold(tokenizer: Tokenizer) -> None:
    renderer, before = ChatRenderer(IF_ASKED, {}, 1000, seconds=3.0), tokenizer.chats
    tokenizer.chats = renderer
    try:
        async with running(tokenizer) as engine, asyncio.timeout(PATIENCE):
            chat = GenerateRequest(chat=(ChatMessage("user", "endless"),))
            asking = [asyncio.create_task(engine.generate(chat)) for _ in range(PROCESSES)]
            while not all(map(_works, renderer._processes)):
                # Forks that end one after another, as on a busy machine, would never be at work together.
                assert not any(task.done() for task in asking), "a template ended before the other began"
                await asyncio.sleep(0.01)
            assert await engine.tokenize("hello " * 99, add_special_tokens=False)
            await read(engine, ask((9, 8), tokens=4))
            assert not any(task.done() for task in asking), "texts waited for a template to end"
            renderer.close()
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in ended] == [Draining] * PROCESSES
    finally:
        tokenizer.chats = before


def _works(process: object) -> bool:
    """Whether its fork has begun to use a processor."""
    started = process._process  # type: ignore[attr-defined]
    if started is None or not Path(f"/proc/{started.pid}/task/{started.pid}/children").exists():
        return False
    forks = forks_of(started.pid)
    return bool(forks) and cpu_seconds(forks[0]) > 0.02
