"""Settings that cannot work are refused where they are made, by the name of their flag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.config import (
    EngineConfig,
    ExecutorConfig,
    GrammarConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ModelConfig("m", context_length=1), "context_length must be at least 2"),
        (lambda: ModelConfig("m", dtype="int4"), "dtype must be one of"),
        (lambda: MemoryConfig(page_size=16, max_total_tokens=15), "max_total_tokens must be at least 16"),
        (lambda: MemoryConfig(page_size=16, max_encoder_tokens=15), "max_encoder_tokens must be at least 16"),
        (lambda: MemoryConfig(page_size=16, max_window_tokens=15), "max_window_tokens must be at least 16"),
        (lambda: MemoryConfig(prefix_cache="lru"), "prefix_cache must be one of radix, none"),
        (lambda: SchedulerConfig(chunked_prefill_size=0), "chunked_prefill_size must be at least 1"),
        (lambda: SchedulerConfig(policy="lifo"), "schedule_policy must be one of"),
        (lambda: ExecutorConfig(cpu_threads=0), "cpu_threads must be at least 1"),
        (lambda: GrammarConfig(compile_timeout=float("nan")), "grammar_compile_timeout must be at least 0.01"),
        (lambda: SpeculationConfig("drafts"), "speculative must be one of auto, off, ngram, .*draft:DIR"),
        (lambda: SpeculationConfig("draft"), "speculative must be one of .*; got 'draft'"),
        (lambda: SpeculationConfig("draft:"), "speculative must be one of .*; got 'draft:'"),
        (lambda: SpeculationConfig("ngram:/x"), "speculative must be one of .*; got 'ngram:/x'"),
        (lambda: LoraConfig(max_bytes=0), "max_lora_bytes must be at least 1"),
        (lambda: LoraConfig((("a b", "/x"),)), "must be 1 to 128 characters"),
        (lambda: LoraConfig((("a", "/x"), ("a", "/y"))), "given twice"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_the_least_that_can_work_is_taken() -> None:
    MemoryConfig(page_size=16, max_total_tokens=16, max_encoder_tokens=16, max_window_tokens=16, max_running_requests=1)
    assert SpeculationConfig("draft:/models/a:b").method == "draft:/models/a:b"
    GrammarConfig(compile_timeout=0.01, cache_bytes=0, max_compiles=1)
    assert not EngineConfig(ModelConfig("m", context_length=2)).lora.enabled
    assert LoraConfig(directory="/adapters").enabled and LoraConfig((("a", "/x"),)).enabled
