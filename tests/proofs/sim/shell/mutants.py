"""The shell broken on purpose, one line at a time, and the oracle that must see it: see `test_mutants.py`.

A mutant is a line of a source file and another in its place. It is compiled from the changed source and put into the
code of the functions that are there already, so that the production modules stay what they are.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.repository import ROOT


@dataclass(frozen=True, slots=True)
class ShellMutant:
    """`seen_by`: the oracles of which one must speak first, by the beginning of their names."""

    name: str
    module: str
    before: str
    after: str
    seen_by: tuple[str, ...]
    seed: int
    """One that sees it."""


MUTANTS: tuple[ShellMutant, ...] = (
    ShellMutant(
        "adapter-never-released",
        "core.engine.async_engine",
        "        self._adapters.table.release(stream.reqs[0].adapter_slot)\n",
        "        pass\n",
        ("books:adapters",),
        5,
    ),
    ShellMutant(
        "dropped-tokens-hidden",
        "core.engine.streams.output_processor",
        "if output.stop_match is None and output.total < len(req.outputs):",
        "if False:",
        ("ending",),
        1191,
    ),
    ShellMutant(
        "stop-string-forgotten-in-a-race",
        "core.engine.streams.output_processor",
        "        if output.stop_match is not None:\n            return FinishReason.STOP, output.stop_match\n",
        "        if False:\n            return FinishReason.STOP, output.stop_match\n",
        ("ending",),
        17,
    ),
    ShellMutant(
        "ending-a-stream-ends-nothing",
        "core.engine.async_engine",
        "            if not output.done:\n                self._scheduler.intake.end(",
        "            if output.done:\n                self._scheduler.intake.end(",
        ("no_reader", "abort_ignored"),
        55,
    ),
    ShellMutant(
        "failing-wakes-nobody",
        "core.engine.streams.token_stream",
        "        if self._end.fail(error):\n            self._wake()\n",
        "        self._end.fail(error)\n",
        ("liveness",),
        15,
    ),
    ShellMutant(
        "leaving-aborts-nothing",
        "core.engine.streams.token_stream",
        "        if self.open_outputs:\n            self._abort(self)\n",
        "        if False:\n            self._abort(self)\n",
        ("no_reader",),
        89,
    ),
    ShellMutant(
        "an-arrival-that-fails-stays",
        "core.engine.pending_admissions",
        "        try:\n            yield\n        finally:\n            del self._ended[request_id]\n",
        "        yield\n        del self._ended[request_id]\n",
        ("books:ended",),
        0,
    ),
    ShellMutant(
        "an-aborted-arrival-goes-on",
        "core.engine.pending_admissions",
        "        if ended.done():\n            raise ended.result()\n\n    def abort",
        "        if False:\n            raise ended.result()\n\n    def abort",
        ("abort_ignored",),
        55,
    ),
    ShellMutant(
        "turnstile-turns-once",
        "core.engine.streams.reader_turns",
        "        self._turning = False\n        self._passed = 0\n",
        "        self._passed = 0\n",
        ("liveness", "books:turnstile", "books:line"),
        2,
    ),
    ShellMutant(
        "call-given-up-early-stays",
        "service.frontends.host",
        "call = self._calls.pop(number, None)\n",
        "call = self._calls.get(number)\n",
        ("books:calls",),
        17,
    ),
    ShellMutant(
        "stream-known-before-its-reply",
        "service.frontends.host",
        "outputs it has.\n        if number in self._streams:\n",
        "outputs it has.\n        if True:\n",
        ("crash:Unseen",),
        0,
    ),
    ShellMutant(
        "lost-front-end-keeps-its-holds",
        "service.frontends.host",
        "for number in [*self._calls, *self._streams, *self._embeds, *self._holds, *self._prefixes]:",
        "for number in [*self._calls, *self._streams, *self._embeds, *self._prefixes]:",
        ("books:holds",),
        0,
    ),
    ShellMutant(
        "a-full-link-forgets-what-is-ready",
        "service.frontends.host",
        "        self._ready = dict.fromkeys(ready) | self._ready\n",
        "",
        ("liveness",),
        159,
    ),
    ShellMutant(
        "cancelled-asker-tells-nobody",
        "service.frontends.remote_engine",
        "            self.end(number)\n            raise\n",
        "            raise\n",
        ("books:holds",),
        5,
    ),
    ShellMutant(
        "replies-lost-with-the-link",
        "service.frontends.remote_engine",
        "waiting: list[asyncio.Future[Any]] = [*self._replies.values(), self._ready]",
        "waiting: list[asyncio.Future[Any]] = [self._ready]",
        ("liveness",),
        6,
    ),
    ShellMutant(
        "remote-text-not-merged",
        "service.frontends.remote_stream",
        "        self._texts.append(delta.text)\n",
        "        self._texts = [delta.text]\n",
        ("text",),
        0,
    ),
    ShellMutant(
        "remote-reader-not-woken",
        "service.frontends.remote_stream",
        "        if self._end.fail(error):\n            self._wake()\n",
        "        self._end.fail(error)\n",
        ("liveness",),
        6,
    ),
    ShellMutant(
        "remote-leaving-aborts-nothing",
        "service.frontends.remote_stream",
        "            if self._end.open_outputs and self._end.error is None:\n                self._abort()\n",
        "            if False:\n                self._abort()\n",
        ("no_reader",),
        2406,
    ),
    ShellMutant(
        "reservation-kept-when-refused",
        "service.resume.retention",
        "                self._count(tenant, -taken)\n                raise\n",
        "                raise\n",
        ("books:shares", "books:retention"),
        0,
    ),
    ShellMutant(
        "nobody-behind-an-opening-is-woken",
        "service.resume.retention",
        "            del self._opening[asked.request_id]\n            opened.set()\n",
        "            del self._opening[asked.request_id]\n",
        ("liveness",),
        7,
    ),
    ShellMutant(
        "left-streams-have-no-timer",
        "service.resume.retention",
        "            return\n        self._wait(kept)\n        self.over(kept)\n",
        "            return\n        self.over(kept)\n",
        ("untyped_error", "books:kept"),
        0,
    ),
    ShellMutant(
        "any-stream-of-the-id-will-do",
        "service.resume.retention",
        "        if incarnation and incarnation != kept.history.incarnation:\n",
        "        if False:\n",
        ("tokens", "incarnation", "illegal_error", "started"),
        934,
    ),
    ShellMutant(
        "an-id-used-again-needs-no-incarnation",
        "service.resume.retention",
        "        if not incarnation and request_id in self._reused:\n",
        "        if False:\n",
        ("tokens", "illegal_error", "started"),
        3892,
    ),
    ShellMutant(
        "hold-released-with-the-reader-only",
        "service.resume.kept",
        "            self._hold.release()\n            if self.reader is None:\n",
        "            if self.reader is None:\n",
        ("hold_past_end",),
        8,
    ),
    ShellMutant(
        "two-readers-at-once",
        "service.resume.kept",
        "            await self.reader.gone.wait()\n            if claim",
        "            self.reader = None\n            if claim",
        ("untyped_error",),
        23,
    ),
    ShellMutant(
        "moved-hold-released-twice",
        "service.limits.hold",
        "        self._leave = self._late = None\n        return moved\n",
        "        self._late = None\n        return moved\n",
        ("books:gates",),
        5,
    ),
    ShellMutant(
        "frame-read-before-it-is-whole",
        "service.frontends.wire",
        "            if len(self._buffer) < end:\n                return\n",
        "            if len(self._buffer) < _HEADER.size:\n                return\n",
        ("crash:Unseen",),
        0,
    ),
    ShellMutant(
        "stopping-cancels-who-arrives",
        "core.engine.workers",
        "if self._closed.is_set() and task is not None and not task.cancelling():",
        "if False:",
        ("foreign_cancel",),
        206,
    ),
)


@contextmanager
def broken(mutant: ShellMutant) -> Iterator[None]:
    """While the body runs, the functions of the module are those of the mutant."""
    module = importlib.import_module(mutant.module)
    path = ROOT / (mutant.module.replace(".", "/") + ".py")
    source = path.read_text()
    assert source.count(mutant.before) == 1, f"{mutant.name}: found {source.count(mutant.before)} times in {path}"
    compiled = compile(source.replace(mutant.before, mutant.after), str(path), "exec", dont_inherit=True)
    codes = dict(_codes(compiled))
    replaced: list[tuple[types.FunctionType, types.CodeType]] = []
    for function in _functions(module):
        code = codes.get(function.__code__.co_qualname)
        if code is not None and _meaning(code) != _meaning(function.__code__):
            replaced.append((function, function.__code__))
            function.__code__ = code
    assert replaced, f"{mutant.name} changes nothing"
    try:
        yield
    finally:
        for function, code in replaced:
            function.__code__ = code


def _codes(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const.co_qualname, const
            yield from _codes(const)


def _meaning(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, tuple(map(_const, code.co_consts))


def _const(const: Any) -> Any:
    return _meaning(const) if isinstance(const, types.CodeType) else const


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Of the module and of its classes, under whatever decorator."""
    for thing in vars(module).values():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        members = vars(thing).values() if isinstance(thing, type) else [thing]
        for member in members:
            found = getattr(member, "fget", member)
            found = getattr(found, "__wrapped__", found)
            if isinstance(found, types.FunctionType):
                yield found
