"""Clients of all manners, each writing down what it saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.client import CallFailed, Chunk, End, SlipstreamClient
from tests.chaos.device import expected
from tests.chaos.history import LEFT, Stream, Verdict, check


@dataclass
class Manner:
    """How a client reads. Counts are in events, times in seconds."""

    leave_after: int | None = None
    abort_after: int | None = None
    timeout: float | None = None
    dawdle: float = 0.0
    """Mean seconds of thought after one event in a hundred."""
    freeze: asyncio.Event | None = None
    """Stop reading after the first event until this is set."""


def ask(vocab: int, tokens: int, rng: random.Random, longest: int = 12) -> Stream:
    """A request for `tokens` tokens after a random prompt."""
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
    return Stream(prompt, tokens, request_id=f"r{rng.getrandbits(64):016x}")


async def read(client: SlipstreamClient, stream: Stream, manner: Manner | None = None) -> Stream:
    """Run the request of `stream` and fill in what was seen; returns it."""
    manner = manner or Manner()
    rng = random.Random(stream.request_id)
    events = client.generate(
        stream.prompt,
        request_id=stream.request_id,
        max_tokens=stream.asked,
        temperature=0.0,
        ignore_eos=True,
        want_text=False,
        timeout=manner.timeout,
    )
    try:
        count = 0
        async for event in events:
            note(stream, event)
            count += 1
            if count == manner.leave_after:
                stream.terminals.append(LEFT)
                break
            if count == manner.abort_after:
                await client.abort(stream.request_id)
            await _think(manner, rng, count)
    except CallFailed as failed:
        stream.terminals.append(failed.reason or failed.code.name)
        stream.reported = failed.tokens_emitted if failed.reason else None
    finally:
        await events.aclose()
    return stream


def note(stream: Stream, event: Chunk | End) -> None:
    """Write one event down."""
    stream.foreign += event.request_id != stream.request_id
    stream.after_terminal += bool(stream.terminals)
    if isinstance(event, End):
        stream.terminals.append(event.reason)
        stream.reported = event.completion_tokens
    else:
        stream.events.append((event.position, event.token_ids, time.monotonic()))


async def _think(manner: Manner, rng: random.Random, count: int) -> None:
    if manner.freeze is not None and count == 1:
        await manner.freeze.wait()
    if manner.dawdle and rng.random() < 0.01:
        await asyncio.sleep(rng.expovariate(1 / manner.dawdle))


def verdict(streams: list[Stream], vocab: int) -> Verdict:
    """The history checker's view of `streams` against the emulated device."""
    return check(streams, lambda stream: expected(stream.prompt, stream.asked, vocab))


def endings(streams: list[Stream], of: Callable[[Stream], str] | None = None) -> dict[str, int]:
    """How many streams ended how."""
    counts: dict[str, int] = {}
    for stream in streams:
        word = of(stream) if of else "+".join(stream.terminals)
        counts[word] = counts.get(word, 0) + 1
    return dict(sorted(counts.items()))
