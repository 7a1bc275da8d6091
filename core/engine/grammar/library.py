"""The grammar library in this process: compiles in threads, and stops waiting for a thread that takes too long.

A constraint that comes here has passed the trial, so its compile should take as long as it took there. If it takes
longer, its thread is left behind. The thread is a daemon, because an exiting process waits for the threads of a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, cast

from core.engine.grammar.bounded_work import TookTooLong, within
from core.engine.grammar.compile_queue import FULL
from core.engine.off_loop import guarded
from core.errors import Overloaded
from core.sampling.grammar.registry import Backend, build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint
from core.types.grammar import Grammar

T = TypeVar("T")

MAX_LEFT_BEHIND = 2
"""Threads that still work on compiles that were given up. At this number nothing else is compiled until one ends."""


class GrammarLibrary:
    """The backend `name`, set up by the first compile. Used on the loop thread."""

    def __init__(self, name: str, vocabulary: Callable[[], Vocabulary], seconds: float) -> None:
        """`vocabulary` makes the vocabulary, in a thread. `seconds`: processor time that one compile may take."""
        self.name = name
        self._new_vocabulary = vocabulary
        self._seconds = seconds
        self._vocabulary: _Thread[Vocabulary] | None = None
        self._backend: _Thread[Backend] | None = None
        self.left_behind = 0
        """Threads whose compile was given up and that still run."""

    async def vocabulary(self) -> Vocabulary:
        """What the library must know of the tokens; made once, and again after a failure."""
        if self._vocabulary is None or self._vocabulary.failed:
            self._vocabulary = _Thread(self._new_vocabulary)
        return await asyncio.shield(self._vocabulary.ended)

    async def compile(self, constraint: Constraint) -> Grammar:
        """The compiled `constraint`.

        Raises GrammarError when the library refuses it, TookTooLong when its seconds are used up, and Overloaded when
        there is no core or no thread for it.
        """
        vocabulary = await self.vocabulary()
        if self._backend is None or self._backend.failed:
            self._backend = _Thread(lambda: build_backend(self.name, vocabulary))
        backend = await asyncio.shield(self._backend.ended)
        if self.left_behind >= MAX_LEFT_BEHIND:
            raise Overloaded("constraints cannot be compiled now", reason=FULL)
        thread = _Thread(lambda: backend.compile(constraint))
        try:
            return await within(asyncio.shield(thread.ended), thread.cpu_seconds, self._seconds)
        except (TookTooLong, Overloaded, asyncio.CancelledError):
            self._leave(thread)
            raise

    def _leave(self, thread: _Thread[Grammar]) -> None:
        def ended(_: object) -> None:
            self.left_behind -= 1

        if not thread.ended.done():
            self.left_behind += 1
            thread.ended.add_done_callback(ended)


class _Thread(Generic[T]):
    """Runs `function` in a daemon thread of its own; `ended` gets what it returns or raises."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._native_id: int | None = None
        self.ended: asyncio.Future[T] = self._loop.create_future()
        threading.Thread(target=self._run, name="slipstream-grammar", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether `function` raised."""
        return self.ended.done() and self.ended.exception() is not None

    def cpu_seconds(self) -> float:
        """Processor time so far, in seconds; 0 before the thread began and once it has ended."""
        if self._native_id is None:
            return 0.0
        try:
            # The clock id as `pthread_getcpuclockid` computes it, which must not be called for a thread that has ended.
            return time.clock_gettime(~self._native_id << 3 | 6)
        except OSError:
            return 0.0

    def _run(self) -> None:
        self._native_id = threading.get_native_id()
        try:
            tell = partial(self._done, guarded(self._function), None)
        except Exception as error:
            tell = partial(self._done, None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(tell)

    def _done(self, result: T | None, error: Exception | None) -> None:
        if error is None:
            self.ended.set_result(cast(T, result))
        else:
            self.ended.set_exception(error)
            self.ended.exception()  # seen, even if nothing waits any more
