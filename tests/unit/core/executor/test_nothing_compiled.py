"""After start-up no step compiles anything: neither torch.compile nor Triton, whatever rows and options it has.

Everything of a step is real (scheduler, relay, a transformers model with fused layers, Triton attention) but the GPU,
for which `tests/support/fakes/compiled_kernels.py` stands in. Uploads lie in one tensor, as they do there.
"""

from __future__ import annotations

import ast
import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.engine import build
from core.engine.async_engine import AsyncEngine
from core.executor.step import StepRunner
from core.models.fused.layers import fuse_layers
from core.models.loader import load_model
from core.relay.future_map import FutureMap
from core.text.tokenizer import Tokenizer
from core.types.io import Finished, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import started
from tests.support.fakes.traced_graphs import TracedGraphs
from tests.support.repository import ROOT

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")

ROWS, CLIENTS, CHUNK, CONTEXT, MULTIPROCESSORS = 24, 30, 96, 192, 132
PHASE = 40
"""Steps for which as many clients ask."""
CPU = torch.device("cpu")


class AsOnCuda(DeviceStreams):
    """Streams of the CPU for which no compiled code of the host takes over, and whose steps can be captured."""

    def new_graphs(self) -> TracedGraphs:
        return TracedGraphs()

    @property
    def at_once(self) -> bool:
        return False


def upload_as_on_cuda(patch: pytest.MonkeyPatch) -> None:
    """Parts of one upload begin where the one before ends, at odd places too."""

    def pinned(self: Staging, ids: Any) -> torch.Tensor:
        return torch.cat([torch.from_numpy(each) for each in ids])

    def made(self: Staging, device: torch.device) -> None:
        self.device, self.pins = device, True

    patch.setattr(Staging, "__init__", made)
    patch.setattr(Staging, "pinned", pinned)


@asynccontextmanager
async def engine_of_zeros(
    directory: Path, patch: pytest.MonkeyPatch, captures: bool, whole: bool, fixed: bool
) -> AsyncIterator[tuple[AsyncEngine, list[int], list[StepRunner]]]:
    """A started engine with all our kernels, the rows of each step that it has launched since, and its runner.

    `whole`: with a fused decoder, else with fused layers of the modules. `fixed`: a deterministic one.
    """
    from core.attention.triton.backend import TritonAttention
    from core.attention.triton.fixed_backend import FixedTritonAttention
    from core.attention.triton.tiles import Tiles, rehearsed

    config = EngineConfig(
        model=ModelConfig(str(directory), context_length=CONTEXT, native="off"),
        memory=MemoryConfig(page_size=4, max_running_requests=ROWS, max_total_tokens=1600),
        scheduler=SchedulerConfig(chunked_prefill_size=CHUNK),
        executor=ExecutorConfig(device="cpu", overlap=False, cuda_graphs=captures),
    )
    model: Any = load_model(config.model, CPU)
    if whole:
        from core.models.fused.decoder import FusedDecoder

        model = FusedDecoder(model.module, model.spec, fixed)
    else:
        assert fuse_layers(model.module)
    sizes = Tiles(MULTIPROCESSORS, block_m=128, block_n=64, split_least=128, packed=64)
    patch.setattr(Tiles, "of", lambda *_: sizes)
    patch.setattr(TritonAttention, "rehearsals", lambda self, rows, device: rehearsed(rows, MULTIPROCESSORS))
    patch.setattr(build, "build_attention", lambda *_: FixedTritonAttention() if fixed else TritonAttention())
    # What stands in for kernels computes nothing that could be right.
    patch.setattr(build, "prove_attention", lambda *_: None)
    begins, launch, steps = FutureMap.__init__, StepRunner.launch, list[int]()
    made, runners = StepRunner.__init__, list[StepRunner]()

    def fused(self: FutureMap, *parts: Any) -> None:
        begins(self, *parts)
        self.fuse()

    def counted(self: StepRunner, batch: Any, *told: Any) -> Any:
        steps.append(len(batch.rows))
        return launch(self, batch, *told)

    def kept(self: StepRunner, state: Any) -> None:
        made(self, state)
        runners.append(self)

    patch.setattr(StepRunner, "__init__", kept)
    patch.setattr(FutureMap, "__init__", fused)
    patch.setattr(StepRunner, "launch", counted)
    upload_as_on_cuda(patch)
    built = build.assemble(config, model, Tokenizer.load(str(directory)), AsOnCuda(CPU))
    async with started(built) as engine:
        yield engine, steps, runners


def anything(draw: random.Random) -> GenerateRequest:
    """A prompt of any length, sampled in any way."""
    length = draw.choice([1, 2, 5, 16, 17, 40, 64, 65, 100, draw.randint(1, 120)])
    options: dict[str, Any] = {"temperature": draw.choice([0.0, 0.8, 1.2]), "seed": draw.randrange(99)}
    if draw.random() < 0.4:
        options |= {"top_k": draw.choice([0, 5, 40]), "top_p": draw.choice([1.0, 0.9]), "min_p": draw.choice([0, 0.02])}
    if draw.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    if draw.random() < 0.3:
        options |= {"logprobs": True, "top_logprobs": draw.choice([0, 3])}
    if draw.random() < 0.2:
        options |= {"logit_bias": {7: 6.0}}
    params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True, **options)
    ids = tuple(draw.randrange(3, 90) for _ in range(length))
    return GenerateRequest(token_ids=ids, sampling=params, want_text=False)


async def random_steps(engine: AsyncEngine, steps: list[int], count: int, seed: int) -> None:
    """Requests of all kinds, many, a few and one at a time, until the engine has launched `count` steps."""
    draw = random.Random(seed)

    async def client(until: int) -> None:
        while len(steps) < until:
            async for event in await engine.generate(anything(draw)):
                if isinstance(event, Finished):
                    break

    while len(steps) < count:
        for clients in (CLIENTS, 6, 1):
            await asyncio.gather(*(client(len(steps) + PHASE) for _ in range(clients)))


@needs_triton
@pytest.mark.parametrize("captures", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("count", [100, 2000])
async def test_random_steps_compile_nothing(
    count: int, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    directory = make_checkpoint("llama", tmp_path, seed=0)
    ours = {"_enter", "_store", "_rms_norm", "_decode_split", "_extend_tile", "_merge_splits"}
    await play(directory, monkeypatch, captures, False, ours, count, seed)


@needs_triton
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
async def test_random_steps_of_a_fused_decoder_compile_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One pool and two."""
    directory = make_checkpoint(kind, tmp_path, seed=0)
    ours = {"_enter", "_add_norm", "_enter_heads", "_activate", "_decode_split", "_extend_tile", "_merge_splits"}
    await play(directory, monkeypatch, False, True, ours, 60, seed)


@needs_triton
async def test_random_steps_of_a_deterministic_decoder_compile_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Parts have programs of their own in some steps, and one for all of them in others."""
    from core.attention.triton import fixed_backend

    monkeypatch.setattr(fixed_backend, "PART_BLOCKS", 1)
    directory = make_checkpoint("llama", tmp_path, seed=0)
    ours = {"_enter", "_add_norm", "_enter_heads", "_activate", "_multiply", "_fixed_tile", "_join_parts"}
    await play(directory, monkeypatch, False, True, ours, 60, seed, fixed=True)


async def play(
    directory: Path,
    patch: pytest.MonkeyPatch,
    captures: bool,
    whole: bool,
    ours: set[str],
    count: int,
    seed: int,
    fixed: bool = False,
) -> None:
    """Random steps of an engine that has the kernels `ours`, none of which is compiled behind its start."""
    from tests.support.fakes.compiled_kernels import compiling

    patch.setattr(torch, "compile", lambda *_, **__: pytest.fail("torch.compile on the way of a step"))
    with compiling(patch) as kernels:
        async with engine_of_zeros(directory, patch, captures, whole, fixed) as (engine, steps, runners):
            begun, launched = kernels.all(), sum(kernels.launches.values())
            assert {name for name, _ in begun} >= ours
            await random_steps(engine, steps, count, seed)
    for graphs in (runners[0].graphs, runners[0].mixed):
        assert (graphs is not None) == captures and (graphs is None or graphs.replays > count / 10)
    assert len(steps) >= count and {1, ROWS} <= set(steps), "few rows and many"
    assert sum(kernels.launches.values()) - launched > 10 * count
    assert not kernels.all() - begun, "every key was there when the engine had started"
    assert len(kernels.keys["_enter"]) == 1 and kernels.launches["_enter"] > count / 2
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    assert dynamo is None or not dynamo.counters["stats"], "neither frames nor guards"


def test_nothing_of_ours_asks_for_a_compiler_of_tensors() -> None:
    """Neither torch.compile nor its kin: each guards its arguments at every call, and compiles when they change."""
    asked = ("torch.compile", "torch.jit.script", "torch.jit.trace", "torch._dynamo.optimize", "torch.cuda.jiterator")
    for path in (ROOT / "core").rglob("*.py"):
        text = path.read_text()
        if any(name in text for name in asked):
            named = {ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
            assert not named.intersection(asked), path
