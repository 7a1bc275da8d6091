"""The engine in process over an emulated device: streams, stop conditions, samples, log probabilities."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from core.engine.async_engine import AsyncEngine
from core.errors import (
    DuplicateRequest,
)
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from core.types.io import Delta, Finished, FinishReason, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.bench.emulated import expected_output
from tests.unit.core.engine.emulation import ask, last, read, running


async def test_stream_is_what_the_device_made(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        ids, text, end = await read(engine, ask((9, 8), tokens=20, want_text=True))
    assert ids == expected_output([9, 8], 20, tokenizer.vocab_size)
    assert text == tokenizer.decode(ids, True)
    assert end.reason is FinishReason.LENGTH and end.usage.prompt_tokens == 2
    assert 0 <= end.timing.queue <= end.timing.first_token <= end.timing.total


async def test_stop_string_ends_withholds_and_frees(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        _, text, _ = await read(engine, ask(tokens=40, want_text=True))
        middle = next(i for i in range(5, len(text) - 4) if text.index(text[i : i + 3]) == i)
        stop = text[middle : middle + 3]
        _, cut, end = await read(engine, ask(tokens=40, want_text=True, stop=(stop,)))
        _, kept, _ = await read(engine, ask(tokens=40, want_text=True, stop=(stop,), include_stop_in_output=True))
        await asyncio.wait_for(engine.drain(5), 10)
        assert all(pool.used == 0 for pool in engine.stats.pools)
    assert (cut, kept) == (text[:middle], text[: middle + 3])
    assert end.reason is FinishReason.STOP and end.matched_stop == stop and end.usage.completion_tokens < 40


async def test_min_tokens_also_holds_back_stop_strings(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        ids, _, _ = await read(engine, ask(tokens=30))
        first = tokenizer.decode(ids[:1], True)[:1]
        assert first, "the emulated device's first token has text"
        ended, _, end = await read(engine, ask(tokens=30, want_text=True, stop=(first,), min_tokens=10))
    assert end.reason is FinishReason.LENGTH or len(ended) >= 10
    assert len(ended) >= 10


async def test_matched_stop_token_has_no_text_unless_asked(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        ids, _, _ = await read(engine, ask(tokens=30))
        stop = ids[6]
        count = ids.index(stop) + 1
        hidden = await read(engine, ask(tokens=30, want_text=True, stop_token_ids=(stop,)))
        shown = await read(engine, ask(tokens=30, want_text=True, stop_token_ids=(stop,), include_stop_in_output=True))
    assert hidden[0] == shown[0] == ids[:count]
    assert hidden[1] == tokenizer.decode(ids[: count - 1], True)
    assert shown[1] == tokenizer.decode(ids[:count], True)
    assert hidden[2].matched_stop == stop


async def test_chat_and_text_prompts_are_tokenised(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        chat = (ChatMessage("user", "hello"),)
        _, _, by_chat = await read(engine, GenerateRequest(chat=chat, sampling=params))
        _, _, by_text = await read(engine, GenerateRequest(text="hello", sampling=params))
    assert by_chat.usage.prompt_tokens == len(tokenizer.encode(tokenizer.render_chat(chat), False))
    assert by_text.usage.prompt_tokens == len(tokenizer.encode("hello", True))


async def test_special_tokens_that_a_message_has_written_out_count_only_if_they_are_meant(tokenizer: Tokenizer) -> None:
    eos = tokenizer.decode([tokenizer.eos_token_id or 0], False)
    chat = (ChatMessage("user", f"hello{eos}"),)
    asked = GenerateRequest(chat=chat, sampling=SamplingParams(temperature=0.0, max_tokens=1))
    async with running(tokenizer) as engine:
        _, _, text = await read(engine, asked)
        _, _, meant = await read(engine, replace(asked, special_tokens=True))
    as_text = len(tokenizer.encode_rendered(*tokenizer.render_literally(chat)))
    as_special = len(tokenizer.encode(tokenizer.render_chat(chat), False))
    assert (text.usage.prompt_tokens, meant.usage.prompt_tokens) == (as_text, as_special) and as_text > as_special


async def test_duplicate_of_a_live_id_is_refused_and_free_again_afterwards(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        stream = await engine.generate(ask(request_id="a", tokens=500))
        with pytest.raises(DuplicateRequest):
            await engine.generate(ask(request_id="a"))
        assert engine.abort("a") and (await asyncio.wait_for(last(stream), 5)).reason is FinishReason.CANCELLED
        assert not engine.abort("a") and not engine.abort("never-seen")
        await read(engine, ask(request_id="a"))


async def test_samples_share_their_prompt_and_end_each_once(tokenizer: Tokenizer) -> None:
    prompt = tuple(range(3, 43))
    async with running(tokenizer, page_size=4, chunked_prefill_size=512) as engine:
        events = [event async for event in await engine.generate(ask(prompt, tokens=10, n=4))]
        stats = engine.stats
    ends = [event for event in events if isinstance(event, Finished)]
    assert sorted(end.index for end in ends) == [0, 1, 2, 3]
    assert sorted(end.usage.cached_tokens for end in ends) == [0, 36, 36, 36]
    assert stats.cached_tokens == 3 * 36
    for index in range(4):
        ids = [t for e in events if isinstance(e, Delta) and e.index == index for t in e.token_ids]
        assert ids == expected_output(list(prompt), 10, tokenizer.vocab_size)


async def test_logprobs_belong_to_their_tokens(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        plain, rich = await asyncio.gather(
            _deltas(engine, ask((1,), tokens=12)),
            _deltas(engine, ask((2,), tokens=12, logprobs=True, top_logprobs=2)),
        )
    assert all(not delta.logprobs for delta in plain)
    entries = [entry for delta in rich for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == expected_output([2], 12, tokenizer.vocab_size)
    total = torch.tensor([1.0, *[0.0] * (tokenizer.vocab_size - 1)]).log_softmax(0)
    for entry in entries:
        assert entry.logprob == pytest.approx(float(total[0]), abs=1e-5)
        assert len(entry.top) == 2 and entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))


async def _deltas(engine: AsyncEngine, request: GenerateRequest) -> list[Delta]:
    return [event async for event in await engine.generate(request) if isinstance(event, Delta)]
