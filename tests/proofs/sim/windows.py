"""Sliding windows under simulation: production `WindowPages`, and a pool in plain integers behind their translation.

A windowed layer keeps its own copy of what a KV slot holds, in the window page that stands for the slot's page. Every
token of a step is written there; then each row must find all keys that its queries may see, each with the hash that the
KV slot has. What left the window may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.batch.schedule_batch import ScheduleBatch
from core.memory.companion import AdmissionFacts
from core.memory.request_memory import RequestMemory
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages, WindowWrites
from core.scheduler.running import RunningSet
from core.types.arrays import Ints
from core.types.request import Req
from tests.proofs.sim.companions import CompanionSide, Owner
from tests.proofs.sim.kv_memory import UNWRITTEN, KVMemory, Table
from tests.proofs.sim.plain import Plain
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Violation


@dataclass(slots=True)
class WindowsLeft:
    """What the host knew when it submitted a batch."""

    freed: list[int]
    """Window pages that stand for nothing now, and stood for something at the submission before."""
    table: list[int]
    """By KV page: the window page that stands for it once the batch was executed; 0 for none."""


class WindowTwin(CompanionSide):
    """Translation and window slots as lists."""

    def __init__(self, scenario: Scenario, hits: Hits) -> None:
        windows = scenario.windows
        assert windows is not None, "a scenario without windowed layers has no such side"
        self._size, self._window, self._hits = scenario.page_size, windows.tokens, hits
        chunk = scenario.config.prompt_tokens
        bounds = WindowBounds(windows.tokens, scenario.page_size, chunk, scenario.doubt)
        self.host = WindowPages(windows.pages, scenario.pages, scenario.rows + 1, bounds)
        self._free = set(self.host._free)
        self._table = [0] * (scenario.pages + 1)
        self._held = [UNWRITTEN] * ((windows.pages + 1) * self._size)
        self._watch()

    def _watch(self) -> None:
        host, hits = self.host, self._hits
        can_admit, can_grow, forget, replace = host.can_admit, host.can_grow, host._forget, host.replaced
        begin, gone = host._begin, [0]

        def admit(facts: AdmissionFacts) -> bool:
            allowed = can_admit(facts)
            hits(
                "window_shared" if allowed and len(facts.cached) else "window_admitted" if allowed else "window_refused"
            )
            return allowed

        def grow(rows: Ints) -> bool:
            allowed = can_grow(rows)
            if not allowed:
                hits("window_not_grown")
            return allowed

        def forgotten(page: int) -> int:
            hits("window_forgotten")
            gone[0] += 1
            return forget(page)

        def begun(row: int, pages: list[int]) -> None:
            free, before = len(host._free), gone[0]
            begin(row, pages)
            if gone[0] - before > max(0, len(pages) - free):
                text = f"{gone[0] - before} idle window pages are given up for {len(pages)}, {free} were free"
                raise Violation("evicted", text)

        def replaced(pages: Ints, originals: Ints) -> None:
            before = int((host._window_of[originals] > 0).sum())
            replace(pages, originals)
            hits.counts["window_replaced"] += int((host._window_of[originals] > 0).sum()) - before

        host.can_admit, host.can_grow = admit, grow  # type: ignore[method-assign]
        host._forget, host.replaced = forgotten, replaced  # type: ignore[method-assign]
        host._begin = begun  # type: ignore[method-assign]

    def check(self, memory: RequestMemory, running: RunningSet, seats: Sequence[Req]) -> None:
        """Each window page is free or stands for one KV page that somebody owns; who runs has its whole window."""
        host, window_of = self.host, self.host._window_of.tolist()
        mapped = [window for window in window_of if window]
        if sorted(host._free + mapped) != list(range(1, host.size + 1)):
            raise Violation("window_owner", f"free {host._free}, by KV page {window_of}, of {host.size}")
        if any(window_of[page] for page in memory.allocator._stack[: memory.allocator._top].tolist()):
            raise Violation("window_owner", f"by KV page {window_of}: some stand for pages that nobody owns")
        for req in seats:
            least, most = int(running.planned_lower[req.row]), int(running.planned[req.row])
            first, end = max(0, least - self._window + 1) // self._size, min(most, int(running.limit[req.row]))
            needed = memory._pages[req.row, first : -(-end // self._size)].tolist()
            if not all(window_of[page] and page not in host._idle for page in needed):
                text = f"{req.sink.name} goes on at {least} and needs {needed}: {window_of}, idle {list(host._idle)}"
                raise Violation("window_owner", text)

    def leave(self, batch: ScheduleBatch, flying: Sequence[WindowsLeft]) -> WindowsLeft:
        """See `CompanionSide`."""
        free = set(self.host._free)
        freed, self._free = sorted(free - self._free), free
        table = self.host._window_of.tolist()
        if any(
            was and is_now and was != is_now for left in flying for was, is_now in zip(left.table, table, strict=True)
        ):
            self._hits("window_changed_in_flight")
        return WindowsLeft(freed, table)

    def told(self, batch: ScheduleBatch) -> str:
        """See `CompanionSide`."""
        writes: WindowWrites | None = batch.companion_writes.get(NAME)
        if writes is None:
            return ""
        entries = zip(writes.pages.tolist(), writes.windows.tolist(), strict=True)
        return f"windows: {', '.join(f'page {page} in {window or None}' for page, window in entries)}"

    def take_back(self, owners: Sequence[Owner], left: WindowsLeft) -> None:
        """See `CompanionSide`."""
        for window in left.freed:
            self._held[window * self._size : (window + 1) * self._size] = [UNWRITTEN] * self._size

    def check_writes(self, plain: Plain, writes: WindowWrites | None) -> None:
        """Every KV page once."""
        if writes is not None and len(set(writes.pages.tolist())) != len(writes.pages):
            raise Violation("window_table", f"step {plain.step_id} writes entries {writes.pages.tolist()}")

    def begin(self, writes: WindowWrites | None) -> None:
        """See `CompanionSide`."""
        if writes is not None:
            for page, window in zip(writes.pages.tolist(), writes.windows.tolist(), strict=True):
                self._table[page] = window

    def run(self, plain: Plain, ids: list[int], tables: list[Table], kv: KVMemory) -> list[int]:
        """See `CompanionSide`. All of a batch's writes come before its reads."""
        for row, start, end, table in zip(plain.rows, plain.starts, plain.ends, tables, strict=True):
            for slot in table[start:end]:
                self._held[self._at(row, slot)] = kv.at(slot)
        said = list[int]()
        for row, start, end, table in zip(plain.rows, plain.starts, plain.ends, tables, strict=True):
            for position in range(max(0, start - self._window + 1), end):
                slot = table[position]
                if self._held[self._at(row, slot)] != kv.at(slot):
                    text = f"row {row} from {start} reads position {position}, page {slot // self._size}: not its key"
                    raise Violation("window_read", text)
            last = start if plain.verifies else end - 1
            said += [self._held[self._at(row, slot)] for slot in table[last:end]]
        return said

    def _at(self, row: int, slot: int) -> int:
        page, within = divmod(slot, self._size)
        if not self._table[page]:
            raise Violation("window_read", f"row {row} needs KV page {page}, for which no window page stands")
        return self._table[page] * self._size + within

    def look_back(self, kv: KVMemory, left: WindowsLeft) -> None:
        """See `CompanionSide`. The device translates as the host thinks that it does."""
        if self._table != left.table:
            raise Violation("window_table", f"the device has {self._table}, the host {left.table}")
        size = self._size
        for page, window in enumerate(self._table):
            if window:
                kept, keys = self._held[window * size : (window + 1) * size], kv.page(page)
                # A window page that changed hands holds old keys until it is written.
                if kept != keys and any(key not in (held, UNWRITTEN) for held, key in zip(kept, keys, strict=True)):
                    raise Violation("window_kept", f"KV page {page} holds {keys}, its window page {window} {kept}")
