"""What a client is told of drafts: those of its own output, tokens that it got, and none where it wants none."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.engine.built_engine import BuiltEngine
from core.engine.speculation import Speculation
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens
from tests.support.engines import started
from tests.support.fakes.adversaries import KnowingDrafter, always_right
from tests.support.fakes.fixed_depth import FixedDepth

MOST, CONTEXT, VOCAB = 4, 96, 300
PROMPT = (5, 6, 7, 8)
TRUTH = expected_tokens(PROMPT, 41, VOCAB)


@cache
def tokenizer() -> Tokenizer:
    from core.models.bundled import bundled_model_dir

    return Tokenizer.load(str(bundled_model_dir()))


def speculating() -> BuiltEngine:
    """An engine in which each step but the first gives a row four drafts that are right, and one token more."""
    config = EngineConfig(
        model=ModelConfig("given", context_length=CONTEXT),
        memory=MemoryConfig(4, 4, 1024),
        scheduler=SchedulerConfig(chunked_prefill_size=64),
        executor=ExecutorConfig(device="cpu", overlap=False, assert_mode="trap"),
    )
    drafter = KnowingDrafter([[*PROMPT, *TRUTH]], always_right, VOCAB)
    speculation = Speculation(drafter, MOST, FixedDepth(MOST))
    return assemble(config, HashModel(VOCAB, CONTEXT), tokenizer(), DeviceStreams(torch.device("cpu")), speculation)


async def ends(built: BuiltEngine, speculative: bool = True, **sampling: object) -> list[Finished]:
    """The terminals of one greedy request, whose tokens are checked."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    got: dict[int, list[int]] = {}
    found = []
    async with started(built) as engine:
        request = GenerateRequest(token_ids=PROMPT, sampling=params, want_text=False, speculative=speculative)
        async for event in await engine.generate(request):
            if isinstance(event, Delta):
                got.setdefault(event.index, []).extend(event.token_ids)
            elif isinstance(event, Finished):
                found.append(event)
    for end in found:
        assert got[end.index] == TRUTH[: end.usage.completion_tokens]
    return found


def drafts_among(tokens: int) -> int:
    """How many of the first `tokens` were drafts: the first comes with the prompt, then every fifth is none."""
    return sum((place - 1) % (MOST + 1) < MOST for place in range(1, tokens))


async def test_each_output_is_told_its_own_drafts() -> None:
    found = await ends(speculating(), n=3, max_tokens=21)
    assert [(each.usage.draft_tokens, each.usage.accepted_draft_tokens) for each in found] == [(16, 16)] * 3


async def test_an_output_without_speculation_has_no_drafts() -> None:
    (end,) = await ends(speculating(), speculative=False, max_tokens=21)
    assert (end.usage.draft_tokens, end.usage.accepted_draft_tokens) == (0, 0)


@pytest.mark.parametrize("place", range(2, 9))
async def test_tokens_behind_a_stop_token_were_no_drafts_of_the_output(place: int) -> None:
    stop = TRUTH[place]
    (end,) = await ends(speculating(), max_tokens=41, stop_token_ids=(stop,))
    tokens = TRUTH.index(stop) + 1
    assert (end.usage.completion_tokens, end.usage.accepted_draft_tokens) == (tokens, drafts_among(tokens))
    assert end.usage.draft_tokens == MOST * -(-(tokens - 1) // (MOST + 1))


@pytest.mark.parametrize("place", range(2, 9))
async def test_tokens_behind_a_stop_string_were_no_drafts_of_the_output(place: int) -> None:
    """The scheduler hears of it later than of a stop token, and may verify drafts behind it meanwhile."""
    text = tokenizer().decode(TRUTH[: place + 1], True)
    stop = text[len(tokenizer().decode(TRUTH[:place], True)) :]
    assert stop, "a token without text"
    (end,) = await ends(speculating(), max_tokens=41, stop=(stop,))
    tokens = end.usage.completion_tokens
    assert end.matched_stop == stop and tokens < 41
    assert end.usage.accepted_draft_tokens == drafts_among(tokens) <= end.usage.draft_tokens
