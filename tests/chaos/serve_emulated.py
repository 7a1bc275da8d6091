"""`python -m tests.chaos.serve_emulated serve ARGS`: the real command line and engine around the emulated device.

Faults come from the environment (`tests.chaos.device`). A line on standard input is answered by one line of JSON on
standard output that says what only the inside knows: tasks, streams, and whether the pools add up.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch

from core.config import EngineConfig
from core.engine import build
from core.engine.async_engine import AsyncEngine
from core.engine.built_engine import BuiltEngine
from core.invariants import InvariantViolation
from core.relay.compiled import Entered
from core.relay.future_map import FutureMap
from core.relay.payload import NEW_SEQ_LENS, OUTPUT_TOKENS
from core.text.tokenizer import Tokenizer
from service.bench.emulated import EmulatedStreams
from service.cli.cli import main
from service.engine import builder
from tests.chaos.device import ChaosModel, Faults


class ChaosEngine:
    """The production engine, which also answers probes on standard input."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _answer(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            return
        print(json.dumps(self._facts()), flush=True)

    def _facts(self) -> dict[str, Any]:
        stats = self._engine.stats
        try:
            self._engine._scheduler.memory.check_integrity()
            sound = ""
        except InvariantViolation as violation:
            sound = str(violation)
        return {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "live": self._engine.live_requests,
            "running": stats.running,
            "waiting": stats.waiting,
            "step": stats.step,
            "used": {pool.name: pool.used for pool in stats.pools},
            "unsound": sound,
        }


@dataclass(frozen=True)
class BuiltChaosEngine:
    """What a `ChaosEngine` is started from."""

    built: BuiltEngine

    async def start(self) -> ChaosEngine:
        return ChaosEngine(await self.built.start())


def forgetful(faults: Faults) -> type[FutureMap]:
    """A FutureMap that loses the token of each row of length `forget_at_length`."""

    class Forgetful(FutureMap):
        def enter(
            self, rows: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, after: torch.Tensor | None = None
        ) -> Entered:
            lost = rows[self.extra(NEW_SEQ_LENS.name, rows) == faults.forget_at_length]
            self.buffer(OUTPUT_TOKENS.name)[lost] = OUTPUT_TOKENS.fill
            return super().enter(rows, lower, upper, after)

    return Forgetful


def make_engine(config: EngineConfig, progress: builder.Progress | None) -> BuiltChaosEngine:
    """What `build_core_engine` makes, around the emulated device."""
    faults = Faults.from_env()
    tokenizer = Tokenizer.load(config.model.path)
    model = ChaosModel(faults, tokenizer.vocab_size)
    if faults.forget_at_length:
        build.FutureMap = forgetful(faults)  # type: ignore[misc]
    torch.set_num_threads(1)
    return BuiltChaosEngine(build.assemble(config, model, tokenizer, EmulatedStreams(model.timeline)))


if __name__ == "__main__":
    builder.build_core_engine = make_engine  # type: ignore[assignment]
    main()
