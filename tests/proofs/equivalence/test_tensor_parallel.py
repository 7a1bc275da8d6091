"""An engine of two ranks says what an engine of one says, token for token, whatever the model and the request."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, SpeculationConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.errors import ConfigError, EngineDead, ModelLoadError, Unsupported
from core.types.control import WeightSource
from core.types.io import Delta, EmbedRequest, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_host_prefixes import CHUNK, in_turn, questions, rounds, small
from tests.proofs.equivalence.test_rejoining import ROOM, ROOMY, TIGHT, Answer, answers, config, requests
from tests.support.engines import started
from tests.support.judges import make_judge
from tests.support.ports import listening
from tests.support.until import until
from tests.support.vision_checkpoints import make_vision_checkpoint

SHARED = ("qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "cohere2", "llama4_text", "mixtral", "qwen3_moe")
LATENTS_AND_STATES = ("deepseek_v3", "glm4_moe", "qwen3_next")


def ranks(made: EngineConfig, size: int = 2) -> EngineConfig:
    return dataclasses.replace(made, model=dataclasses.replace(made.model, tensor_parallel=size, native="off"))


def alone(made: EngineConfig) -> EngineConfig:
    return dataclasses.replace(made, model=dataclasses.replace(made.model, native="off"))


def tokens(found: list[Answer]) -> list[list[int]]:
    return [[token for token, _ in each] for each in found]


async def one_rank_says(
    expected: list[Answer], found: list[Answer], other: EngineConfig, asked: list[GenerateRequest]
) -> list[Answer]:
    """`expected`, and where `found` differs what `other` says, an engine of one rank with other batches.

    A draw may lie at a border, which sums in another order cross; then one rank draws either, by what is computed
    together.
    """
    if tokens(found) == tokens(expected):
        return expected
    there, _ = await answers(other, asked)
    together = zip(expected, there, found, strict=True)
    return [want if tokens([want]) == tokens([got]) else said for want, said, got in together]


async def compared(directory: Path, *, overlap: bool, pages: int = ROOMY, room: int = 0) -> Any:
    asked = requests()
    made = config(directory, pages, room=room, overlap=overlap, cache="radix")
    one = alone(config(directory, ROOMY, room=0, overlap=overlap, cache="radix"))
    expected, _ = await answers(one, asked)
    found, stats = await answers(ranks(made), asked)
    shorter = dataclasses.replace(one, scheduler=dataclasses.replace(one.scheduler, chunked_prefill_size=8))
    expected = await one_rank_says(expected, found, shorter, asked)
    assert tokens(found) == tokens(expected)
    for want, got in zip(expected, found, strict=True):
        assert [lp for _, lp in got] == pytest.approx([lp for _, lp in want], abs=1e-3, nan_ok=True)
    assert not any(stats.assert_failures.values())
    return stats


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_the_whole_sampling_matrix(checkpoint_of: Callable[[str], Path], overlap: bool) -> None:
    """Penalties, grammars, log probabilities, biases, several outputs: rank 0 samples, and the others hear of it.

    With drafts and an adapter it is in every run of CI (`test_parallel_drafts`).
    """
    await compared(checkpoint_of("llama"), overlap=overlap)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*SHARED, *LATENTS_AND_STATES])
async def test_families(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    await compared(checkpoint_of(kind), overlap=True)


@pytest.mark.nightly
async def test_the_text_of_a_model_that_sees_is_shared(tmp_path: Path) -> None:
    """Where transformers has a class for its text; one rank would also take images."""
    await compared(make_vision_checkpoint("qwen3_5", tmp_path / "qwen3_5"), overlap=True)


@pytest.mark.nightly
async def test_retracted_requests_come_back_on_every_rank(checkpoint_of: Callable[[str], Path]) -> None:
    stats = await compared(checkpoint_of("llama"), overlap=True, pages=TIGHT, room=ROOM)
    assert stats.rejoined_requests >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
async def test_prefixes_come_back_on_every_rank(checkpoint_of: Callable[[str], Path], kind: str) -> None:
    """Windows within a prompt, and states where prompts differ, too."""
    directory, asked = checkpoint_of(kind), rounds() if kind == "llama" else questions(3)
    expected, _ = await in_turn(alone(config(directory, ROOMY, room=0, overlap=True, cache="radix")), asked)
    tight = small(config(directory, 26, room=ROOM, overlap=True, cache="radix"))
    found, stats = await in_turn(ranks(tight), asked)
    fetched = {"llama": 6 * CHUNK, "gemma3_text": 6 * 6 * CHUNK, "qwen3_next": 3 * 6 * CHUNK}
    assert tokens(found) == tokens(expected) and stats.host_fetched_tokens >= fetched[kind]


@pytest.mark.nightly
async def test_embeddings_and_prompt_log_probabilities(checkpoint_of: Callable[[str], Path]) -> None:
    made = config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix")

    async def asked(engine: AsyncEngine) -> tuple[list[float], list[float]]:
        call = await engine.embed(EmbedRequest(inputs=((5, 6, 7, 8),)))
        (embedding,) = (await call.result()).embeddings
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        request = GenerateRequest(token_ids=(5, 6, 7, 8, 9), sampling=sampling, want_text=False)
        told = [event async for event in await engine.generate(request) if isinstance(event, Delta)]
        return embedding.values.tolist(), [each.logprob for event in told for each in event.logprobs]

    async with started(build_engine(alone(made))) as engine:
        expected = await asked(engine)
    async with started(build_engine(ranks(made))) as engine:
        found = await asked(engine)
    for want, got in zip(expected, found, strict=True):
        assert len(want) and got == pytest.approx(want, abs=1e-4)


@pytest.mark.nightly
async def test_ranks_listen_on_loopback_only(checkpoint_of: Callable[[str], Path]) -> None:
    before = listening()
    async with started(build_engine(ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix")))):
        assert listening() - before <= {"0100007F"} and "0100007F" in listening()


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.nightly)])
async def test_a_rank_that_dies_ends_every_stream_once(checkpoint_of: Callable[[str], Path], busy: bool) -> None:
    made = ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix"))
    async with started(build_engine(made)) as engine:
        sampling = SamplingParams(max_tokens=450, ignore_eos=True)
        stream = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=sampling, want_text=False))
        first = await anext(stream)
        assert first is not None
        if not busy:
            await stream.aclose()
            await until(lambda: engine.stats.running == 0)
        (process,) = engine._watchdog.ranks._processes  # type: ignore[union-attr]
        process.kill()
        if busy:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        await asyncio.wait_for(engine.wait_dead(), 30)
        with pytest.raises(EngineDead):
            engine.refuse_unless_ready()


@pytest.mark.nightly
async def test_what_ranks_cannot_do_yet_is_refused_by_name(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    made = ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix"))
    refused = {
        "a model that drafts": dataclasses.replace(made, speculation=SpeculationConfig("mtp")),
        "quantization": dataclasses.replace(made, model=dataclasses.replace(made.model, quantization="int8")),
        "kv_cache_dtype": dataclasses.replace(made, model=dataclasses.replace(made.model, kv_cache_dtype="int8")),
        "weights_dir": dataclasses.replace(made, model=dataclasses.replace(made.model, weights_dir=str(tmp_path))),
    }
    for name, each in refused.items():
        with pytest.raises(ConfigError, match=f"tensor_parallel is not possible with {name} yet"):
            build_engine(each)
    async with started(build_engine(made)) as engine:
        for call in (engine.control.sleep(), engine.control.update_weights(WeightSource(path="x"), "2")):
            with pytest.raises(Unsupported, match="is neither exchanged nor put to sleep yet"):
                await call


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param("gpt_oss", "transformers shares out no layer of 'gpt_oss'", marks=pytest.mark.nightly),
        ("mistral", "num_key_value_heads is 1, no multiple of it"),
    ],
)
def test_models_that_cannot_be_shared_out_are_refused_by_name(
    checkpoint_of: Callable[[str], Path], kind: str, said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        build_engine(ranks(config(checkpoint_of(kind), ROOMY, room=0, overlap=True, cache="radix")))


@pytest.mark.nightly
async def test_an_engine_that_stops_lets_its_ranks_end_by_themselves(checkpoint_of: Callable[[str], Path]) -> None:
    """Also in the midst of a stream, with whatever computes by default."""
    made = config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix")
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, tensor_parallel=2))
    async with started(build_engine(made)) as engine:
        (process,) = engine._watchdog.ranks._processes  # type: ignore[union-attr]
        sampling = SamplingParams(max_tokens=450, ignore_eos=True)
        stream = await engine.generate(GenerateRequest(token_ids=(5, 6), sampling=sampling, want_text=False))
        assert await anext(stream) is not None
    assert process.exitcode == 0


@pytest.mark.nightly
def test_a_process_that_leaves_without_a_stop_ends(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    made = ranks(config(checkpoint_of("llama"), ROOMY, room=0, overlap=True, cache="radix"))
    program = tmp_path / "leaves.py"
    program.write_text(
        "from core.config import *\n"
        "from core.engine.build import build_engine\n"
        "if __name__ == '__main__':\n"
        f"    built = build_engine({made!r})\n"
        "    raise SystemExit(7)\n"
    )
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(program)], env=os.environ | {"PYTHONPATH": path}, timeout=60)
    assert done.returncode == 7


def test_a_head_that_judges_is_refused(tmp_path: Path) -> None:
    directory = make_judge("llama", tmp_path / "judge", ("bad", "fine", "good"))
    with pytest.raises(ModelLoadError, match="not possible with 'llama' yet: it has a head that judges"):
        build_engine(ranks(config(directory, ROOMY, room=0, overlap=True, cache="radix")))
