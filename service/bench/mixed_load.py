"""A long prompt beside rows that decode: each of its steps is a mixed one, replayed or launched one by one.

What a captured mixed step saves is the host's work. So two figures are taken: the time of a step where planning
overlaps with the device, as in service, and the operations that the host dispatches, which the thread that runs the
steps counts without overlap.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from service.bench.decode_load import read_stream, watch_first_token

CONTEXT: Final = 64
"""Prompt tokens of the rows that decode: few, since reading keys is the same either way."""
MOST_ROWS: Final = 256
"""Rows that decode: beside more than so many no step with prompts is captured."""
MOST_STEPS: Final = 32
"""Steps of the long prompt at most: it must fit into the context of a model."""
UNCOUNTED: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh"})
"""Operations that allocate or rename, and so launch nothing."""


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """`batch` rows that decode, and one prompt beside them that takes `steps` steps of `chunk` tokens."""

    batch: int
    chunk: int
    steps: int
    vocab: int

    @property
    def length(self) -> int:
        """Output tokens of each row: they decode while other rows begin, and until the prompt has ended."""
        return self.steps + self.batch * CONTEXT // self.chunk + 16

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.steps * self.chunk, CONTEXT + self.length) + 1

    @property
    def tokens(self) -> int:
        """Tokens of KV that all need at their ends."""
        return self.steps * self.chunk + 1 + self.batch * (CONTEXT + self.length + 32)

    def prompts(self) -> list[list[int]]:
        """Of the rows that decode, and behind them the long one."""
        draw = random.Random(f"{self.batch} {self.chunk}")
        lengths = [CONTEXT] * self.batch + [self.steps * self.chunk]
        return [[draw.randrange(self.vocab) for _ in range(length)] for length in lengths]


@dataclass(frozen=True, slots=True)
class MixedFigures:
    """Figures from the long prompt's request to its first token."""

    step_ms: float
    prompt_tokens_per_second: float
    tokens_per_second: float
    """Of the rows that decode."""
    operations: float | None = None
    """That compute or copy, by step; a replay is none of them. None where another thread runs the steps."""


def loads_of(batches: Sequence[int], chunk: int, steps: int, vocab: int) -> list[MixedLoad]:
    """Those of `batches` that may be captured, ascending, or else the most rows that may."""
    rows = sorted(count for count in batches if count <= MOST_ROWS) or [MOST_ROWS]
    return [MixedLoad(count, chunk, min(steps, MOST_STEPS), vocab) for count in rows]


def config_of(loads: Sequence[MixedLoad], executor: ExecutorConfig, page: int) -> EngineConfig:
    """An engine with room for each of `loads`, whose steps have as many prompt tokens as they say.

    Without graphs all steps are launched; those that are watched are mixed ones.
    """
    rows = max(load.batch for load in loads) + 1
    context = max(load.context for load in loads) + page
    tokens = max(load.tokens for load in loads) + rows * page
    return EngineConfig(
        model=ModelConfig("random", context_length=context),
        memory=MemoryConfig(page, rows, tokens, prefix_cache="none"),
        scheduler=SchedulerConfig(chunked_prefill_size=loads[0].chunk, max_queued_requests=rows),
        executor=executor,
    )


def told(row: Mapping[str, Any]) -> str:
    """A line for one figure."""
    on = {True: "on", False: "off"}
    how = f"with graphs {on[row['cuda_graphs']]} and overlap {on[row['overlap']]}"
    what = f"mixed steps {how}: {row['chunk']} prompt tokens beside {row['batch']} rows"
    if "left_out" in row:
        return f"{what}: {row['left_out']}"
    rates = f"{row['prompt_tokens_per_second']:.0f} and {row['tokens_per_second']:.0f} tokens/s"
    counted = "" if row["operations"] is None else f", {row['operations']:.0f} operations"
    return f"{what} in {row['step_ms']:.2f} ms, {rates}{counted}"


class Operations(TorchDispatchMode):
    """Counts the operations of this thread that compute or copy; a kernel of ours is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count `func`, and do it."""
        self.count += not (func.is_view or func.__name__.partition(".")[0] in UNCOUNTED)
        return func(*args, **(kwargs or {}))


async def measure_mixed(engine: AsyncEngine, load: MixedLoad, counts: bool) -> MixedFigures:
    """Run `load` on a started engine, once without the clock to warm up.

    `counts`: the engine has no overlap, so its steps run on this thread; they are counted in a run of their own. Raises
    AssertionError if a row stopped to decode before the prompt had ended.
    """
    await watch_mixed(engine, load)
    figures = await watch_mixed(engine, load)
    if not counts:
        return figures
    operations = Operations()
    await watch_mixed(engine, load, operations)
    return replace(figures, operations=operations.count / load.steps)


async def watch_mixed(
    engine: AsyncEngine, load: MixedLoad, within: AbstractContextManager[Any] | None = None
) -> MixedFigures:
    """One run of `load`. `within`: where the long prompt is awaited. Raises as `measure_mixed` does."""
    *short, long = load.prompts()
    everyone = asyncio.Barrier(load.batch + 1)
    readers = [asyncio.create_task(read_stream(engine, prompt, load.length, everyone)) for prompt in short]
    await everyone.wait()
    before = engine.stats.generation_tokens
    with within or nullcontext():
        seconds = await watch_first_token(engine, long)
    # The prompt's own first token is none of theirs.
    decoded = engine.stats.generation_tokens - before - 1
    assert not any(reader.done() for reader in readers), "rows decode for too short a time beside this prompt"
    await asyncio.gather(*readers)
    return MixedFigures(seconds / load.steps * 1000, len(long) / seconds, decoded / seconds)
