"""Random loads, unloads and requests at once: an answer is that of weights which its name had, or NOT_FOUND."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.engine.async_engine import AsyncEngine
from core.models.lora.slots import LORA
from service.client import CallFailed
from tests.proofs.equivalence.adapter_world import PATHS, Serving, World
from tests.support.until import until

NAMES = "abcdef"
CLIENTS = 8
CHANGES = 50
ANSWERS = 60
MAY_FAIL = {"ADAPTER_NOT_FOUND", "ADAPTER_EXISTS", "ADAPTER_MEMORY"}


@dataclass
class Names:
    """Which paths each name may stand for. What a call in flight may yet do counts from its beginning."""

    now: dict[str, str] = field(default_factory=dict)
    changes: list[tuple[str, str]] = field(default_factory=list)
    """(name, path) of every load that began, in order."""

    def possible(self, name: str, since: int) -> set[str]:
        """Paths that `name` may have stood for since `changes` had that length."""
        begun = {path for each, path in self.changes[since:] if each == name}
        return begun | ({self.now[name]} if name in self.now else set())


class Storm:
    """Clients that ask, and one that changes what is loaded."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self.serving = serving
        self.rng = random.Random(seed)
        self.names = Names()
        self.outcomes: Counter[str] = Counter()
        self.over = False
        self.progress = asyncio.Event()
        """Set by every answer and refusal that a client gets."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(self.client())
            await self.change()
            self.over = True

    async def change(self) -> None:
        wanted = {"changed": CHANGES, "answered": ANSWERS, "not found": 1, "evicted": 2, "ADAPTER_EXISTS": 1}
        while any(self.outcomes[outcome] < count for outcome, count in wanted.items()):
            self.progress.clear()
            await self.progress.wait()
            name, path = self.rng.choice(NAMES), self.rng.choice(PATHS)
            try:
                if self.rng.random() < 0.7:
                    self.names.changes.append((name, path))
                    for gone in (await self.serving.adapters.load(name, path)).evicted:
                        del self.names.now[gone]
                        self.outcomes["evicted"] += 1
                    self.names.now[name] = path
                else:
                    await self.serving.adapters.unload(name)
                    del self.names.now[name]
                self.outcomes["changed"] += 1
            except CallFailed as failed:
                assert failed.reason in MAY_FAIL, failed
                self.outcomes[failed.reason] += 1

    async def client(self) -> None:
        while not self.over:
            name, prompt = self.rng.choice(NAMES), self.rng.randrange(len(self.serving.world.prompts))
            before, since = dict(self.names.now), len(self.names.changes)
            try:
                ids, _ = await self.serving.ask(prompt, name)
            except CallFailed as failed:
                assert failed.reason == "ADAPTER_NOT_FOUND", failed
                self.count("not found")
                continue
            # A load in flight when the request began may have taken effect before it, so one change earlier counts.
            allowed = self.names.possible(name, max(0, since - 1)) | ({before[name]} if name in before else set())
            answers = [self.serving.world.answer(prompt, path) for path in allowed]
            assert ids in answers, f"{name}: not an answer of {sorted(allowed)}"
            self.count("answered")

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.progress.set()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("storm"), prompts=3)


async def test_storm(world: World, seed: int) -> None:
    print(f"seed {seed}")
    room = world.nbytes["all"] + world.nbytes["regex"] + world.nbytes["narrow"]
    async with world.serve(max_lora_bytes=room, max_running_requests=6, max_total_tokens=320) as serving:
        storm = Storm(serving, seed)
        await storm.run()
        print(dict(storm.outcomes))
        engine: Any = serving.server.engine
        assert isinstance(engine, AsyncEngine)
        await until(lambda: not engine.live_requests)
        table = engine._adapters.table
        table.check_integrity()
        assert set(await serving.names()) == storm.names.now.keys()
        for name in await serving.names():
            await serving.adapters.unload(name)
        # The device hears of it with the next step.
        await serving.ask(0, "")
        assert engine._executor._runner._state.companions[LORA].nbytes == 0
        assert (engine.stats.adapter_bytes, engine.stats.adapters_loaded) == (0, 0)
        assert sum(engine.stats.assert_failures.values()) == 0
