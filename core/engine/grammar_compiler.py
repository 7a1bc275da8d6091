"""From a client's constraint to a grammar that requests can follow: off the loop, within bounds, each once.

A library's compile cannot be interrupted in a thread, and can crash (measured: an integer that is a multiple of a
million takes llguidance 26 s and 139 MB). So it happens in a process of its own first, which is killed past its time;
only what passes there is compiled in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from core.config import GrammarConfig
from core.engine.grammar_cache import GrammarCache
from core.engine.grammar_trial import GrammarTrial, TrialFailed
from core.engine.off_loop import off_loop
from core.errors import InvalidRequest, Overloaded
from core.sampling.grammar.registry import INSTALL, Backend, GrammarError, build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.scheduler.histogram import Histogram
from core.types.constraint import Constraint
from core.types.grammar import Grammar
from core.types.stats import EngineStats

log = logging.getLogger(__name__)

MAX_COMPILES = 64
"""Constraints being compiled or waiting for it; beyond, requests are told to come back."""
COMPILE_SECONDS = "grammar_compile_seconds"


class GrammarCompiler:
    """`backend` names the library, None if there is none. Used on the loop thread."""

    def __init__(self, config: GrammarConfig, backend: str | None, vocabulary: Callable[[], Vocabulary] | None) -> None:
        self.backend = backend if vocabulary is not None else None
        self._config = config
        self._new_vocabulary = vocabulary
        self._cache = GrammarCache(config.cache_bytes)
        self._compiling: dict[Constraint, asyncio.Task[Grammar]] = {}
        self._built: Backend | None = None
        self._vocabulary: Vocabulary | None = None
        self._idle: asyncio.Queue[GrammarTrial] | None = None
        self._trials: list[GrammarTrial] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slipstream-grammar")
        self._seconds = Histogram()
        self._seconds_seen = self._seconds.stats()
        self._failures = 0

    async def grammar(self, constraint: Constraint) -> Grammar:
        """The compiled constraint; waiters of the same one share the work. Raises InvalidRequest, Overloaded."""
        if self.backend is None:
            raise InvalidRequest.of("constraint", f"this server has no grammar library; {INSTALL}")
        found = self._cache.get(constraint)
        if found is not None:
            return found
        task = self._compiling.get(constraint)
        if task is None:
            violations = constraint.violations()
            if violations:
                raise InvalidRequest(violations)
            if len(self._compiling) >= MAX_COMPILES:
                raise Overloaded("too many constraints are being compiled", reason="GRAMMAR_COMPILES")
            task = asyncio.create_task(self._timed(constraint), name="slipstream-grammar")
            self._compiling[constraint] = task
            task.add_done_callback(lambda done: self._forget(constraint, done))
        # A waiter that gives up must not take the work from the others.
        return await asyncio.shield(task)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures of grammars; readable from any thread, each figure by itself."""
        return dataclasses.replace(
            stats,
            grammars_cached=len(self._cache),
            grammar_cache_bytes=self._cache.used_bytes,
            grammar_cache_hits=self._cache.hits,
            grammar_cache_evictions=self._cache.evictions,
            grammar_compile_failures=self._failures,
            histograms={**stats.histograms, COMPILE_SECONDS: self._seconds_seen},
        )

    async def close(self) -> None:
        """End the processes and whatever they were asked. Idempotent."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for trial in self._trials:
            await trial.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget(self, constraint: Constraint, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[constraint]
        if not task.cancelled():
            task.exception()  # seen, even if every waiter has left

    async def _timed(self, constraint: Constraint) -> Grammar:
        began = time.monotonic()
        try:
            return await self._compile(constraint)
        except InvalidRequest:
            self._failures += 1
            raise
        finally:
            self._seconds.observe(np.array([time.monotonic() - began]))
            self._seconds_seen = self._seconds.stats()

    async def _compile(self, constraint: Constraint) -> Grammar:
        vocabulary = await off_loop(self._pool, self._get_vocabulary)
        trial = await self._idle_trials(vocabulary).get()
        try:
            size = await trial.examine(constraint)
        except TrialFailed as error:
            raise InvalidRequest.of(constraint.field, str(error)) from error
        finally:
            self._idle_trials(vocabulary).put_nowait(trial)
        try:
            grammar = await off_loop(self._pool, self._compile_here, constraint, vocabulary)
        except GrammarError as error:
            raise InvalidRequest.of(constraint.field, "cannot be compiled") from error
        self._cache.put(constraint, grammar, size)
        return grammar

    def _idle_trials(self, vocabulary: Vocabulary) -> asyncio.Queue[GrammarTrial]:
        if self._idle is None:
            assert self.backend is not None
            self._idle = asyncio.Queue()
            for _ in range(self._config.max_compiles):
                self._trials.append(GrammarTrial(self.backend, vocabulary, self._config.compile_timeout))
                self._idle.put_nowait(self._trials[-1])
        return self._idle

    def _get_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            assert self._new_vocabulary is not None
            self._vocabulary = self._new_vocabulary()
        return self._vocabulary

    def _compile_here(self, constraint: Constraint, vocabulary: Vocabulary) -> Grammar:
        if self._built is None:
            assert self.backend is not None
            self._built = build_backend(self.backend, vocabulary)
        return self._built.compile(constraint)
