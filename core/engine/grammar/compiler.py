"""Compiles clients' constraints into grammars: off the event loop, within bounds, and once for all calls that wait.

A library's compile cannot be interrupted in a thread, and it can crash (measured: `multipleOf: 999983` takes llguidance
26 s and 139 MB). So a constraint is first compiled in another process, which is killed when its time is over. Only what
passes there is compiled in this process. Tenants take turns. A constraint that no call waits for any more is dropped,
or its process is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from core.config import GrammarConfig
from core.engine.grammar.bounded_work import TookTooLong
from core.engine.grammar.cache import GrammarCache
from core.engine.grammar.compile_queue import CompileJob, CompileQueue
from core.engine.grammar.library import GrammarLibrary
from core.engine.grammar.trial import GrammarTrial, TrialFailed
from core.errors import Draining, InvalidRequest
from core.histogram import Histogram
from core.sampling.grammar.registry import INSTALL, GrammarError
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint
from core.types.grammar import Grammar
from core.types.stats import EngineStats

MAX_COMPILES = 64
"""Constraints that may wait to be compiled. Requests with further ones are told to come back."""
COMPILE_SECONDS = "grammar_compile_seconds"
"""Name of the histogram: seconds from the first call for a constraint to the end of its compile."""


class GrammarCompiler:
    """Compiles constraints with the library `backend`, None if there is none. Used on the loop thread."""

    def __init__(self, config: GrammarConfig, backend: str | None, vocabulary: Callable[[], Vocabulary] | None) -> None:
        self._config = config
        self._library: GrammarLibrary | None = None
        if backend is not None and vocabulary is not None:
            self._library = GrammarLibrary(backend, vocabulary, config.compile_timeout)
        self._cache = GrammarCache(config.cache_bytes)
        self._queue = CompileQueue(MAX_COMPILES)
        self._jobs: dict[Constraint, CompileJob] = {}
        """Jobs that wait or are being compiled."""
        self._idle = list(range(config.max_compiles))
        """Free places. Each has a process of its own, which starts with the first job there."""
        self._trials: dict[int, GrammarTrial] = {}
        """Place -> its process."""
        self._seconds = Histogram()
        self._seconds_seen = self._seconds.stats()
        self._failures = 0
        self._closed = False

    @property
    def backend(self) -> str | None:
        """Name of the library; None if there is none."""
        return None if self._library is None else self._library.name

    async def grammar(self, constraint: Constraint, tenant: str = "") -> Grammar:
        """The compiled `constraint`. Calls for the same one share the work, which ends when the last of them leaves.

        Raises InvalidRequest when it is refused, Overloaded when it cannot be compiled now, RequestFailed when there is
        no process to compile in, and Draining when `close` is called meanwhile.
        """
        if self._library is None:
            raise InvalidRequest.of("constraint", f"this server has no grammar library; {INSTALL}")
        found = self._cache.get(constraint)
        if found is not None:
            return found
        if self._closed:
            raise Draining("the server is shutting down")
        job = self._jobs.get(constraint)
        if job is None or job.done.done():
            violations = constraint.violations()
            if violations:
                raise InvalidRequest(violations)
            job = CompileJob(constraint)
        self._enter(job, tenant)
        try:
            # A call that is cancelled must not cancel the work that others wait for.
            return await asyncio.shield(job.done)
        finally:
            self._leave(job, tenant)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures of grammars. Callable from any thread; the figures may be of different moments."""
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
        """Kill the processes, and fail every call that waits with Draining, or comes later. Idempotent."""
        self._closed = True
        jobs = list(self._jobs.values())
        for job in jobs:
            self._end(job)
            job.fail(Draining("the server is shutting down"))
        await asyncio.gather(*(job.task for job in jobs if job.task is not None), return_exceptions=True)
        for trial in self._trials.values():
            await trial.close()

    def _enter(self, job: CompileJob, tenant: str) -> None:
        """Count one more call of `tenant` that waits for `job`. Raises Overloaded when the queue has no room for it."""
        if job.task is None:
            self._queue.add(job, tenant)
        self._jobs[job.constraint] = job
        job.waiting[tenant] += 1
        self._begin_next()

    def _leave(self, job: CompileJob, tenant: str) -> None:
        """Count one call of `tenant` less; `job` ends with its last call."""
        job.waiting[tenant] -= 1
        if job.waiting[tenant]:
            return
        del job.waiting[tenant]
        self._queue.leave(job, tenant)
        if not job.waiting:
            self._end(job)

    def _end(self, job: CompileJob) -> None:
        """Drop `job`, or stop the compile of it: no call waits for it any more."""
        self._queue.remove(job)
        if self._jobs.get(job.constraint) is job:
            del self._jobs[job.constraint]
        if job.task is not None:
            job.task.cancel()

    def _begin_next(self) -> None:
        while self._idle and len(self._queue):
            job, place = self._queue.pop(), self._idle.pop()
            job.task = asyncio.create_task(self._run(job, place), name="slipstream-grammar")
            # A callback, because a task that is cancelled before its first step runs no `finally` of its own.
            job.task.add_done_callback(partial(self._ended, job, place))

    def _ended(self, job: CompileJob, place: int, _: object) -> None:
        if self._jobs.get(job.constraint) is job:
            del self._jobs[job.constraint]
        self._idle.append(place)
        self._begin_next()

    async def _run(self, job: CompileJob, place: int) -> None:
        """Compile `job` in the process of `place`, for all calls that wait for it."""
        try:
            grammar = await self._compile(job.constraint, await self._trial(place))
        except Exception as error:
            self._failures += isinstance(error, InvalidRequest)
            job.fail(error)
        else:
            if not job.done.done():
                job.done.set_result(grammar)
        finally:
            self._seconds.observe(np.array([time.monotonic() - job.since]))
            self._seconds_seen = self._seconds.stats()

    async def _trial(self, place: int) -> GrammarTrial:
        assert self._library is not None
        if place not in self._trials:
            vocabulary = await self._library.vocabulary()
            self._trials[place] = GrammarTrial(self._library.name, vocabulary, self._config.compile_timeout)
        return self._trials[place]

    async def _compile(self, constraint: Constraint, trial: GrammarTrial) -> Grammar:
        assert self._library is not None
        try:
            size = await trial.examine(constraint)
            grammar = await self._library.compile(constraint)
        except TrialFailed as error:
            raise InvalidRequest.of(constraint.field, str(error)) from error
        except GrammarError as error:
            raise InvalidRequest.of(constraint.field, "cannot be compiled") from error
        except TookTooLong as error:
            raise InvalidRequest.of(constraint.field, "takes too long to compile") from error
        self._cache.put(constraint, grammar, size)
        return grammar
