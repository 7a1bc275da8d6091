"""A prompt goes when its request ends: not when the deadline passes, nor with the last handle on the stream."""

from __future__ import annotations

import gc
import time
import weakref

from core.text.tokenizer import Tokenizer
from tests.unit.core.engine.emulation import ask, running


async def test_a_prompt_goes_with_its_request(bundled_tokenizer: Tokenizer) -> None:
    """The deadline is an hour away, and the stream is kept, as by a server that has it ready for Attach."""
    async with running(bundled_tokenizer) as engine:
        streams, prompts = [], []
        for number in range(12):
            asked = ask((number + 1, 6, 7), tokens=3 + number, want_text=True, deadline=time.monotonic() + 3600.0)
            stream = await engine.generate(asked)
            prompts += [weakref.ref(req.prompt) for req in stream.reqs]
            streams.append(stream)
            if number % 3:
                async for _ in stream:
                    pass
            else:
                await stream.aclose()
        while engine.live_requests:
            async for _ in await engine.generate(ask(tokens=2)):
                pass
        gc.collect()
        assert len(prompts) == 12 == len(streams)
        assert sum(prompt() is not None for prompt in prompts) == 0
