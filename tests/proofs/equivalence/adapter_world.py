"""A base with a directory of adapters, servers over them, and what PEFT generates with each: asked once, then known."""

from __future__ import annotations

import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.models.lora.checkpoint import AdapterLimits, read_adapter
from service.client import SlipstreamClient
from service.client.adapters import AdapterClient
from service.server.server import Server
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.servers import serve_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, PeftOracle, make_adapter
from tests.unit.core.models.reference import load

OUTPUT = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PATHS = (*ADAPTERS, "twin")
"""Directories below the root; `twin` has other weights in the shape of `narrow`."""


class World:
    """`prompts[i]` and what every adapter makes of it."""

    def __init__(self, directory: Path, prompts: int) -> None:
        rng = random.Random(11)
        self.base = make_checkpoint("qwen3", directory / "base")
        self.root = directory / "root"
        arguments = {**ADAPTERS, "twin": ADAPTERS["narrow"]}
        made = {name: make_adapter(self.base, self.root / name, i, **arguments[name]) for i, name in enumerate(PATHS)}
        shutil.copytree(made["narrow"], self.root / "broken")
        (self.root / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
        model: Any = load(self.base)
        limits = AdapterLimits()
        self.nbytes = {n: read_adapter(p, model.module, model.spec.dtype, limits).nbytes for n, p in made.items()}
        self._oracle = PeftOracle(self.base, made)
        self._known: dict[tuple[int, str, int], list[int]] = {}
        self.prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(9, 40))] for _ in range(prompts)]
        for i in range(prompts):
            answers = [self.answer(i, path) for path in ("", *PATHS)]
            assert len(set(map(tuple, answers))) == len(answers), "two adapters that answer alike prove nothing"

    def answer(self, prompt: int, path: str, count: int = OUTPUT) -> list[int]:
        """What PEFT generates after `prompts[prompt]` with the adapter in `path`, the base alone for none."""
        key = (prompt, path, count)
        if key not in self._known:
            self._known[key] = self._oracle.greedy(self.prompts[prompt], path or None, count)
        return self._known[key]

    @asynccontextmanager
    async def serve(self, **settings: Any) -> AsyncIterator[Serving]:
        """A server that may load from the root."""
        defaults: dict[str, Any] = {"lora_dir": str(self.root), "page_size": 4, "chunked_prefill_size": 24}
        defaults["unnamed_callers"] = "all"
        async with serve_checkpoint(self.base, **(defaults | settings)) as (server, client):
            yield Serving(self, server, client, AdapterClient(client))


@dataclass(frozen=True)
class Serving:
    """A server, and both of its clients."""

    world: World
    server: Server
    client: SlipstreamClient
    adapters: AdapterClient

    async def ask(self, prompt: int, adapter: str, count: int = OUTPUT) -> tuple[list[int], int]:
        """Ids of one output, and how many prompt tokens were cached."""
        asked = self.world.prompts[prompt]
        (output,) = await self.client.complete(asked, adapter=adapter, max_tokens=count, **GREEDY)
        return list(output.token_ids), output.end.cached_tokens

    async def names(self) -> list[str]:
        """What is loaded, in order of loading."""
        return [adapter.name for adapter in (await self.adapters.list()).adapters]
