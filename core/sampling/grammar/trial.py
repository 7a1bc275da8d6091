"""The process of a trial: it compiles constraints first, so that one that crashes it does not crash the server.

Run as a module by `core.engine.grammar.trial`; JSON lines in and out. The server compiles a constraint itself only
after this process has compiled it and made its first masks within the limits of time and memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np

from core.sampling.grammar.budget import RowBudget
from core.sampling.grammar.registry import Backend, GrammarError, build_backend
from core.sampling.grammar.vocabulary import Vocabulary
from core.types.constraint import Constraint, ConstraintKind
from core.types.grammar import Grammar

ERROR_CHARS = 1_000
"""Characters of a library's error that are told: it may quote the whole constraint, and a line must not be so long that
the server does not read it.
"""
PROBED_TOKENS = 8
"""Masks that are made in a trial, along one path through the grammar."""


def main() -> None:
    """Answer requests until the input ends, because the server closed it or has exited."""
    os.nice(5)
    setup = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(**setup["vocabulary"] | {"end_ids": tuple(setup["vocabulary"]["end_ids"])})
    backend = build_backend(setup["backend"], vocabulary)
    _limit_memory(setup["memory_bytes"])
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        _say(examine(backend, vocabulary, Constraint(ConstraintKind(asked["kind"]), asked["source"])))


def examine(backend: Backend, vocabulary: Vocabulary, constraint: Constraint) -> dict[str, Any]:
    """{"bytes": growth of resident memory by the grammar}, or {"error": why the constraint is refused}."""
    before = _resident()
    try:
        grammar = backend.compile(constraint)
    except GrammarError as error:
        return {"error": str(error)[:ERROR_CHARS]}
    problem = _probe(grammar, vocabulary)
    return {"error": problem[:ERROR_CHARS]} if problem else {"bytes": max(0, _resident() - before)}


def _probe(grammar: Grammar, vocabulary: Vocabulary) -> str | None:
    """Why the masks of the first tokens cannot be made; None if they can."""
    matcher, budget = grammar.matcher(), RowBudget(grammar.words)
    began = time.thread_time()
    for number in range(PROBED_TOKENS):
        words = np.zeros(vocabulary.words, np.int32)
        some = matcher.fill(words)
        if matcher.failure is not None:
            return matcher.failure
        now = time.thread_time()
        budget.spend(now - began)
        if budget.left < 0:
            return "too slow to follow"
        began = now
        if not some:
            return None if number or matcher.is_terminated else "no output can meet it"
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        # The middle one of the allowed ids, so neither always the shortest text nor always the end.
        token = int(allowed[len(allowed) // 2])
        if token in vocabulary.end_ids or not matcher.accept(token):
            return matcher.failure
    return None


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
