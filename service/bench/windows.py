"""Pages that sliding-window layers hold at a context of eight windows: in the ordinary pool, and in their own pool.

They are counted while requests run, in pages times layers: a page of the ordinary pool is stored once for every full
layer, a window page once for every windowed layer. Pages are counted between steps. Within a step, while a chunk goes
through the window, it holds more; that shows in the size of the pools, which is the memory that is really taken.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.engine.measures import measure
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages
from core.models.bundled import bundled_model_dir
from core.prefix.registry import build_prefix_cache
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from core.types.stats import PoolStats

WINDOWS, ROWS, CHUNK_SHARE = 8, 4, 2
"""Windows of context, requests at once, and chunks in a window."""
OUTPUT_TOKENS = 32

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
}
GEMMA_3_4B = {"num_hidden_layers": 34, "sliding_window": 1024}


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """The most pages times layers that the requests held after any step: `plain` in one pool, `windowed` in two.

    `plain_pools` and `pools` are the sizes of these pools as a whole. `wrong` is the number of answers that differ
    between the two.
    """

    plain: int
    windowed: int
    plain_pools: int
    pools: int
    wrong: int = 0

    @property
    def share(self) -> float:
        """Pages held in the two pools together, as a share of those held in the plain pool."""
        return self.windowed / self.plain

    @property
    def pools_share(self) -> float:
        """The size of the two pools together, as a share of the plain pool's."""
        return self.pools / self.plain_pools


def windows_measured() -> WindowFigures:
    """Serve a tiny Gemma 3 with random weights by the whole engine, with the window pool off and then on."""
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng():
        for part in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model_dir() / part, name)
        vocab = AutoConfig.from_pretrained(bundled_model_dir()).vocab_size
        torch.manual_seed(0)
        config = AutoConfig.for_model("gemma3_text", vocab_size=vocab, **TINY)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(name))
        layers = measure(name).kv_layers
        counts = (len(layers), sum(spec.window is not None for spec in layers))
        (plain, first), (windowed, second) = (asyncio.run(_serve(name, on=on, layers=counts)) for on in (False, True))
    wrong = sum(a != b for a, b in zip(first, second, strict=True))
    return WindowFigures(plain.held, windowed.held, plain.size, windowed.size, wrong)


def windows_by_shape() -> WindowFigures:
    """Count pages in the shape of Gemma 3 4B, with the engine's own memory management and without a model."""
    config = AutoConfig.for_model("gemma3_text", **GEMMA_3_4B)
    total = len(config.layer_types)
    counts = (total, config.layer_types.count("sliding_attention"))
    plain, windowed = (_count_pages(config.sliding_window, on=on, layers=counts) for on in (False, True))
    return WindowFigures(plain.held, windowed.held, plain.size, windowed.size)


class _Peak:
    """The most pages times layers held, and their pools' size; `layers`: all layers of the model, and windowed ones."""

    def __init__(self, layers: tuple[int, int]) -> None:
        self._total, self._windowed = layers
        self.held = self.size = 0

    def see(self, pools: Sequence[PoolStats]) -> None:
        """Take in one snapshot; the one before the first step has no pools."""
        found = {pool.name: pool for pool in pools if pool.name in ("kv_page", NAME)}
        full = self._total - self._windowed if NAME in found else self._total
        layers = {"kv_page": full, NAME: self._windowed}
        self.held = max(self.held, sum(pool.used * layers[name] for name, pool in found.items()))
        self.size = sum(pool.capacity * layers[name] for name, pool in found.items())


async def _serve(path: str, *, on: bool, layers: tuple[int, int]) -> tuple[_Peak, list[list[int]]]:
    """Serve all requests with the window pool `on` or off. Returns the pages that were held, and the token ids."""
    window = TINY["sliding_window"]
    context = WINDOWS * window
    built = build_engine(
        EngineConfig(
            model=ModelConfig(path, dtype="float32"),
            memory=MemoryConfig(8, ROWS, ROWS * context, prefix_cache="none", sliding_window_pool=on),
            scheduler=SchedulerConfig(chunked_prefill_size=window // CHUNK_SHARE),
            executor=ExecutorConfig(device="cpu", cpu_threads=1),
        )
    )
    engine = await built.start()
    prompts = [[3 + (row + 7 * place) % 90 for place in range(context - OUTPUT_TOKENS)] for row in range(ROWS)]
    readers = [asyncio.create_task(_read(engine, prompt)) for prompt in prompts]
    peak = _Peak(layers)
    while not all(reader.done() for reader in readers):
        # Every snapshot is seen: the event loop gets here between any two steps.
        peak.see(engine.stats.pools)
        await asyncio.sleep(0)
    answers = [reader.result() for reader in readers]
    await engine.stop()
    return peak, answers


async def _read(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    request = GenerateRequest(token_ids=tuple(prompt), sampling=sampling, want_text=False)
    got: list[int] = []
    async for event in await engine.generate(request):
        if isinstance(event, Delta):
            got.extend(event.token_ids)
    return got


def _count_pages(window: int, *, on: bool, layers: tuple[int, int], page: int = 16) -> _Peak:
    """Admit all requests, compute their prompts chunk by chunk in turn, then decode all of them to the full context."""
    context, chunk = WINDOWS * window, window // CHUNK_SHARE
    pages = ROWS * context // page
    bounds = WindowBounds(window, page, chunk)
    companions = [WindowPages(ROWS * bounds.per_row + bounds.per_step, pages, ROWS + 1, bounds)] if on else []
    cache = build_prefix_cache("none", page)
    memory = RequestMemory(RowAllocator(ROWS), PagedKVAllocator(pages, page), cache, context, companions)
    prompt = context - OUTPUT_TOKENS
    taken = [memory.admit(np.arange(prompt), "", 0) for _ in range(ROWS)]
    rows = np.array([admission.row for admission in taken if admission is not None])
    peak = _Peak(layers)
    for row in rows:
        for start in range(0, prompt, chunk):
            count = min(chunk, prompt - start)
            memory.plan_companions(np.array([row]), np.array([start]), np.array([count]))
            peak.see(memory.stats())
    for position in range(prompt, context):
        places = np.full(ROWS, position)
        grew = memory.grow(rows[memory.needs_page(rows, places)])
        assert grew, "the pools were made for the full context"
        memory.plan_companions(rows, places, np.ones(ROWS, np.int64))
        peak.see(memory.stats())
    return peak
