"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from core.config import EngineConfig
from core.engine.adapters.loader import AdapterLoader
from core.engine.disagg import Disagg, no_role
from core.engine.disk_cache import DiskCache
from core.engine.embedding_inputs import EmbeddingInputs
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.engine.ranks import Ranks
from core.engine.renewal import Renewal
from core.executor.interface import Executor, Renewable
from core.lanes import LaneRecorder
from core.scheduler.scheduler import Emit, Scheduler
from core.types.io import ModelInfo


class StepExecutor(Executor, Renewable, Protocol):
    """What an engine needs of its executor."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine consists of, and how to make the rest on its loop, which executors wake."""

    config: EngineConfig
    inputs: InputProcessor
    embeddings: EmbeddingInputs
    adapters: AdapterLoader
    grammars: GrammarCompiler
    model_info: ModelInfo
    new_executor: Callable[[Callable[[], None]], StepExecutor]
    new_scheduler: Callable[[Executor, Emit], Scheduler]
    renewal: Renewal
    lanes: LaneRecorder
    ranks: Ranks | None = None
    """The other processes of an engine that is several."""
    disagg: Disagg = field(default_factory=no_role)
    """Its role where others prefill or decode for it."""
    disk: DiskCache = field(default_factory=DiskCache)
    """Prefixes in files."""
