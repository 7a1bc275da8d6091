"""Log probabilities of prompts equal those of `transformers`, however prompts are cut, and whatever else is served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.errors import SlipstreamError
from core.executor import scorer
from core.scheduler import prefill_adder
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.client import CallFailed, Chunk, Completion, End, PromptChunk, SlipstreamClient
from tests.proofs.equivalence.test_decode_graphs import graph_engine
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.tight_allocator import ERRORS
from tests.support.servers import serve_checkpoint

KINDS = ("llama", "gemma3_text", "deepseek_v3", "qwen3_moe", "mamba2", "lfm2")
TOP = 3


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def expected(directory: Path, prompt: list[int]) -> torch.Tensor:
    """float64[n - 1, V]: log probabilities at each place behind the first."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def check_told(told: Completion, prompt: list[int], wanted: torch.Tensor, top: int = TOP) -> None:
    assert [token for token, _, _ in told.prompt_logprobs] == prompt[1:]
    for place, (token, value, alternatives) in enumerate(told.prompt_logprobs):
        assert value == pytest.approx(float(wanted[place, token]), abs=2e-4), place
        best = wanted[place].sort(descending=True).values[:top].tolist()
        assert [each for _, each in alternatives] == pytest.approx(best, abs=2e-4), place
        assert len(alternatives) == top and [float(wanted[place, each]) for each, _ in alternatives] == pytest.approx(
            [each for _, each in alternatives], abs=2e-4
        )


async def scored(client: SlipstreamClient, prompt: list[int], **options: Any) -> list[Completion]:
    asked = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, "prompt_logprobs": TOP}
    return await client.complete(prompt, **asked | options)


@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.parametrize("kind", KINDS)
async def test_they_equal_transformers(
    kind: str, native: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of 16 tokens, beside requests that decode and others that are scored."""
    monkeypatch.setattr(prefill_adder, "SCORED_BYTES", 0)
    rng, directory = random.Random(kind), checkpoint_of(kind)
    prompts = [prompt_of(rng, length) for length in (70, 33, 2, 1)]
    async with serve_checkpoint(directory, native=native, chunked_prefill_size=48) as (_, client):
        beside = [client.complete(prompt_of(rng, 20), max_tokens=30, ignore_eos=True) for _ in range(3)]
        done = await asyncio.gather(*(scored(client, prompt) for prompt in prompts), *beside)
        plain = await scored(client, prompts[0], prompt_logprobs=None)
    for prompt, (told,) in zip(prompts, done, strict=False):
        assert len(told.token_ids) == 5 and told.end.cached_tokens == 0
        if len(prompt) > 1:
            check_told(told, prompt, expected(directory, prompt))
        else:
            assert told.prompt_logprobs == ()
    assert plain[0].token_ids == done[0][0].token_ids and plain[0].prompt_logprobs == ()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"overlap": False}, id="no overlap"),
        pytest.param({"speculative": "ngram"}, id="drafts"),
        pytest.param({"mixed_chunk": False}, id="chunks apart"),
        pytest.param({"prefix_cache": "none"}, id="no cache"),
    ],
)
async def test_however_it_is_served(settings: dict[str, Any], checkpoint_of: Callable[[str], Path]) -> None:
    """Also where the cache has the prompt, for outputs that share it, and with log probabilities of outputs."""
    rng, directory = random.Random(9), checkpoint_of("qwen3")
    prompt = prompt_of(rng, 90)
    wanted = expected(directory, prompt)
    async with serve_checkpoint(directory, chunked_prefill_size=32, **settings) as (_, client):
        first = await scored(client, prompt, n=3, logprobs=True, top_logprobs=1)
        again = await scored(client, prompt, prompt_logprobs=0)
        warm = await scored(client, prompt, prompt_logprobs=None)
    check_told(first[0], prompt, wanted)
    check_told(again[0], prompt, wanted, 0)
    assert {each.token_ids for each in (*first, *again, *warm)} == {first[0].token_ids}
    if settings.get("prefix_cache") != "none":
        assert warm[0].end.cached_tokens > 0 and again[0].end.cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 3, 7, 40])
async def test_chosen_ids_are_told_of_outputs_alone(length: int, checkpoint_of: Callable[[str], Path]) -> None:
    """Also where the reader takes tokens of the prompt and of the output at once."""
    ids, rng = [7, 5, 9, 5], random.Random(length)
    prompt = prompt_of(rng, length)
    asked = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, "n": 2, "logprobs": True}

    async def told(client: SlipstreamClient, most: int | None) -> list[list[tuple[float, ...]]]:
        found: list[list[tuple[float, ...]]] = [[], []]
        async for event in client.generate(prompt, **asked, logprob_token_ids=ids, prompt_logprobs=most):
            if isinstance(event, Chunk):
                assert len(event.chosen_logprobs) == len(event.logprobs) == len(event.token_ids)
                found[event.index] += event.chosen_logprobs
        return found

    async with serve_checkpoint(checkpoint_of("llama"), chunked_prefill_size=32) as (_, client):
        plain = await told(client, None)
        assert [len(values) for output in plain for values in output] == [len(ids)] * 10
        for most in (0, TOP):
            for output, wanted in zip(await told(client, most), plain, strict=True):
                assert output == [pytest.approx(values, abs=2e-4) for values in wanted]


async def test_a_retracted_prompt_is_told_once(checkpoint_of: Callable[[str], Path]) -> None:
    """Of a pool that is too small for all of them, so that some are computed twice."""
    rng, directory = random.Random(10), checkpoint_of("llama")
    prompts = [prompt_of(rng, 60) for _ in range(5)]
    async with serve_checkpoint(directory, chunked_prefill_size=16, max_total_tokens=288, page_size=16) as (
        server,
        client,
    ):
        done = await asyncio.gather(*(scored(client, prompt, max_tokens=60, temperature=1.0) for prompt in prompts))
        assert server.engine.stats.preemptions > 0
    for prompt, (told,) in zip(prompts, done, strict=True):
        check_told(told, prompt, expected(directory, prompt))


async def test_without_memory_for_them_their_requests_end_alone(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise ERRORS[0]()

    rng, directory = random.Random(13), checkpoint_of("llama")
    prompt = prompt_of(rng, 40)
    async with serve_checkpoint(directory, chunked_prefill_size=48) as (_, client):
        (plain,) = await scored(client, prompt, prompt_logprobs=None, max_tokens=60)
        monkeypatch.setattr(scorer, "_scored", short)
        beside = asyncio.create_task(scored(client, prompt, prompt_logprobs=None, max_tokens=60))
        with pytest.raises(CallFailed) as failed:
            await scored(client, prompt_of(rng, 30))
        assert failed.value.reason == "DEVICE_MEMORY"
        assert (await beside)[0].token_ids == plain.token_ids


async def test_captured_steps_are_for_others(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has a place for the logits of each row, and none for those of a prompt."""
    rng, directory = random.Random(12), checkpoint_of("llama")
    prompt = prompt_of(rng, 21)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=TOP, ignore_eos=True)
    options: dict[str, Any] = {"overlap": True, "backend": MixedAttention}
    async with graph_engine(directory, monkeypatch, **options) as (engine, _, runner):
        stream = await engine.generate(GenerateRequest(token_ids=tuple(prompt), sampling=params))
        try:
            deltas = [event async for event in stream if isinstance(event, Delta)]
        except SlipstreamError as error:
            pytest.fail(f"told from a graph: {error}")
        assert runner.graphs is not None and runner.graphs.replays > 0
    told = [entry for delta in deltas if delta.position < 0 for entry in delta.logprobs]
    wanted = expected(directory, prompt)
    assert [entry.token_id for entry in told] == prompt[1:]
    found = [entry.logprob for entry in told]
    assert found == pytest.approx([float(wanted[i, token]) for i, token in enumerate(prompt[1:])], abs=2e-4)


async def test_events_come_before_the_first_token_and_end_with_the_call(checkpoint_of: Callable[[str], Path]) -> None:
    rng = random.Random(11)
    prompt = prompt_of(rng, 100)
    async with serve_checkpoint(checkpoint_of("llama"), chunked_prefill_size=16) as (_, client):
        events = [event async for event in client.generate(prompt, prompt_logprobs=1, max_tokens=3, ignore_eos=True)]
        kinds = [isinstance(event, PromptChunk) for event in events]
        assert kinds == sorted(kinds, reverse=True) and sum(kinds) > 1
        places = [event.position for event in events if isinstance(event, PromptChunk)]
        sizes = [len(event.logprobs) for event in events if isinstance(event, PromptChunk)]
        assert places == [1 + sum(sizes[:i]) for i in range(len(sizes))] and sum(sizes) == 99
        left = []
        async for event in client.generate(prompt * 9, request_id="left", prompt_logprobs=1, max_tokens=100):
            if not left:
                await client.abort("left")
            left.append(event)
        assert isinstance(left[0], PromptChunk) and isinstance(left[-1], End) and left[-1].reason == "cancelled"
        with pytest.raises(CallFailed) as refused:
            await client.complete(prompt, prompt_logprobs=1, resumable=True)
    assert list(refused.value.fields) == ["sampling_params.prompt_logprobs"]
