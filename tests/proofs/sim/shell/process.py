"""The engine's process of the simulation: production engine, handle and desk, between a made-up device and system."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np
from prometheus_client import CollectorRegistry

from core.config import EngineConfig, ExecutorConfig, GrammarConfig, MemoryConfig, ModelConfig
from core.engine import off_loop, wakeup
from core.engine.adapters.loader import AdapterLoader
from core.engine.adapters.table import AdapterTable
from core.engine.async_engine import AsyncEngine
from core.engine.built_engine import BuiltEngine
from core.engine.embedding_inputs import EmbeddingInputs
from core.engine.grammar.compiler import GrammarCompiler
from core.engine.input_processor import InputProcessor
from core.executor.interface import Executor
from core.lanes import LaneRecorder
from core.memory.kv_allocator import PagedKVAllocator
from core.memory.request_memory import RequestMemory
from core.memory.rows import RowAllocator
from core.prefix.registry import build_prefix_cache
from core.scheduler.scheduler import Emit, Scheduler
from core.types.io import ModelInfo
from core.types.sampling_params import SamplingParams
from service.access.tenant_file import EVERYBODY, TenantBook, TenantLimits
from service.calls.desk import LocalDesk
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.limits.tenant_limiter import TenantGates
from service.metrics.rpc import RpcMetrics
from service.resume.retention import Retention
from tests.proofs.sim.adapters import AdapterTwin, Weights
from tests.proofs.sim.reference import EOS, VOCAB
from tests.proofs.sim.shell.device import HIDDEN, ShellDevice
from tests.proofs.sim.shell.loop import VirtualLoop
from tests.proofs.sim.shell.scenario import ShellScenario
from tests.proofs.sim.shell.threads import Descriptors, Pool, Threading
from tests.proofs.sim.shell.tokens import tokenizer
from tests.proofs.sim.story import Hits, Story

HANG_TIMEOUT = 3.0
ADAPTERS = {"red": 11, "green": 12}
"""What is loaded at start, where there are adapters: name and what it does."""


class Book:
    """Tenants' limits that do not come from a file; see `service.access.reloaded_file.Reloaded`."""

    def __init__(self, book: TenantBook) -> None:
        self._book = book

    def current(self) -> TenantBook:
        """The limits."""
        return self._book


class EngineProcess:
    """What one process holds that runs the engine. Made on the running loop, as the engine is."""

    device: ShellDevice

    def __init__(self, scenario: ShellScenario, loop: VirtualLoop, rng: random.Random, story: Story, hits: Hits):
        self._scenario, self._loop, self._rng, self._story, self._hits = scenario, loop, rng, story, hits
        sizes = scenario.sizes
        self.adapters = AdapterTwin(sizes, hits) if sizes.adapters is not None else None
        self.memory = RequestMemory(
            RowAllocator(sizes.rows),
            PagedKVAllocator(sizes.pages, sizes.page_size),
            build_prefix_cache(sizes.cache, sizes.page_size),
            sizes.context,
            [] if self.adapters is None else [self.adapters.host],
        )
        table = AdapterTable() if self.adapters is None else self.adapters.table
        for name, content in ADAPTERS.items() if self.adapters is not None else ():
            table.load(name, cast(Any, Weights(content, 40)), pinned=False)
        self.table = table
        self.pool = Pool(loop, rng, 2)
        self.engine = AsyncEngine(self._built())
        self.engine._turnstile._width = scenario.turnstile
        self.handle = EngineHandle()
        self.handle.engine = self.engine
        self.config = ServerConfig.of(
            max_pending_tokens=scenario.max_pending,
            admission_wait=scenario.admission_wait,
            resume_seconds=scenario.resume_seconds,
            resume_bytes=scenario.resume_bytes,
            resume_tenant_bytes=scenario.resume_tenant_bytes,
        )
        self.metrics = RpcMetrics(CollectorRegistry())
        self.desk = LocalDesk(self.handle, self.config, self.metrics)
        if scenario.tenants:
            limits = {name: TenantLimits(drawn.rate, drawn.at_once) for name, drawn in scenario.tenants.items()}
            limits.setdefault(EVERYBODY, TenantLimits())
            self.gates._book = cast(Any, Book(TenantBook(limits)))

    @property
    def gates(self) -> TenantGates:
        """Of the desk."""
        return self.desk._gates

    @property
    def retention(self) -> Retention:
        """Of the desk."""
        return self.desk._retention

    def _config(self) -> EngineConfig:
        sizes = self._scenario.sizes
        return EngineConfig(
            model=ModelConfig("nowhere"),
            memory=MemoryConfig(page_size=sizes.page_size, prefix_cache=sizes.cache),
            scheduler=sizes.config,
            executor=ExecutorConfig(device="cpu", hang_timeout=HANG_TIMEOUT),
            max_pending_tokens=self._scenario.max_pending,
        )

    def _built(self) -> BuiltEngine:
        inputs = InputProcessor(tokenizer(), self.memory, VOCAB, self._scenario.sizes.context, 1, self.table)
        inputs._workers._pool = cast(Any, self.pool)
        info = ModelInfo(
            name="simulated", architecture="none", dtype="float32", vocab_size=VOCAB,
            context_length=self._scenario.sizes.context, max_input_length=self._scenario.sizes.context - 1,
            bos_token_id=None, eos_token_ids=EOS, default_sampling=SamplingParams(), has_chat_template=False,
            embedding_dimension=HIDDEN,
        )  # fmt: skip
        grammars = GrammarCompiler(GrammarConfig(), None, None)
        return BuiltEngine(
            self._config(), inputs, EmbeddingInputs(inputs, self.memory, HIDDEN), AdapterLoader(self.table), grammars,
            info,
            self._new_executor, self._new_scheduler, cast(Any, None), LaneRecorder(),
        )  # fmt: skip

    def _new_executor(self, wake: Any) -> Executor:
        sides = [] if self.adapters is None else [self.adapters]
        self.device = ShellDevice(
            self.memory, sides, self._scenario.sizes, self._story, self._hits, self._loop, self._rng, wake
        )
        return self.device

    def _new_scheduler(self, executor: Executor, emit: Emit) -> Scheduler:
        return Scheduler(
            self._scenario.sizes.config,
            self.memory,
            executor,
            emit,
            max_len=self._scenario.sizes.width,
            vocab_size=VOCAB,
            eos_ids=EOS,
            pin=cast(Any, np.concatenate),
        )


@contextmanager
def made_up(loop: VirtualLoop) -> Iterator[Descriptors]:
    """While the body runs: the clock, the threads and the descriptors that the shell asks for are the simulation's."""
    descriptors = Descriptors(loop)
    with ExitStack() as patches:
        for owner, name, thing in (
            (time, "monotonic", loop.time),
            (off_loop, "threading", Threading),
            (wakeup, "os", descriptors),
            (wakeup, "eventfd_write", descriptors.eventfd_write),
        ):
            patches.enter_context(mock.patch.object(owner, name, thing))
        yield descriptors
