"""An engine that is built and runs nowhere yet."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.config import EngineConfig
from core.engine.adapters.loader import AdapterLoader
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.engine.renewal import Renewal
from core.executor.interface import Executor, Renewable
from core.lanes import LaneRecorder
from core.scheduler.scheduler import Emit, Scheduler
from core.types.io import ModelInfo

if TYPE_CHECKING:
    from core.engine.async_engine import AsyncEngine


class StepExecutor(Executor, Renewable, Protocol):
    """What an engine needs of its executor."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What `core.engine.build` makes, off the event loop. Executors wake that loop, so they are made by `start`."""

    config: EngineConfig
    inputs: InputProcessor
    adapters: AdapterLoader
    grammars: GrammarCompiler
    model_info: ModelInfo
    new_executor: Callable[[Callable[[], None]], StepExecutor]
    new_scheduler: Callable[[Executor, Emit], Scheduler]
    renewal: Renewal
    lanes: LaneRecorder

    async def start(self) -> AsyncEngine:
        """The engine on the running loop, with its threads and tasks. Called once: the pools are this engine's."""
        from core.engine.async_engine import AsyncEngine

        engine = AsyncEngine(self)
        # Weights and modules live as long as the process: frozen, they are not walked by a collection during a step.
        gc.collect()
        gc.freeze()
        return engine
