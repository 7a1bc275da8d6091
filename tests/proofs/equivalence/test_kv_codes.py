"""With keys and values in eight bits the bundled model answers right, and the same in any chunks, found in the prefix
cache, and after a retraction: every token reads what the pool holds, its own step's tokens included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Rust

from core.attention.registry import build_attention
from core.attention.torch_native import TorchNativeAttention
from core.attention.varlen_backend import VarlenAttention
from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine import build
from core.engine.kv_storage import check_kv_format
from core.errors import ConfigError
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_formats import KV_FORMATS
from core.models.base import Model
from core.models.bundled import bundled_model_dir
from core.models.bundled.corpus import documents_of, held_out_sums, sum_prompt
from core.models.loader import load_model
from core.text.tokenizer import Tokenizer
from tests.proofs.equivalence.test_decode_graphs import answer
from tests.support.engines import started
from tests.support.fakes.paged_steps import PagedRows, Part

CPU = torch.device("cpu")
LITTLE = 128
"""Tokens of a pool that eight rows, of up to 90 tokens each, must give way to each other in."""
CODED = KV_FORMATS["fp8_e4m3"]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A format, and what computes: modules, or compiled code. `off`: what it may cost of a logit, root mean square."""

    stored: str
    native: str
    off: float

    @property
    def format(self) -> KVFormat:
        return KV_FORMATS[self.stored]


CASES = {
    "fp8_e4m3": Case("fp8_e4m3", "off", 0.04),
    "int8": Case("int8", "off", 0.01),
    "int8-native": Case("int8", "wait", 0.01),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case) -> Model:
    made = load_model(config_of(case).model, CPU)
    if case.native == "wait" and not getattr(made, "native", False):
        pytest.skip("no compiler")
    return made


def config_of(
    case: Case = CASES["fp8_e4m3"], speculation: str = "off", chunk: int = 512, **memory: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(bundled_model_dir()), native=case.native, kv_cache_dtype=case.stored),
        memory=MemoryConfig(**{"page_size": 4, "max_running_requests": 8, "max_total_tokens": 2048, **memory}),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk),
        speculation=SpeculationConfig(method=speculation, max_drafts=3),
        executor=ExecutorConfig(device="cpu", assert_mode="trap"),
    )


def prompts() -> list[tuple[int, ...]]:
    """Of stories, lists to repeat and sums."""
    tokenizer = Rust.from_file(str(bundled_model_dir() / "tokenizer.json"))
    turns = [each.turns[0].prompt for kind in ("story", "copy") for each in islice(documents_of(kind, 990_017), 3)]
    turns += [sum_prompt(*pair) for pair in held_out_sums()[:2]]
    return [tuple(tokenizer.encode(turn).ids) for turn in turns]


async def tokens_of(model: Model, config: EngineConfig, rounds: int = 1) -> list[list[tuple[int, ...]]]:
    """What each round of all prompts at once is answered."""
    built = build.assemble(config, model, Tokenizer.load(str(bundled_model_dir())), DeviceStreams(CPU))
    async with started(built) as engine:
        answers = [
            [
                found[0]
                for found in await asyncio.gather(*(answer(engine, prompt, max_tokens=24) for prompt in prompts()))
            ]
            for _ in range(rounds)
        ]
        assert (engine.stats.preemptions > 0) == (config.memory.max_total_tokens == LITTLE)
        return answers


async def test_the_same_tokens_however_they_are_computed(case: Case, model: Model) -> None:
    (whole,) = await tokens_of(model, config_of(case, prefix_cache="none"))
    assert len(set(whole)) == len(whole), "every prompt has an answer of its own"
    (chunked,) = await tokens_of(model, config_of(case, chunk=5, prefix_cache="none"))
    assert chunked == whole
    for found in await tokens_of(model, config_of(case), rounds=2):
        assert found == whole, "a prefix that is found holds what the prompt would have written"
    (retracted,) = await tokens_of(model, config_of(case, max_total_tokens=LITTLE))
    assert retracted == whole
    (drafted,) = await tokens_of(model, config_of(case, "ngram"))
    assert drafted == whole


async def test_sums_are_right(case: Case, model: Model) -> None:
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    built = build.assemble(config_of(case), model, tokenizer, DeviceStreams(CPU))
    rust = Rust.from_file(str(bundled_model_dir() / "tokenizer.json"))
    async with started(built) as engine:
        for a, b in held_out_sums()[:6]:
            found, _ = await answer(engine, tuple(rust.encode(sum_prompt(a, b)).ids), max_tokens=4, ignore_eos=False)
            assert rust.decode(list(found)) == str(a + b)


def documents(count: int) -> list[list[int]]:
    rust = Rust.from_file(str(bundled_model_dir() / "tokenizer.json"))
    found = [
        rust.encode(each.text(), add_special_tokens=False).ids
        for kind in ("sum", "recall", "copy", "story")
        for each in islice(documents_of(kind, 990_017), count)
    ]
    return [each for each in found if len(each) <= 256]


def logits_of(model: Model, texts: Sequence[list[int]], format: KVFormat) -> torch.Tensor:
    """float32[T, vocab] of all tokens, each text a prompt in one step."""
    rows = PagedRows(model.spec.kv_layers, len(texts), 256, page_size=16, dtype=model.spec.dtype, format=format)
    model.bind(rows.pool, build_attention("auto", CPU))
    parts = [Part(number + 1, 0, len(text)) for number, text in enumerate(texts)]
    batch = rows.batch(parts, len(parts), [token for text in texts for token in text])
    batch.last_indices = torch.arange(len(batch.input_ids))
    return model.forward(batch).clone()


def perplexity(logits: torch.Tensor, texts: Sequence[list[int]]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(part[:-1], torch.tensor(text[1:]), reduction="none")
        for part, text in zip(logits.split([len(text) for text in texts]), texts, strict=True)
    ]
    return math.exp(torch.cat(losses).mean().item())


def test_perplexity_is_within_half_a_percent_and_logits_are_near(case: Case, model: Model) -> None:
    texts = documents(8)
    plain, coded = (logits_of(model, texts, format) for format in (PLAIN, case.format))
    assert perplexity(coded, texts) == pytest.approx(perplexity(plain, texts), rel=5e-3)
    off = (coded - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert 1e-3 < off < case.off, "eight bits show, and not much"


def test_a_step_reads_its_own_tokens_from_the_codes(case: Case, model: Model) -> None:
    (text,) = documents(1)[-1:]
    (whole,) = logits_of(model, [text], case.format).split(len(text))
    rows = PagedRows(model.spec.kv_layers, 1, 256, page_size=4, dtype=model.spec.dtype, format=case.format)
    model.bind(rows.pool, build_attention("auto", CPU))
    for place, token in enumerate(text):
        found = model.forward(rows.batch([Part(1, place, 1)], 0, [token]))
    torch.testing.assert_close(found[0], whole[-1], atol=0.02, rtol=0)


def test_what_cannot_be_is_refused_by_name(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype=fp8_e4m3 is not possible: .*VarlenAttention"):
        check_kv_format(config_of(), model.spec, VarlenAttention)
    encoder: Any = object()
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype=fp8_e4m3 is not possible: .* encoder-decoder"):
        check_kv_format(config_of(), dataclasses.replace(model.spec, encoder=encoder), TorchNativeAttention)
    pytest.importorskip("triton")
    from core.attention.triton.backend import TritonAttention

    with pytest.raises(ConfigError, match=r"TritonAttention, its kernels make bfloat16 of fp8_e4m3"):
        check_kv_format(config_of(), model.spec, TritonAttention)
    half = dataclasses.replace(model.spec, dtype=torch.bfloat16)
    assert check_kv_format(config_of(), half, TritonAttention) is CODED
    assert check_kv_format(EngineConfig(), model.spec, VarlenAttention) is PLAIN
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype=int8 is not possible: .*TritonAttention, its kernels read"):
        check_kv_format(config_of(CASES["int8"]), half, TritonAttention)


def test_native_code_steps_aside_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load_model(ModelConfig(str(bundled_model_dir()), kv_cache_dtype="fp8_e4m3"), CPU)
    assert not hasattr(loaded, "upgrade")
    assert "native decoders read no keys in fp8_e4m3" in caplog.text
