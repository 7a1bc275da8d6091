"""A deterministic engine gives a request the same bits alone and in any batch, whatever was cut, cached or retracted.

In `make test` a few random batches of each family, 1,000 of all together in `make nightly`. A batch is a handful of
requests that come at once or one after the other to an engine with settings of its own; each is compared with what an
engine without company, cache and drafts gave it: tokens, and the bits of every log probability of prompt and output.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.streams import DeviceStreams
from core.engine.api import Engine
from core.engine.build import assemble
from core.engine.speculation import Speculation
from core.models.base import Model
from core.models.loader import load_model
from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import started
from tests.support.fakes.adversaries import KnowingDrafter, like_a_coin
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.nightly import runs

CPU = torch.device("cpu")
CONTEXT, OUTPUTS, LONGEST = 224, 24, 190
"""Tokens of a request at most, of an output, of a prompt: past two blocks of keys."""
ROOM = 256
"""Tokens of a tight pool: of one of the longest requests, or a few others."""
DRAFTS = 4
BATCHES, EACH = runs(2, 100), runs(2, 4)
"""Random batches of each family, and of each engine."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "float32": ("llama", "float32", "none"),
    "bfloat16": ("qwen3", "bfloat16", "none"),
    "int8": ("llama", "bfloat16", "int8"),
    "int4": ("llama", "bfloat16", "int4"),
    "windows": ("gemma3_text", "bfloat16", "none"),
    "chunks": ("llama4_text", "float32", "none"),
    "experts": ("gpt_oss", "bfloat16", "none"),
    "latents": ("deepseek_v3", "bfloat16", "none"),
    "codes": ("qwen3", "bfloat16", "none", "int8"),
    "states": ("mamba2", "bfloat16", "none"),
    "states and experts": ("qwen3_next", "bfloat16", "none"),
}
"""Name -> kind of checkpoint, dtype, quantisation at load, and how keys are stored unless as they are computed."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.0, "n": 2},
)


@dataclass
class Answer:
    """What one output of a request was."""

    prompt: bytes = b""
    """Bits of the log probabilities of the prompt."""
    tokens: list[int] = field(default_factory=list)
    bits: list[bytes] = field(default_factory=list)
    """By token, of its log probability and of its alternatives'."""


@dataclass
class Company:
    """What happened to the requests of a test, so that it cannot pass where nothing did."""

    cached: int = 0
    retracted: int = 0
    drafts: int = 0


def shared_prompts(rng: random.Random) -> list[list[int]]:
    """Beginnings that prompts have in common."""
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(LONGEST)] for _ in range(2)]


def batch_of(rng: random.Random, beginnings: Sequence[Sequence[int]]) -> list[GenerateRequest]:
    """Requests of one batch."""
    made = []
    for _ in range(rng.randrange(2, 8)):
        shared = rng.choice(beginnings)[: rng.randrange(1, LONGEST - 30)]
        prompt = [*shared, *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))]
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, OUTPUTS + 1),
            ignore_eos=True,
            seed=rng.randrange(2**31),
            logprobs=True,
            top_logprobs=2,
            **rng.choice(OPTIONS),
        )
        urgency = rng.randrange(3)
        made.append(GenerateRequest(token_ids=tuple(prompt), sampling=sampling, want_text=False, priority=urgency))
    return made


def alone(model: ModelConfig) -> EngineConfig:
    """An engine that shares nothing, and takes each prompt whole."""
    return EngineConfig(
        model=model,
        memory=MemoryConfig(max_running_requests=4, max_total_tokens=1024, prefix_cache="none"),
        scheduler=SchedulerConfig(chunked_prefill_size=256),
        executor=ExecutorConfig(device="cpu", overlap=False, assert_mode="trap"),
    )


def random_engine(rng: random.Random, model: ModelConfig) -> EngineConfig:
    """Settings of an engine that serves batches; every other one has room for few of them."""
    tight = rng.random() < 0.5
    return EngineConfig(
        model=model,
        memory=MemoryConfig(
            page_size=rng.choice([1, 4, 16]),
            max_running_requests=rng.choice([3, 16]),
            max_total_tokens=ROOM if tight else 4096,
            state_track_interval=rng.choice([4, 32]),
            host_cache_bytes=rng.choice([0, 1 << 20]),
            sliding_window_pool=rng.random() < 0.7,
        ),
        scheduler=SchedulerConfig(
            chunked_prefill_size=rng.choice([7, 16, 50, 256]),
            mixed_chunk=rng.random() < 0.7,
            policy=rng.choice(["fcfs", "lpm", "priority"]),
        ),
        executor=ExecutorConfig(device="cpu", overlap=rng.random() < 0.7, assert_mode="trap"),
    )


def drafts(
    rng: random.Random, requests: Sequence[GenerateRequest], wanted: Sequence[Sequence[Answer]]
) -> Speculation | None:
    """Drafts that are right more often than not, in every other engine."""
    if rng.random() < 0.5:
        return None
    said = [
        [*(request.token_ids or ()), *output.tokens]
        for request, outputs in zip(requests, wanted, strict=True)
        for output in outputs
    ]
    drafter = KnowingDrafter(said, like_a_coin(rng.randrange(2**31)), VOCAB_SIZE)
    return Speculation(drafter, DRAFTS, FixedDepth(DRAFTS))


def bits_of(values: Sequence[float]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


async def answer(engine: Engine, request: GenerateRequest, company: Company) -> list[Answer]:
    """By output."""
    found = [Answer() for _ in range(request.sampling.n)]
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            mine = found[event.index]
            told = [bits_of([each.logprob, *(value for _, value in each.top)]) for each in event.logprobs]
            if event.position < 0:
                mine.prompt += b"".join(told)
            else:
                assert event.position == len(mine.tokens)
                mine.tokens += event.token_ids
                mine.bits += told
        elif isinstance(event, Finished):
            company.cached += event.usage.cached_tokens
            company.drafts += event.usage.draft_tokens
    return found


async def in_company(
    engine: Engine, requests: Sequence[GenerateRequest], rng: random.Random, company: Company
) -> list[list[Answer]]:
    """Answers to all `requests`; some come only once the one before them was answered."""
    running: list[asyncio.Task[list[Answer]]] = []
    for request in requests:
        if running and rng.random() < 0.2:
            await running[-1]
        running.append(asyncio.ensure_future(answer(engine, request, company)))
    return await asyncio.gather(*running)


def check_same(got: Sequence[Answer], want: Sequence[Answer], request: GenerateRequest) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.prompt == other.prompt, ("log probabilities of the prompt", request)
        for place, (mine, theirs) in enumerate(zip(one.bits, other.bits, strict=True)):
            assert mine == theirs, (place, struct.unpack("3d", mine), struct.unpack("3d", theirs), request)
        assert one.tokens == other.tokens, request


async def batches(model: Model, tokenizer: Tokenizer, config: ModelConfig, rng: random.Random) -> Company:
    """Random batches, each request compared with itself alone."""
    beginnings, company = shared_prompts(rng), Company()
    asked, streams = [batch_of(rng, beginnings) for _ in range(BATCHES)], DeviceStreams(CPU)
    async with started(assemble(alone(config), model, tokenizer, streams)) as engine:
        wanted = [[await answer(engine, request, Company()) for request in batch] for batch in asked]
    for first in range(0, BATCHES, EACH):
        served, want = asked[first : first + EACH], wanted[first : first + EACH]
        guesses = drafts(rng, [*chain(*served)], [*chain(*want)])
        async with started(assemble(random_engine(rng, config), model, tokenizer, streams, guesses)) as engine:
            for batch, answers in zip(served, want, strict=True):
                for one in zip(await in_company(engine, batch, rng, company), answers, batch, strict=True):
                    check_same(*one)
            company.retracted += engine.stats.preemptions
    return company


@pytest.fixture(scope="module", autouse=True)
def _native_code() -> None:
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
async def test_no_batch_changes_a_bit(family: str, checkpoint_of: Callable[[str], Path], seed: int) -> None:
    kind, dtype, quantization, *stored = FAMILIES[family]
    config = ModelConfig(
        str(checkpoint_of(kind)),
        dtype=dtype,
        quantization=quantization,
        native="wait",
        kv_cache_dtype=stored[0] if stored else "auto",
        context_length=CONTEXT,
        deterministic=True,
    )
    tokenizer, rng = Tokenizer.load(config.path), random.Random(f"{seed} {family}")
    company = await batches(load_model(config, CPU), tokenizer, config, rng)
    # So many batches are sure to have had all of it.
    assert BATCHES < 100 or min(company.cached, company.retracted, company.drafts) > 0, company
