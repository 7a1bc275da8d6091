"""Requests of one length that all decode at once, and the figures taken meanwhile, of this engine and transformers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.engine.async_engine import AsyncEngine
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams

CHUNK = 8192
"""Prompt tokens per step."""


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` prompts of `context` random tokens. Once all have begun, `steps` more tokens of each are measured."""

    batch: int
    context: int
    steps: int
    vocab: int

    def prompts(self) -> list[list[int]]:
        """The prompts, the same for every engine."""
        draw = random.Random(f"{self.batch} {self.context}")
        return [[draw.randrange(self.vocab) for _ in range(self.context)] for _ in range(self.batch)]

    def lengths(self) -> list[int]:
        """Output tokens of each request: an early one decodes while the prompts of others are still computed."""
        ahead = -(-self.batch * self.context // CHUNK) + 2
        return [self.steps + ahead] * self.batch

    @property
    def mean_context(self) -> float:
        """Mean tokens of a row, over all rows and the measured steps."""
        return self.context + self.lengths()[0] / 2

    @property
    def tokens(self) -> int:
        """Tokens of KV that all requests together need at their ends."""
        return self.batch * (self.context + self.lengths()[0] + 32)


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Figures while all requests decode. `idle_share`: share of time in which the device waited; None if unknown."""

    tokens_per_second: float
    step_ms: float
    idle_share: float | None
    prompt_tokens_per_second: float | None = None
    """Prompt tokens by the seconds until the last request had its first token; early ones decode meanwhile."""


async def watch_decode(engine: AsyncEngine, load: Load) -> DecodeFigures:
    """Run `load` on a started engine, and measure while all its requests decode.

    Raises AssertionError if they do so for too short a time.
    """
    everyone = asyncio.Barrier(load.batch + 1)
    asked = zip(load.prompts(), load.lengths(), strict=True)
    asked_at = time.perf_counter()
    readers = [asyncio.create_task(read_stream(engine, prompt, length, everyone)) for prompt, length in asked]
    await everyone.wait()
    began, first = time.perf_counter(), engine.stats.generation_tokens
    ended, idle = (began, first), 0.0
    # Counted in tokens, since the engine alone decides how many steps they take.
    while not any(reader.done() for reader in readers):
        await asyncio.sleep(0.001)
        now, tokens = time.perf_counter(), engine.stats.generation_tokens
        if tokens - first <= load.batch * load.steps:
            ended, idle = (now, tokens), engine.stats.device_idle_ratio
    await asyncio.gather(*readers)
    elapsed, count = ended[0] - began, ended[1] - first
    assert count and elapsed > 0, "the window is too short for this load; ask for more steps"
    prompts = load.batch * load.context / (began - asked_at)
    return DecodeFigures(count / elapsed, elapsed * load.batch / count * 1000, idle, prompts)


async def watch_first_token(engine: AsyncEngine, prompt: Sequence[int]) -> float:
    """Seconds from a request to its first token, with no other request in the engine."""
    began = time.perf_counter()
    async for event in await engine.generate(_request(prompt, 1)):
        if isinstance(event, Delta):
            return time.perf_counter() - began
    raise AssertionError("a stream without a token")


async def read_stream(engine: AsyncEngine, prompt: list[int], length: int, everyone: asyncio.Barrier) -> None:
    """Read `length` tokens behind `prompt` to their end. Meets `everyone` with the first of them, and reads on."""
    met = False
    async for event in await engine.generate(_request(prompt, length)):
        if isinstance(event, Delta) and not met:
            met = True
            # A task: this stream must be read on while others have not begun yet.
            waiting = asyncio.create_task(everyone.wait())
    await waiting


def _request(prompt: Sequence[int], length: int) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    return GenerateRequest(token_ids=tuple(prompt), sampling=params, want_text=False)


def watch_transformers(module: Any, load: Load, page: int) -> DecodeFigures:
    """Run `load` through transformers' own continuous batching, on the same module, in pages of `page` tokens.

    Raises AssertionError if its requests never decode all at once.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    lengths = load.lengths()
    # Up to transformers 5.22 a page is called a block.
    size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    # It begins no prompt while fewer pages are free than its margin, a fifth of them or less by the release.
    pages: dict[str, Any] = {size: page, "num_blocks": (load.tokens // page + load.batch + 1) * 4 // 3}
    manager = module.init_continuous_batching(
        # No token has id -1: outputs end by length alone, as those of this engine do.
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=lengths[0]),
        continuous_batching_config=ContinuousBatchingConfig(**pages, max_batch_tokens=max(CHUNK, load.batch)),
    )
    manager.start()
    try:
        for number, (prompt, length) in enumerate(zip(load.prompts(), lengths, strict=True)):
            manager.add_request(
                input_ids=prompt, request_id=str(number), max_new_tokens=length, record_timestamps=True, eos_token_id=-1
            )
        times = _timestamps(manager, load.batch)
    finally:
        manager.stop(block=True, timeout=30)
    began, ended = max(each[0] for each in times), min(each[-1] for each in times)
    count = sum(began < at <= ended for each in times for at in each)
    assert count and ended > began, "not all requests were decoding at once"
    return DecodeFigures(count / (ended - began), (ended - began) / (count / load.batch) * 1000, None)


def _timestamps(manager: Any, count: int) -> list[list[float]]:
    """The times of every token of `count` requests. Raises RuntimeError if transformers failed."""
    times: list[list[float]] = []
    while len(times) < count:
        found = manager.get_result(timeout=1)
        if found is None:
            if not manager.is_running():
                raise RuntimeError("its generation thread ended")
        elif found.is_finished():
            if found.error:
                raise RuntimeError(found.error)
            times.append(list(found.timestamps))
    return times
