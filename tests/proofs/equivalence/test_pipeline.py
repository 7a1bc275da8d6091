"""An engine whose ranks have some layers each says what an engine of one rank says, token for token."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import EngineDead, ModelLoadError
from core.types.io import Delta, EmbedRequest, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_host_prefixes import CHUNK, in_turn, questions, rounds, small
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, answers, config, requests
from tests.proofs.equivalence.test_tensor_parallel import alone, one_rank_says, tokens
from tests.support.checkpoints import CONFIGS, HEADED_CONFIGS, RECURRENT_CONFIGS, make_checkpoint
from tests.support.encoders import make_encoder
from tests.support.engines import started


def ranks(made: EngineConfig, size: int = 2) -> EngineConfig:
    return dataclasses.replace(made, model=dataclasses.replace(made.model, pipeline_parallel=size, native="off"))


async def compared(
    directory: Path, *, overlap: bool, pages: int = ROOMY, room: int = 0, size: int = 2, each: int = 1
) -> Any:
    """`each`: of how many requests of the matrix one is asked."""
    asked = requests()[::each]
    made = config(directory, pages, room=room, overlap=overlap, cache="radix")
    one = alone(config(directory, ROOMY, room=0, overlap=overlap, cache="radix"))
    expected, _ = await answers(one, asked)
    found, stats = await answers(ranks(made, size), asked)
    # In batches of two, as a pipeline computes them.
    few = dataclasses.replace(one, memory=dataclasses.replace(one.memory, max_running_requests=2))
    expected = await one_rank_says(expected, found, few, asked)
    assert tokens(found) == tokens(expected)
    for want, got in zip(expected, found, strict=True):
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-3, nan_ok=True)
    assert not any(stats.assert_failures.values())
    return stats


async def test_some_of_the_sampling_matrix(checkpoint_of: Callable[[str], Path]) -> None:
    """What runs in every run of CI."""
    await compared(checkpoint_of("llama"), overlap=True, each=5)


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_the_whole_sampling_matrix(checkpoint_of: Callable[[str], Path], overlap: bool) -> None:
    """Penalties, grammars, log probabilities, biases, several outputs: rank 0 samples what comes back."""
    await compared(checkpoint_of("llama"), overlap=overlap)


def deeper(kind: str, directory: Path, times: int = 2) -> Path:
    """A checkpoint of `kind` with its layers `times` over: each rank has some of each kind then."""
    known: dict[str, Any] = (CONFIGS | RECURRENT_CONFIGS | HEADED_CONFIGS)[kind]
    name = "n_layer" if "n_layer" in known else "num_hidden_layers"
    more = {name: known.get(name, 2) * times}
    more |= {"layer_types": known["layer_types"] * times} if "layer_types" in known else {}
    return make_checkpoint(kind, directory, **more)


DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "cohere2", "llama4_text", "gpt2", "gptj")
OTHERS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
STATES = ("qwen3_next", "granitemoehybrid", "lfm2", "mamba2", "mamba")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*DENSE, *OTHERS, *STATES])
async def test_families(kind: str, tmp_path: Path) -> None:
    await compared(deeper(kind, tmp_path), overlap=True)


@pytest.mark.nightly
async def test_gpt_oss(tmp_path: Path) -> None:
    """Inline: a draw of one request lies at a border, and an engine of one rank draws otherwise in smaller batches."""
    await compared(deeper("gpt_oss", tmp_path), overlap=False)


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_three_ranks_of_five_layers(tmp_path: Path, overlap: bool) -> None:
    directory = make_checkpoint("llama", tmp_path, num_hidden_layers=5)
    await compared(directory, overlap=overlap, size=3)


@pytest.mark.nightly
async def test_retracted_requests_come_back_on_every_rank(checkpoint_of: Callable[[str], Path]) -> None:
    stats = await compared(checkpoint_of("llama"), overlap=True, pages=TIGHT, room=ROOM)
    assert stats.rejoined_requests >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
async def test_prefixes_come_back_on_every_rank(tmp_path: Path, kind: str) -> None:
    """Windows within a prompt, and states where prompts differ, too."""
    directory, asked = deeper(kind, tmp_path), rounds() if kind == "llama" else questions(3)
    expected, _ = await in_turn(alone(config(directory, ROOMY, room=0, overlap=True, cache="radix")), asked)
    tight = small(config(directory, 26, room=ROOM, overlap=True, cache="radix"))
    found, stats = await in_turn(ranks(tight), asked)
    fetched = {"llama": 6 * CHUNK, "gemma3_text": 6 * 6 * CHUNK, "qwen3_next": 3 * 6 * CHUNK}
    assert tokens(found) == tokens(expected) and stats.host_fetched_tokens >= fetched[kind]


@pytest.mark.nightly
async def test_embeddings_and_prompt_log_probabilities(checkpoint_of: Callable[[str], Path]) -> None:
    """The states of all tokens come back for a vector, those of some for log probabilities, none between chunks."""
    made = config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix")
    made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, chunked_prefill_size=16))
    prompt = tuple(range(5, 55))

    async def asked(engine: AsyncEngine) -> tuple[list[float], list[float]]:
        call = await engine.embed(EmbedRequest(inputs=(prompt,)))
        (embedding,) = (await call.result()).embeddings
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, prompt_logprobs=0)
        request = GenerateRequest(token_ids=prompt, sampling=sampling, want_text=False)
        told = [event async for event in await engine.generate(request) if isinstance(event, Delta)]
        return embedding.values.tolist(), [each.logprob for event in told for each in event.logprobs]

    async with started(build_engine(alone(made))) as engine:
        expected = await asked(engine)
    async with started(build_engine(ranks(made))) as engine:
        found = await asked(engine)
    for want, got in zip(expected, found, strict=True):
        assert len(want) and got == pytest.approx(want, abs=1e-4)


@pytest.mark.nightly
async def test_a_rank_that_dies_ends_every_stream_once(checkpoint_of: Callable[[str], Path]) -> None:
    made = ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix"))
    async with started(build_engine(made)) as engine:
        sampling = SamplingParams(max_tokens=450, ignore_eos=True)
        request = GenerateRequest(token_ids=(5, 6), sampling=sampling, want_text=False)
        streams = [await engine.generate(request) for _ in range(4)]
        for stream in streams:
            assert await anext(stream) is not None
        (process,) = engine._watchdog.ranks._processes  # type: ignore[union-attr]
        process.kill()
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        await asyncio.wait_for(engine.wait_dead(), 30)


async def refusal(directory: Path, size: int = 2) -> str:
    with pytest.raises(ModelLoadError) as caught:
        build_engine(ranks(config(directory, ROOMY, room=0, overlap=True, cache="radix"), size))
    return str(caught.value)


@pytest.mark.nightly
async def test_models_that_cannot_be_cut_are_refused_by_name(checkpoint_of: Callable[[str], Path]) -> None:
    said = await refusal(checkpoint_of("gemma2"))
    assert said == "pipeline_parallel 2 is not possible with 'gemma2': its ranks would have layers of different kinds"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("llama", 3, "pipeline_parallel 3 is not possible with 'llama': it has 2 layers"),
        ("qwen3_next", 2, "its ranks would have layers of different kinds"),
        ("gemma4_text", 2, "model type 'gemma4_text' with pipeline_parallel 2 is not supported"),
        ("falcon_h1", 2, "pipeline_parallel 2 is not possible with 'falcon_h1'"),
        ("modernbert", 2, "pipeline_parallel is not possible with 'modernbert' yet: it encodes"),
    ],
)
async def test_others_that_cannot_be_cut(
    checkpoint_of: Callable[[str], Path], kind: str, size: int, said: str, tmp_path: Path
) -> None:
    directory = make_encoder(kind, tmp_path) if kind == "modernbert" else checkpoint_of(kind)
    assert said in await refusal(directory, size)
