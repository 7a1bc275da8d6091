"""Embeddings, constrained outputs and LoRA rows in one step: each gets what it gets alone."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.batch.schedule_batch import ScheduleBatch
from core.config import LoraConfig
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.models.lora.slots import LORA, LoraWrites
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import Delta, EmbedRequest, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.constraints.asks import BACKENDS
from tests.proofs.equivalence.oracle import make_prompts
from tests.proofs.equivalence.test_embeddings import engine
from tests.support.nightly import runs
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

REGEX = "[0-9]{4}(-[a-z]{3,6}){20,40}"
"""Longer than `TOKENS` for whoever spells it letter by letter."""
ROUND = runs(1, 2)
"""Of each kind of generation."""
TOKENS = 64


@pytest.fixture(scope="module")
def made(checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = checkpoint_of("llama")
    return base, make_adapter(base, tmp_path_factory.mktemp("adapter"), 3, **ADAPTERS["all"])


def generations(seed: int) -> list[GenerateRequest]:
    """Constrained or not, adapted or not, with log probabilities and penalties or not. Greedy: a draw falls between two
    tokens often enough for the rounding of another batch to decide.
    """
    rng = random.Random(seed)
    asked = []
    for number, prompt in enumerate(make_prompts(4 * ROUND, 60, seed=seed)):
        constrained, adapted = number % 2 == 0, number % 4 < 2
        sampling: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.5:
            sampling |= {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}
        asked.append(
            GenerateRequest(
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=not constrained, **sampling),
                adapter="one" if adapted else "",
                constraint=Constraint(ConstraintKind.REGEX, REGEX) if constrained else None,
            )
        )
    return asked


async def generate(
    served: Any, request: GenerateRequest, begun: asyncio.Event | None = None
) -> tuple[str, tuple[int, ...], list[float]]:
    text, ids, logprobs = "", [], []
    async for event in await served.generate(request):
        if isinstance(event, Delta):
            if begun is not None:
                begun.set()
            text += event.text
            ids += event.token_ids
            logprobs += [each.logprob for each in event.logprobs]
    return text, tuple(ids), logprobs


async def embed(served: Any, prompt: tuple[int, ...]) -> np.ndarray:
    (answer,) = (await (await served.embed(EmbedRequest((prompt,), normalize=False))).result()).embeddings
    values: np.ndarray = answer.values
    return values


@pytest.mark.parametrize("backend", BACKENDS[:1])
async def test_all_kinds_in_one_step_equal_each_alone(
    made: tuple[Path, Path], backend: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = made
    kinds: list[tuple[bool, bool, bool, bool]] = []
    launch = StepRunner.launch

    def noting(self: StepRunner, batch: ScheduleBatch, *rest: Any) -> LaunchedStep:
        lora = batch.companion_writes.get(LORA)
        adapted = isinstance(lora, LoraWrites) and bool(lora.groups)
        free = len(batch.sampling) > len(batch.sampling.constrained)
        kinds.append((batch.pooling is not None, len(batch.sampling.constrained) > 0, adapted, free))
        return launch(self, batch, *rest)

    monkeypatch.setattr(StepRunner, "launch", noting)
    asked, texts = generations(seed), make_prompts(6 * ROUND, 150, seed=seed + 1)
    lora = LoraConfig(adapters=(("one", str(adapter)),))
    async with engine(base, lora=lora, rows=64) as served:
        # Compiled before: what has no constraint would be over by the time that the others may begin.
        await generate(served, asked[0])
        kinds.clear()
        begun = [asyncio.Event() for _ in asked]
        streams = [asyncio.create_task(generate(served, *each)) for each in zip(asked, begun, strict=True)]
        # All run, and one embedding comes after the other: each has a step of its own to share with them.
        await asyncio.gather(*(each.wait() for each in begun))
        vectors = [await embed(served, prompt) for prompt in texts]
        outputs = await asyncio.gather(*streams)
    everything = sum(all(kind) for kind in kinds)
    print(f"{everything} of {len(kinds)} steps had embeddings, constrained, free and adapted rows")
    assert everything >= 5 * ROUND
    async with engine(base, overlap=False, lora=lora) as served:
        for request, output in zip(asked, outputs, strict=True):
            text, ids, logprobs = await generate(served, request)
            assert (text, ids) == output[:2], request
            np.testing.assert_allclose(logprobs, output[2], atol=1e-3)
        for prompt, vector in zip(texts, vectors, strict=True):
            np.testing.assert_allclose(vector, await embed(served, prompt), rtol=1e-4, atol=1e-4)
    for request, (text, ids, _) in zip(asked, outputs, strict=True):
        if request.constraint is not None and len(ids) < TOKENS:
            assert re.fullmatch(REGEX, text), text
