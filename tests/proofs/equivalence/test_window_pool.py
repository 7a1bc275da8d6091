"""Nobody reads what has left a window: pages that are given back are poisoned, and every token is still right."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.device.staging import Staging
from core.memory.window.window_bounds import WindowBounds
from core.memory.window.window_pages import NAME, WindowPages, WindowWrites
from core.memory.window.window_pool import SlidingWindowPool
from core.types.arrays import Ints
from tests.proofs.equivalence.oracle import Example, decided_examples
from tests.proofs.equivalence.test_greedy_grpc import _ask
from tests.support.servers import serve_checkpoint

LONGEST = 150
PAGE = 4
SETTINGS: dict[str, Any] = {
    "page_size": PAGE,
    "chunked_prefill_size": 24,
    "max_running_requests": 6,
    "max_total_tokens": 2048,
    "max_window_tokens": 80,
}


@pytest.fixture(scope="module", params=["gemma3_text", "mistral", "gpt_oss"])
def reference(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> tuple[Path, list[Example]]:
    """A checkpoint whose windows are 16 tokens, and the oracle's examples for it."""
    directory = checkpoint_of(request.param)
    return directory, decided_examples(directory, 12, LONGEST, 1)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Fills every window page that loses its owner with NaN, before the step that may hand it to the next one.

    But for those that go on for a cached page, contents and all.
    """
    counted: Counter[str] = Counter()
    moved: set[int] = set()
    """Since the last writes were planned; the device may be a step behind, so they travel in `kept`, one for each."""
    kept: deque[frozenset[int]] = deque()
    begin, replaced, planned = SlidingWindowPool.begin, WindowPages.replaced, WindowPages._writes

    def poison(self: SlidingWindowPool, rows: torch.Tensor, writes: WindowWrites | None, staging: Staging) -> None:
        old, size = self.table.clone(), self.kv.page_size
        begin(self, rows, writes, staging)
        spared: frozenset[int] = frozenset() if writes is None else kept.popleft()
        lost, fresh = old[old != self.table], self.table[old != self.table]
        for page in {*lost.tolist(), *fresh.tolist()} - {0} - spared:
            counted["pages"] += 1
            for spec in self.kv.layers:
                for tensor in (self.kv.k(spec.layer_id), self.kv.v(spec.layer_id)):
                    tensor[page * size : (page + 1) * size] = torch.nan

    def plan(self: WindowPages) -> WindowWrites | None:
        writes = planned(self)
        if writes is not None:
            kept.append(frozenset(moved))
            moved.clear()
        return writes

    def remember(self: WindowPages, pages: Ints, originals: Ints) -> None:
        before = {self.window_of(page) for page in pages.tolist()} - {0}
        replaced(self, pages, originals)
        moved.update(before & {self.window_of(page) for page in originals.tolist()})

    monkeypatch.setattr(SlidingWindowPool, "begin", poison)
    monkeypatch.setattr(WindowPages, "replaced", remember)
    monkeypatch.setattr(WindowPages, "_writes", plan)
    return counted


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays for later requests: what a row has passed loses its page, and is poisoned, in the next step."""
    planned = WindowPages.planned

    def give_back(self: WindowPages, *args: Any) -> WindowWrites | None:
        writes = planned(self, *args)
        self._free += [self._forget(page) for page in list(self._idle)]
        return writes

    monkeypatch.setattr(WindowPages, "planned", give_back)


async def wrong_answers(directory: Path, examples: list[Example], again: int = 0, **settings: Any) -> tuple[int, Any]:
    """How many answers are not the oracle's, and the last statistics.

    All are asked at once, then `again` times one by one, each time from the last to the first of the time before.
    """
    async with serve_checkpoint(directory, **(SETTINGS | settings)) as (server, client):
        answers = await asyncio.gather(*(_ask(client, example) for example in examples))
        wrong = sum(a != e.output for a, e in zip(answers, examples, strict=True))
        for _ in range(again):
            examples = examples[::-1]
            wrong += sum([await _ask(client, example) != example.output for example in examples])
        return wrong, server.engine.stats


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.usefixtures("eager")
async def test_what_left_the_window_is_never_read(
    reference: tuple[Path, list[Example]], poisoned: Counter[str], overlap: bool
) -> None:
    wrong, stats = await wrong_answers(*reference, overlap=overlap)
    assert wrong == 0
    assert poisoned["pages"] > 100
    assert sum(stats.assert_failures.values()) == 0


async def test_prefix_hits_read_whole_windows_only(
    reference: tuple[Path, list[Example]], poisoned: Counter[str]
) -> None:
    """Room for some of the windows that earlier rounds left behind: hits where they are whole, and none where not."""
    wrong, stats = await wrong_answers(*reference, again=2, max_window_tokens=240)
    assert wrong == 0
    assert poisoned["pages"] > 100
    prompts = 3 * sum(len(example.prompt) for example in reference[1])
    assert 0 < stats.cached_tokens < prompts
    pools = {pool.name: pool for pool in stats.pools}
    assert pools[NAME].used == 0 and pools[NAME].cached > 0


@pytest.mark.usefixtures("eager", "poisoned")
async def test_a_page_that_leaves_too_early_is_missed(
    reference: tuple[Path, list[Example]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: these tests see it when a window is taken for one page shorter than it is."""
    first_places = WindowBounds.first_places
    monkeypatch.setattr(WindowBounds, "first_places", lambda self, lens: first_places(self, lens + PAGE))
    wrong, _ = await wrong_answers(*reference)
    assert wrong > 0


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
async def test_the_pool_shows_in_metrics_and_can_be_switched_off(
    reference: tuple[Path, list[Example]], on: bool
) -> None:
    directory, examples = reference
    async with serve_checkpoint(directory, **SETTINGS, sliding_window_pool=on) as (server, client):
        answers = [await _ask(client, example) for example in examples[:2]]
        address = f"http://127.0.0.1:{server.metrics_port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=10).read().decode())
    assert answers == [example.output for example in examples[:2]]
    assert ('slipstream_pool_capacity{pool="swa_page"} 20.0' in text) == on
    assert ('slipstream_pool_used{pool="swa_page"}' in text) == on
