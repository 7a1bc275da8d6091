"""This engine as a peer of other engines: requests in, tokens out, in process, for a harness that times all alike.

The contract is four methods: `info`, `run`, `close` and the constructor. The harness brings prompts of token ids and a
callback. `python -m service.bench.peer MODEL` runs a short workload by itself, for a profiler.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.engine.async_engine import AsyncEngine
from core.engine.build import build_engine
from core.types.io import Delta, GenerateRequest
from core.types.sampling_params import SamplingParams
from service.process.switch_interval import shorten_switch_interval

Emit = Callable[[int, int], object]
"""(request id, token id): called for each token when it is usable."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Short names that a harness may use -> names of torch."""


class PeerRequest(TypedDict):
    """One request; all of a `run` arrive at once."""

    id: int
    prompt: list[int]
    """Token ids."""
    max_new: int
    """Output tokens, exactly: no token ends an output early."""


class Peer:
    """A started engine.

    `options` are strings: `dtype`, `quantization`, and `chunk` (prompt tokens per step), `native`, `overlap`.
    """

    def __init__(self, model_dir: str, threads: int, **options: str) -> None:
        shorten_switch_interval(writes=False)
        dtype = options.get("dtype", "bfloat16")
        config = EngineConfig(
            model=ModelConfig(
                model_dir,
                dtype=DTYPES.get(dtype, dtype),
                native=options.get("native", "wait"),
                quantization=options.get("quantization", "none"),
            ),
            memory=MemoryConfig(),
            scheduler=SchedulerConfig(chunked_prefill_size=int(options.get("chunk", "512"))),
            executor=ExecutorConfig(device="cpu", cpu_threads=threads, overlap=options.get("overlap", "on") == "on"),
        )
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._engine: AsyncEngine = self._loop.run_until_complete(build_engine(config).start())

    def info(self) -> dict[str, Any]:
        """Versions and settings, which the harness records beside its figures."""
        model, memory = self._config.model, self._config.memory
        return {
            "torch": torch.__version__,
            "dtype": model.dtype,
            "native": model.native,
            "quantization": model.quantization,
            "page_size": memory.page_size,
            "chunked_prefill_size": self._config.scheduler.prompt_tokens,
        }

    def run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        """Generate greedily for all of `requests` at once; EOS does not end an output.

        Calls `emit(id, token)` for each token when it comes.
        """
        self._loop.run_until_complete(self._run(requests, emit))

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()

    async def _run(self, requests: Sequence[PeerRequest], emit: Emit) -> None:
        await asyncio.gather(*(self._one(request, emit) for request in requests))

    async def _one(self, request: PeerRequest, emit: Emit) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request["max_new"], ignore_eos=True)
        asked = GenerateRequest(token_ids=tuple(request["prompt"]), sampling=params, want_text=False)
        async for event in await self._engine.generate(asked):
            if isinstance(event, Delta):
                for token in event.token_ids:
                    emit(request["id"], token)


def main(model_dir: str) -> None:
    """Run 64 requests of 64 prompt and 64 output tokens three times, and print output tokens per second."""
    peer = Peer(model_dir, threads=torch.get_num_threads())
    for turn in range(3):
        requests = [
            PeerRequest(id=i, prompt=[300 + turn * 64 + i + j for j in range(64)], max_new=64) for i in range(64)
        ]
        began = time.perf_counter()
        peer.run(requests, lambda _id, _token: None)
        print(f"{64 * 64 / (time.perf_counter() - began):.0f} output tokens/s")
    peer.close()


if __name__ == "__main__":
    main(sys.argv[1])
