"""Bad input, full queues, deadlines, lazy readers, broken devices: each harms what it must and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.engine.api import EngineState
from core.errors import (
    DeadlinePassed,
    Draining,
    EngineDead,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestFailed,
    SlipstreamError,
    SlowConsumer,
)
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, FinishReason, GenerateRequest
from service.bench.emulated import expected_output
from tests.support.until import until
from tests.support.within import within
from tests.unit.core.engine.emulation import HookedModel, ask, assert_opened, last, read, running


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
async def test_bad_input_names_its_field_and_harms_nobody(
    tokenizer: Tokenizer, request_: GenerateRequest, field: str
) -> None:
    async with running(tokenizer) as engine:
        neighbour = asyncio.create_task(read(engine, ask((3, 3), tokens=100)))
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(request_)
        assert field in {violation.field for violation in caught.value.violations}
        assert (await neighbour)[0] == expected_output([3, 3], 100, tokenizer.vocab_size)
        assert engine.live_requests == 0


async def test_what_never_fits_the_pool_is_refused_and_what_just_fits_is_served(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_total_tokens=64, page_size=16) as engine:
        with pytest.raises(SlipstreamError) as refused:
            await engine.generate(ask((1,) * 40, tokens=26))
        assert isinstance(refused.value, InvalidRequest), "it is told at the door, not by the pool"
        ids, _, _ = await read(engine, ask((1,) * 40, tokens=25))
        assert len(ids) == 25
        try:
            _, _, end = await read(engine, ask((1,) * 40, max_tokens=None))
        except Overloaded as full:
            pytest.fail(f"it was let in and then did not fit: {full}")
        assert end.usage.completion_tokens == 25, "an open limit is cut to what fits"


async def test_full_queue_refuses_at_once(tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    model = HookedModel(tokenizer)
    model.hook = lambda *_: assert_opened(gate)
    async with running(tokenizer, model, max_running_requests=1, max_queued_requests=2) as engine:
        streams = [await engine.generate(ask(tokens=2))]
        await until(lambda: engine.stats.running == 1)
        streams += [await engine.generate(ask(tokens=2)) for _ in range(2)]
        with pytest.raises(Overloaded) as caught:
            await engine.generate(ask(tokens=2))
        assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after > 0
        gate.set()
        for stream in streams:
            assert (await last(stream)).reason is FinishReason.LENGTH


@pytest.mark.alone
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
                await last(stream)
            steps.append(engine.stats.step)
        await until(lambda: all(pool.used == 0 for pool in engine.stats.pools))
        assert steps[1] < 300, "the queued ones did not wait for the running one"


@pytest.mark.alone
async def test_a_reader_that_does_not_read_is_ended_and_others_are_not(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, max_pending_tokens=50) as engine:
        lazy = await engine.generate(ask((1, 2), tokens=1000))
        ids, _, _ = await read(engine, ask((3, 4), tokens=400))
        assert ids == expected_output([3, 4], 400, tokenizer.vocab_size)
        await until(lambda: engine.live_requests == 0)
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
            await last(doomed)
        assert (await neighbour)[0] == expected_output([2, 2], 200, tokenizer.vocab_size)
        assert engine.state is EngineState.READY


@pytest.mark.alone
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
                async with within(5, "every stream ends"):
                    await last(stream)
            assert "secret" not in str(caught.value)
        assert "device-side assert" in str(await asyncio.wait_for(engine.wait_dead(), 5))
        assert engine.state is EngineState.DEAD and engine.live_requests == 0
        with pytest.raises(EngineDead):
            await engine.generate(ask())


@pytest.mark.alone
async def test_hanging_forward_is_noticed(tokenizer: Tokenizer) -> None:
    gate, model = threading.Event(), HookedModel(tokenizer)
    model.hook = lambda step, *_: assert_opened(gate) if step >= 5 else None
    async with running(tokenizer, model, hang_timeout=0.5) as engine:
        stream = await engine.generate(ask(tokens=100))
        dead = asyncio.create_task(engine.wait_dead())
        for _ in range(60):
            # New requests keep the scheduler busy and must not pass for progress of the device.
            with contextlib.suppress(EngineDead):
                await engine.generate(ask(tokens=1))
            if (await asyncio.wait({dead}, timeout=0.1))[0]:
                break
        with pytest.raises(EngineDead):
            async with within(5, "the stream ends"):
                await last(stream)
        gate.set()
        assert engine.state is EngineState.DEAD


@pytest.mark.alone
async def test_drain_lets_short_streams_finish_and_cuts_long_ones(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, HookedModel(tokenizer, step_seconds=0.01)) as engine:
        # By itself the short one takes a seventh of the time that the drain has, the long one thirteen times as much.
        short, long = await engine.generate(ask(tokens=20)), await engine.generate(ask(tokens=1900))
        assert await asyncio.wait_for(engine.drain(1.5), 10) == 1
        assert (await last(short)).reason is FinishReason.LENGTH
        with pytest.raises(Draining):
            await last(long)
        with pytest.raises(Draining):
            await engine.generate(ask())
        assert all(pool.used == 0 for pool in engine.stats.pools)
