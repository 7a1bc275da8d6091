"""Whisper gives what `generate` gives: several sounds beside each other, short ones, retracted and back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.audio import Audio, AudioTask
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.support.engines import started
from tests.support.speech_checkpoints import RATE, make_speech_checkpoint, samples, wav

KINDS = ("whisper",)
OUTPUT = 14
MARGIN = 1e-3
Spoken = tuple[int, float, str, str]
SPOKEN: list[Spoken] = [
    (1, 1.0, "en", "transcribe"),
    (2, 0.4, "de", "translate"),
    (1, 1.0, "de", "transcribe"),
    (3, 0.05, "en", "translate"),
    (4, 0.9, "en", "transcribe"),
    (5, 1.0, "de", "translate"),
    (6, 0.7, "de", "transcribe"),
]
"""Seed and seconds of a sound, language, task."""


class SpeechOracle:
    """`transformers` on one checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory)
        self.many = bool(self.model.generation_config.is_multilingual)

    @torch.no_grad()
    def greedy(self, spoken: Spoken, tokens: int = OUTPUT) -> tuple[int, ...] | None:
        """The output; None where some token was chosen by no more than MARGIN."""
        seed, seconds, language, task = spoken
        heard = samples(seed, seconds).astype("float32") / 32_768
        features = self.extractor(heard, sampling_rate=RATE, return_tensors="pt")["input_features"]
        asked = {"language": language, "task": task} if self.many else {}
        answer = self.model.generate(
            features,
            **asked,
            max_new_tokens=tokens,
            do_sample=False,
            return_timestamps=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = answer["sequences"][0].tolist()[-tokens:]
        scores = [each[0].clone() for each in answer["logits"]]
        for place, each in enumerate(scores):
            each[self.model.generation_config.suppress_tokens] = -torch.inf
            if place == 0:
                each[self.model.generation_config.begin_suppress_tokens] = -torch.inf
        best = torch.stack(scores).topk(2).values
        return tuple(ids) if float((best[:, 0] - best[:, 1]).min()) > MARGIN else None


def config(directory: Path, **memory: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(directory), dtype="float32"),
        memory=MemoryConfig(page_size=4, **{"max_running_requests": 4, "max_total_tokens": 400, **memory}),
        scheduler=SchedulerConfig(chunked_prefill_size=64),
        executor=ExecutorConfig(device="cpu", assert_mode="trap", cpu_threads=1),
    )


def asked(spoken: Spoken, many: bool, **options: Any) -> GenerateRequest:
    seed, seconds, language, task = spoken
    audio = (
        Audio(wav(samples(seed, seconds)), language, AudioTask(task)) if many else Audio(wav(samples(seed, seconds)))
    )
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True, **options})
    return GenerateRequest(audio=audio, sampling=sampling, want_text=False)


async def answer(engine: AsyncEngine, request: GenerateRequest) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(request.sampling.n)]
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            found[event.index] += event.token_ids
    return [tuple(each) for each in found]


@pytest.fixture(scope="module", params=[True, False], ids=["languages", "one language"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return SpeechOracle(make_speech_checkpoint(tmp_path_factory.mktemp("speech"), languages=request.param))


@pytest.mark.parametrize("tokens", [400, 64], ids=["roomy", "tight"])
async def test_tokens_equal_generate(oracle: SpeechOracle, tokens: int) -> None:
    wanted = [oracle.greedy(each) for each in SPOKEN]
    assert sum(each is not None for each in wanted) >= 5, "the oracle is undecided"
    async with started(build_engine(config(oracle.directory, max_total_tokens=tokens))) as engine:
        found = await asyncio.gather(*(answer(engine, asked(each, oracle.many)) for each in SPOKEN))
        twice = await answer(engine, asked(SPOKEN[0], oracle.many, n=2))
    for got, want in zip(found, wanted, strict=True):
        assert want is None or got == [want]
    assert twice == [found[0][0]] * 2
    assert len({each[0] for each in found}) > 3, "what is heard counts"


async def test_no_output_begins_with_what_it_must_not(oracle: SpeechOracle) -> None:
    """Whatever sampling would like, and later it may; what is suppressed for ever never comes."""
    like = dict.fromkeys((45, 130, 6), 50.0)
    async with started(build_engine(config(oracle.directory))) as engine:
        for seed in range(4):
            options = {"temperature": 1.0, "seed": seed, "logit_bias": like, "max_tokens": 6}
            ((first, *rest),) = await answer(engine, asked(SPOKEN[seed], oracle.many, **options))
            assert first not in (2, 45, 130) and set(rest) <= {45, 130} and 6 not in (first, *rest)
