"""Start-up time and memory per size of model: seeded checkpoints, each loaded by a fresh process.

`python -m service.bench.growth_models DIR` is that process: it prints one JSON object, a `Start`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

BEGAN = time.perf_counter()
"""The time at which the interpreter runs and nothing heavy is imported yet, in `time.perf_counter` seconds."""

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
POOL_TOKENS = 4096
"""Tokens of the KV pool, the same for every model."""

SIZES: dict[int, dict[str, int]] = {
    1: {"hidden_size": 128, "num_hidden_layers": 4},
    8: {"hidden_size": 320, "num_hidden_layers": 6},
    32: {"hidden_size": 512, "num_hidden_layers": 10},
    128: {"hidden_size": 1024, "num_hidden_layers": 10},
}
"""Llama shapes by their millions of parameters, roughly; `build_checkpoint` counts them."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start. `imports`, `load` and `first_token` are seconds, each from the end of the one before.

    They end when everything is imported, when the engine is ready, and with the first token. `imports_rss` is the
    process's memory in bytes after the imports, `peak_rss` the most that it ever had.
    """

    imports: float
    load: float
    first_token: float
    imports_rss: int
    peak_rss: int


def build_checkpoint(directory: Path, vocab: int = 0, **shape: int) -> int:
    """Write a Llama with seeded random weights and the bundled tokenizer. Returns its number of parameters."""
    import torch

    from core.models.bundled import bundled_model_dir
    from core.text.tokenizer import Tokenizer
    from service.bench.random_checkpoint import save_random_checkpoint

    heads = max(2, shape["hidden_size"] // 64)
    fields = {
        "model_type": "llama",
        "vocab_size": vocab or Tokenizer.load(str(bundled_model_dir())).vocab_size,
        "intermediate_size": 3 * shape["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1 << 16,
    }
    model = save_random_checkpoint(fields | shape, torch.float32, directory)
    return sum(parameter.numel() for parameter in model.parameters())


def start(directory: Path) -> Start:
    """Load the checkpoint in `directory` in a fresh process. Raises RuntimeError with its output if it fails."""
    command = (sys.executable, "-P", "-m", "service.bench.growth_models", str(directory))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rss() -> int:
    """Bytes of memory that this process has now; where the system does not say, the most that it had so far."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * resource.getpagesize() if told.exists() else _peak_rss()


def _start_here(directory: str) -> Start:
    from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig
    from core.engine.build import build_engine
    from core.types.io import Delta, GenerateRequest
    from core.types.sampling_params import SamplingParams

    imported, imports_rss = time.perf_counter(), _rss()

    async def run() -> Start:
        # Compiling for this processor goes on beside serving and is another figure.
        model = ModelConfig(directory, native="off")
        config = EngineConfig(model, MemoryConfig(max_total_tokens=POOL_TOKENS, max_running_requests=8))
        built = build_engine(EngineConfig(config.model, config.memory, executor=ExecutorConfig("cpu", cpu_threads=1)))
        engine = await built.start()
        ready = first = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        async for event in await engine.generate(GenerateRequest(token_ids=tuple(range(3, 19)), sampling=sampling)):
            if isinstance(event, Delta):
                first = time.perf_counter()
        await engine.stop()
        return Start(imported - BEGAN, ready - imported, first - ready, imports_rss, _peak_rss())

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(asdict(_start_here(sys.argv[1]))))
