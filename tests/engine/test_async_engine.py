"""The engine in process over an emulated device: admission, endings, trouble. Real scheduler, forward thread and relay."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.config import EngineConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import assemble
from core.engine.door import EngineState
from core.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestFailed,
    SlowConsumer,
)
from core.text.tokenizer import Tokenizer
from core.types.io import ChatMessage, Delta, Finished, FinishReason, GenerateRequest, Started
from core.types.sampling_params import SamplingParams
from service.bench.emulated import EmulatedModel, EmulatedStreams, Timeline, expected_output
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.real_server import emulated_config


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), seed=0)
    return Tokenizer.load(directory)


class HookedModel(EmulatedModel):
    """Calls `hook(step, logits, batch)` before it answers; the step counts from 1."""

    def __init__(self, tokenizer: Tokenizer, step_seconds: float = 0.001) -> None:
        super().__init__(Timeline(step_seconds), tokenizer.vocab_size)
        self.step = 0
        self.hook: Callable[[int, torch.Tensor, ForwardBatch], None] = lambda *_: None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.step += 1
        logits = super().forward(batch)
        self.hook(self.step, logits, batch)
        return logits


@asynccontextmanager
async def running(tokenizer: Tokenizer, model: HookedModel | None = None, **changes: Any) -> AsyncIterator[AsyncEngine]:
    """A started engine; `changes` replace fields of the engine's config or of its floors."""
    model = model or HookedModel(tokenizer)
    config = _changed(emulated_config(rows=8, max_total_tokens=2048), changes)
    engine = assemble(config, model, tokenizer, EmulatedStreams(model.timeline))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def _changed(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    for name, value in changes.items():
        for floor in ("memory", "scheduler", "executor"):
            part = getattr(config, floor)
            if name in {field.name for field in dataclasses.fields(part)}:
                config = dataclasses.replace(config, **{floor: dataclasses.replace(part, **{name: value})})
                break
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


def ask(prompt: tuple[int, ...] = (5, 6, 7), *, tokens: int = 8, want_text: bool = False, **rest: Any) -> GenerateRequest:
    own = {field.name for field in dataclasses.fields(GenerateRequest)}
    sampling = {key: rest.pop(key) for key in list(rest) if key not in own}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling})
    return GenerateRequest(token_ids=prompt, sampling=params, want_text=want_text, **rest)


async def read(engine: AsyncEngine, request: GenerateRequest) -> tuple[list[int], str, Finished]:
    """Ids, text and terminal of a request with one output; checks the order of events on the way."""
    ids: list[int] = []
    text, end = "", None
    events = [event async for event in await engine.generate(request)]
    assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
    for event in events[1:]:
        if isinstance(event, Delta):
            assert end is None and event.position == len(ids)
            ids += event.token_ids
            text += event.text
        else:
            assert isinstance(event, Finished) and end is None
            end = event
    assert end is not None and end.usage.completion_tokens == len(ids)
    return ids, text, end


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
        ids, text, _ = await read(engine, ask(tokens=30, want_text=True))
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


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(()), "token_ids.ids"),
        (ask((1, 10**6)), "token_ids.ids[1]"),
        (ask((-1,)), "token_ids.ids[0]"),
        (ask((1,) * 5000), "token_ids.ids"),
        (ask(tokens=10**6), "sampling_params.max_tokens"),
        (ask(tokens=2047), "sampling_params.max_tokens"),
        (ask(temperature=float("nan")), "sampling_params.temperature"),
        (ask(top_p=0.0), "sampling_params.top_p"),
        (ask(stop_token_ids=(10**6,)), "sampling_params.stop_token_ids[0]"),
        (GenerateRequest(chat=()), "chat"),
        (GenerateRequest(text="\ud800"), "text"),
        (GenerateRequest(text="x" * 10**6), "text"),
    ],
)
async def test_bad_input_names_its_field_and_harms_nobody(tokenizer: Tokenizer, request_: GenerateRequest, field: str) -> None:
    async with running(tokenizer) as engine:
        neighbour = asyncio.create_task(read(engine, ask((3, 3), tokens=100)))
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(request_)
        assert field in {violation.field for violation in caught.value.violations}
        assert (await neighbour)[0] == expected_output([3, 3], 100, tokenizer.vocab_size)
        assert engine.live_requests == 0


async def test_what_never_fits_the_pool_is_refused_and_what_just_fits_is_served(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_total_tokens=64, page_size=16) as engine:
        with pytest.raises(InvalidRequest):
            await engine.generate(ask((1,) * 40, tokens=26))
        ids, _, _ = await read(engine, ask((1,) * 40, tokens=25))
        assert len(ids) == 25
        _, _, end = await read(engine, ask((1,) * 40, max_tokens=None))
        assert end.usage.completion_tokens == 25, "an open limit is cut to what fits"


async def test_duplicate_of_a_live_id_is_refused_and_free_again_afterwards(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        stream = await engine.generate(ask(request_id="a", tokens=500))
        with pytest.raises(DuplicateRequest):
            await engine.generate(ask(request_id="a"))
        assert engine.abort("a") and (await asyncio.wait_for(_last(stream), 5)).reason is FinishReason.CANCELLED
        assert not engine.abort("a") and not engine.abort("never-seen")
        await read(engine, ask(request_id="a"))


async def _last(stream: Any) -> Finished:
    event = None
    async for event in stream:
        pass
    assert isinstance(event, Finished)
    return event


async def test_full_queue_refuses_at_once(tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    model = HookedModel(tokenizer)
    model.hook = lambda *_: None if gate.wait(10) else None
    async with running(tokenizer, model, max_running_requests=1, max_queued_requests=2) as engine:
        streams = [await engine.generate(ask(tokens=2))]
        await _until(lambda: engine.stats.running == 1)
        streams += [await engine.generate(ask(tokens=2)) for _ in range(2)]
        with pytest.raises(Overloaded) as caught:
            await engine.generate(ask(tokens=2))
        assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after > 0
        gate.set()
        for stream in streams:
            assert (await _last(stream)).reason is FinishReason.LENGTH


async def _until(condition: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.001)


async def test_deadlines_before_in_the_queue_and_while_decoding(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_running_requests=1) as engine:
        with pytest.raises(DeadlinePassed):
            await engine.generate(ask(deadline=time.monotonic() - 1))
        decoding = await engine.generate(ask(tokens=1500, deadline=time.monotonic() + 0.3))
        queued = await engine.generate(ask(tokens=5, deadline=time.monotonic() + 0.05))
        impatient = await engine.generate(ask(tokens=5, queue_timeout=0.05))
        steps = []
        for stream, error in ((queued, DeadlinePassed), (impatient, QueueTimeout), (decoding, DeadlinePassed)):
            with pytest.raises(error):
                await _last(stream)
            steps.append(engine.stats.step)
        await _until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
        assert steps[1] < 300, "the queued ones did not wait for the running one"


async def test_a_reader_that_does_not_read_is_ended_and_others_are_not(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_pending_tokens=50) as engine:
        lazy = await engine.generate(ask((1, 2), tokens=1000))
        ids, _, _ = await read(engine, ask((3, 4), tokens=400))
        assert ids == expected_output([3, 4], 400, tokenizer.vocab_size)
        await _until(lambda: engine.live_requests == 0)
        assert all(pool.used == 0 for pool in engine.stats.pools)
        delivered: list[int] = []
        with pytest.raises(SlowConsumer):
            async for event in lazy:
                if isinstance(event, Delta):
                    delivered += event.token_ids
        assert 50 <= len(delivered) <= 60
        assert delivered == expected_output([1, 2], 1000, tokenizer.vocab_size)[: len(delivered)]


async def test_non_finite_row_fails_alone(tokenizer: Tokenizer) -> None:
    model = HookedModel(tokenizer)

    def plant(step: int, logits: torch.Tensor, batch: ForwardBatch) -> None:
        if step == 20:
            logits[(batch.input_ids[batch.last_indices] == doomed_token).nonzero()[0]] = float("nan")

    async with running(tokenizer, model) as engine:
        expected = expected_output([1, 1], 200, tokenizer.vocab_size)
        doomed_token = expected[18]
        doomed = await engine.generate(ask((1, 1), tokens=200))
        model.hook = plant
        neighbour = asyncio.create_task(read(engine, ask((2, 2), tokens=200)))
        with pytest.raises(RequestFailed):
            await _last(doomed)
        assert (await neighbour)[0] == expected_output([2, 2], 200, tokenizer.vocab_size)
        assert engine.state is EngineState.READY


@pytest.mark.parametrize("overlap", [True, False])
async def test_failing_forward_ends_every_stream_and_the_engine(tokenizer: Tokenizer, overlap: bool) -> None:
    model = HookedModel(tokenizer)

    def fail(step: int, logits: torch.Tensor, batch: ForwardBatch) -> None:
        if step == 10:
            raise RuntimeError("CUDA error: device-side assert triggered at /secret/path")

    model.hook = fail
    async with running(tokenizer, model, overlap=overlap, max_running_requests=2) as engine:
        streams = [await engine.generate(ask((n + 1,), tokens=200)) for n in range(4)]
        for stream in streams:
            with pytest.raises(EngineDead) as caught:
                await asyncio.wait_for(_last(stream), 5)
            assert "secret" not in str(caught.value)
        assert "device-side assert" in str(await asyncio.wait_for(engine.wait_dead(), 5))
        assert engine.state is EngineState.DEAD and engine.live_requests == 0
        with pytest.raises(EngineDead):
            await engine.generate(ask())


async def test_hanging_forward_is_noticed(tokenizer: Tokenizer) -> None:
    gate, model = threading.Event(), HookedModel(tokenizer)
    model.hook = lambda step, *_: None if step < 5 else (gate.wait(30) and None)
    async with running(tokenizer, model, hang_timeout=0.5) as engine:
        stream = await engine.generate(ask(tokens=100))
        with pytest.raises(EngineDead):
            await asyncio.wait_for(_last(stream), 5)
        assert engine.state is EngineState.DEAD
        gate.set()


async def test_drain_lets_short_streams_finish_and_cuts_long_ones(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as engine:
        short, long = await engine.generate(ask(tokens=20)), await engine.generate(ask(tokens=1900))
        assert await asyncio.wait_for(engine.drain(0.3), 5) == 1
        assert (await _last(short)).reason is FinishReason.LENGTH
        with pytest.raises(Draining):
            await _last(long)
        with pytest.raises(Draining):
            await engine.generate(ask())
        assert all(pool.used == 0 for pool in engine.stats.pools)


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
