"""Random sequences of calls against the dict model: equal answers, every page with one owner, nothing locked evicted.

The machine plays the scheduler: it owns an allocator's free list and requests with page tables, and it frees what the
cache tells it to free. A page that came back twice, or never, breaks the partition that is checked after each step.
Replay a failure with the seed in pytest's header, or with the blob that Hypothesis prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.prefix.base import PrefixCache, group_salt
from core.prefix.node import PrefixNode
from core.prefix.registry import build_prefix_cache
from tests.support.nightly import runs
from tests.unit.core.prefix.model import ModelCache, Prefix

NUM_PAGES = 40
WORDS = st.lists(st.sampled_from("ab"), max_size=7).map(tuple)
SALTS = st.sampled_from([group_salt("1"), group_salt("2")])


@dataclass
class Request:
    """A running request: what it reads is `table`; of that, `private` pages are its own to free."""

    whole: Prefix
    table: list[int]
    private: list[int]
    node: PrefixNode
    locked: Prefix


def ids_of(whole: Prefix, page_size: int) -> np.ndarray:
    """Pages of different words differ in their last token only."""
    pages = [[3] * (page_size - 1) + [ord(word)] for word in whole[1:]]
    return np.array(pages, np.int64).reshape(-1)


class PrefixMachine(RuleBasedStateMachine):
    """One cache, its model, and the requests that use them."""

    cache_name = "radix"

    @initialize(page_size=st.sampled_from([1, 2, 16]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.cache: PrefixCache = build_prefix_cache(self.cache_name, page_size)
        self.model = ModelCache()
        self.free = list(range(NUM_PAGES, 0, -1))
        self.requests: list[Request] = []

    def take_back(self, pages: np.ndarray, expected: list[int]) -> None:
        assert sorted(pages.tolist()) == sorted(expected)
        self.free.extend(expected)

    def alloc(self, count: int) -> list[int] | None:
        short = count - len(self.free)
        if short > 0:
            self.take_back(self.cache.evict(short), self.model.evict(short))
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def drop_unlocked(self, pages: np.ndarray) -> None:
        """What `unlock` returns: nothing here, everything unlocked for the no-op cache."""
        self.take_back(pages, [])

    def offer(self, request: Request, owned: int) -> None:
        """Insert the request's whole table and move its lock to the new end, as the scheduler does."""
        whole, table = request.whole, request.table
        result = self.cache.insert(ids_of(whole, self.size), np.array(table, np.int64), whole[0], owned * self.size)
        adopted, duplicates = self.model.insert(whole, table, owned)
        assert (result.adopted, result.duplicate_pages.tolist()) == (adopted, duplicates)
        assert result.node is not None
        self.cache.lock(result.node)
        self.model.lock(whole)
        self.model.unlock(request.locked)
        self.drop_unlocked(self.cache.unlock(request.node))
        request.node, request.locked = result.node, whole
        request.private = [page for page in request.private if page in duplicates]

    @rule(words=WORDS, salt=SALTS, limit=st.integers(-1, 8), look=st.booleans())
    def admit(self, words: tuple[str, ...], salt: str, limit: int, look: bool) -> None:
        """Match (or, in a race, not), lock, allocate, insert at once; give up when there is no room."""
        whole = (salt, *words)
        limit = limit if look else 0
        peeked = self.cache.peek(ids_of(whole, self.size), limit * self.size, salt)
        match = self.cache.match(ids_of(whole, self.size), limit * self.size, salt)
        prefix = self.model.longest(whole, limit)
        self.model.use(prefix)
        assert match.pages.tolist() == self.model.numbers(prefix)
        assert peeked == match.pages.size * self.size
        self.cache.lock(match.node)
        self.model.lock(prefix)
        shared = match.pages.tolist()
        private = self.alloc(len(words) - len(shared))
        request = Request(whole, shared + (private or []), private or [], match.node, prefix)
        self.requests.append(request)
        if private is None:
            self.release(self.requests.index(request))
        else:
            self.offer(request, len(shared))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99), more=WORDS, from_start=st.booleans())
    def grow(self, which: int, more: tuple[str, ...], from_start: bool) -> None:
        """A request computed further pages and offers the longer sequence."""
        request = self.requests[which % len(self.requests)]
        pages = self.alloc(len(more))
        if pages is None:
            return
        owned = 0 if from_start else len(request.table)
        kept = [] if from_start else request.private
        request.whole += more
        request.table += pages
        request.private = request.private + pages
        self.offer(request, owned)
        # Duplicates from before `owned` are not reported again; the request remembers them.
        request.private = list(dict.fromkeys(kept + request.private))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        """A request ends: its private pages go, the rest stays cached."""
        request = self.requests.pop(which % len(self.requests))
        self.model.unlock(request.locked)
        self.drop_unlocked(self.cache.unlock(request.node))
        self.free.extend(request.private)

    @rule(words=WORDS, salt=SALTS, limit=st.integers(0, 8))
    def look(self, words: tuple[str, ...], salt: str, limit: int) -> None:
        """A match that nobody locks still counts as a use."""
        whole = (salt, *words)
        prefix = self.model.longest(whole, limit)
        found = self.cache.match(ids_of(whole, self.size), limit * self.size, salt)
        assert found.pages.tolist() == self.model.numbers(prefix)
        self.model.use(prefix)

    @rule(count=st.integers(-1, 12))
    def evict(self, count: int) -> None:
        self.take_back(self.cache.evict(count), self.model.evict(count))

    @rule()
    def clear(self) -> None:
        self.take_back(self.cache.clear(), self.model.evict(NUM_PAGES))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        private = [page for request in self.requests for page in request.private]
        cached = list(self.model.pages.values())
        assert sorted(self.free + private + cached) == list(range(1, NUM_PAGES + 1))

    @invariant()
    def counters_agree(self) -> None:
        self.cache.check_integrity()
        assert self.cache.cached_pages == len(self.model.pages)
        assert self.cache.locked_pages == len(self.model.locked())
        assert self.cache.evictable_pages == self.cache.cached_pages - self.cache.locked_pages

    def teardown(self) -> None:
        while getattr(self, "requests", None):
            self.release(0)
        if hasattr(self, "cache"):
            self.clear()
            assert self.cache.cached_pages == 0


class NoOpMachine(PrefixMachine):
    """The same within groups, where every unlock drops what is not locked."""

    cache_name = "none"

    def drop_unlocked(self, pages: np.ndarray) -> None:
        self.take_back(pages, self.model.evict(NUM_PAGES))


def _case(machine: Any, examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40)
    return case


TestRadixMachine = _case(PrefixMachine, runs(50, 150))
TestNoOpMachine = _case(NoOpMachine, runs(20, 50))
