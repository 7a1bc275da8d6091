"""Tensor and pipeline parallelism: starts the other ranks of an engine, and is what each of them does.

Weights, keys and values of each layer are shared out among the ranks by `transformers`, or each rank has some of the
layers (`core/models/stages`). Rank 0 is the engine; the others load their shards, prove them by the same steps at the
same time, and then follow (`core/distributed`).
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Final, cast

import torch

from core.attention.registry import build_attention
from core.config import EngineConfig, MemoryConfig
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams, resolve_device
from core.distributed.drafts import FollowingGrid, FollowingSpeculator, LeadingGrid, LeadingSpeculator
from core.distributed.follower import STOP, FollowingSampling, follow
from core.distributed.leader import LeadingRunner
from core.distributed.pipeline_leader import PipelineLeader
from core.distributed.ring import DistributedRing
from core.distributed.world import HOST, World
from core.engine.build_pools import Pools, build_arena, build_pools
from core.engine.disagg import Disagg
from core.engine.kv_storage import check_kv_format
from core.engine.math_threads import use_threads
from core.engine.speculation import GUESSERS, Speculation, build_source, way_of, why_no_speculation
from core.engine.step_times import time_steps
from core.errors import ConfigError, StartupError
from core.executor.decode_graphs import graph_sizes
from core.executor.device_state import DeviceState
from core.executor.interface import Executor
from core.executor.mixed_graphs import chunk_tokens
from core.executor.step import StepRunner
from core.executor.verification import Verification
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from core.models.attention_proof import prove_attention, prove_codes
from core.models.loader import load_model
from core.relay.future_map import FutureMap
from core.sampling.registry import build_sampler
from core.speculation.drafter import Drafter
from core.speculation.guesses import Guesser

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 20.0
SEEN_SECONDS: Final = 0.5
"""In which a process that has ended is seen to have: its connections close a little before."""
TELL_SECONDS: Final = 2.0
"""In which a rank that has failed has said why."""
_SIZE: Final = 8
"""Bytes of a size, as it is told."""

Refusals = tuple[tuple[str, Callable[[EngineConfig], bool]], ...]

REFUSED: Final[Refusals] = (
    ("speculative", lambda config: config.speculation.method != "off" and config.model.tensor_parallel == 1),
    ("a model that drafts", lambda config: config.speculation.method.partition(":")[0] not in ("off", *GUESSERS)),
    ("lora", lambda config: config.lora.enabled and config.model.tensor_parallel == 1),
    ("deterministic", lambda config: config.model.deterministic),
    ("weights_dir", lambda config: config.model.weights_dir is not None),
    ("kv_cache_dtype", lambda config: config.model.kv_cache_dtype != "auto"),
    ("quantization", lambda config: config.model.quantization != "none"),
    ("role", lambda config: config.disagg.role != "both"),
)
"""Settings that engines of several ranks cannot have yet, and when a configuration has them."""


class RankLost(StartupError):
    """Another process of this engine is gone: it cannot start, or no step can be finished any more."""

    # As of an engine that has failed: another start may go well.
    exit_code = 1


class Ranks:
    """The other ranks of this engine, as its rank 0 knows them."""

    def __init__(self, world: World, processes: list[BaseProcess], *, pipelined: bool = False) -> None:
        """`processes`: those that were started here. `pipelined`: each has layers of its own."""
        self.world = world
        self._processes = processes
        self._pipelined = pipelined

    def sized(self, pools: Pools) -> None:
        """Tell all how many tokens the pools of this rank hold; theirs hold as many, whatever memory they find."""
        window = pools.companions.get(WINDOW)
        held = window.kv.num_pages if isinstance(window, SlidingWindowPool) else 0
        sizes = (pages * pools.memory.page_size for pages in (pools.memory.allocator.num_pages, held))
        self.world.send(b"".join(tokens.to_bytes(_SIZE, "little") for tokens in sizes))

    @property
    def share(self) -> Callable[[torch.Tensor], None] | None:
        """What makes sampled tokens those of rank 0; None where no other rank runs the end of a step."""
        return None if self._pipelined else self.world.share

    def runner(self, state: DeviceState) -> StepRunner:
        """What runs the steps of this rank, and has the others run theirs."""
        return (PipelineLeader if self._pipelined else LeadingRunner)(state, self.world)

    def blamed(self, cause: BaseException) -> BaseException:
        """Why no step can be finished: RankLost where one has ended and `cause` came of it; waits for a moment."""
        end = time.monotonic() + SEEN_SECONDS
        while isinstance(cause, RuntimeError):
            try:
                self.check()
            except RankLost as lost:
                return lost
            if time.monotonic() > end:
                break
            time.sleep(SEEN_SECONDS / 20)
        return cause

    def check(self) -> None:
        """Raises RankLost if one of them has ended before its time."""
        _check(self._processes)

    def why(self, error: StartupError) -> StartupError:
        """What has kept this engine from starting: `error` of this rank, or the one of another that led to it."""
        # A rank that has failed has told so before its connection closes, which is what this one notices.
        if "losed by peer" not in str(error) or (told := self.world.failure(TELL_SECONDS)) is None:
            return error
        return type(error)(told)

    def kill(self) -> None:
        """End the others at once: this rank cannot go on."""
        _kill(self._processes)
        self._processes = []
        self.world.leave()

    def close(self) -> None:
        """End the others, and the group. What does not end by itself is ended. Idempotent."""
        processes, self._processes = self._processes, []
        try:
            if processes and all(process.is_alive() for process in processes):
                self.world.send(STOP)
        except RuntimeError as error:
            logger.warning("a rank was gone already: %s", str(error).partition("\n")[0])
        for process in processes:
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self.world.leave()


def _check(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if not process.is_alive():
            code = process.exitcode or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise RankLost(f"{process.name} (process {process.pid}) {how}")


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def sized_by(told: memoryview, memory: MemoryConfig) -> MemoryConfig:
    """`memory` with the sizes of pools that rank 0 has told by `Ranks.sized`."""
    total, window = (int.from_bytes(told[at : at + _SIZE], "little") for at in (0, _SIZE))
    return dataclasses.replace(memory, max_total_tokens=total, max_window_tokens=window or None)


def stop_all(executor: Executor, ranks: Ranks | None, disagg: Disagg, *, dead: bool) -> None:
    """Run what was submitted to `executor`, and end what ran it, in other processes too. Blocks for as long.

    And what sends keys to other engines, or gets theirs.

    `dead`: wait for nothing. The executor's thread may hang for ever then; it is a daemon and ends with the process.
    """
    disagg.close()
    if not dead:
        executor.stop()
    if ranks is not None:
        ranks.kill() if dead else ranks.close()


def verification(speculation: Speculation | None, ranks: Ranks | None) -> Callable[[DeviceState], Verification] | None:
    """What makes rank 0's way to verify drafts; None without any. The others hear of what it tries."""
    if speculation is None or ranks is None:
        return None if speculation is None else speculation.verification
    world, most, drafter = ranks.world, speculation.most, speculation.drafter
    if speculation.way.is_grid:
        return lambda state: LeadingGrid(world, cast(Guesser, drafter), state, most)
    return lambda state: LeadingSpeculator(world, cast(Drafter, drafter), state)


def refuse(config: EngineConfig, setting: str, more: Refusals = ()) -> None:
    """Raises ConfigError where `config` has what is not possible with `setting`: one of REFUSED, or of `more`."""
    for name, has in (*REFUSED, *more):
        if has(config):
            raise ConfigError(f"{setting} is not possible with {name} yet")


def open_ranks(config: EngineConfig, device: torch.device) -> Ranks | None:
    """Start the other ranks, and meet them; None where the engine has one.

    Raises ConfigError for a setting that cannot be, StartupError where a rank does not come, RankLost where it ends.
    """
    size, setting = config.model.ranks, config.model.shared_by
    if size == 1:
        return None
    refuse(config, setting)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(f"{setting} {size} needs as many devices: there are {torch.cuda.device_count()}")
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for rank in range(1, size):
        name = f"slipstream-rank-{rank}"
        processes.append(spawning.Process(target=run_follower, args=(config, rank, port), name=name, daemon=True))
        processes[-1].start()
    # Before what multiprocessing does then: it asks, which followers do not hear, and waits for them without end.
    atexit.register(_kill, processes)
    try:
        world = World.join(0, size, port, device, listener, partial(_check, processes))
        return Ranks(world, processes, pipelined=config.model.pipeline_parallel > 1)
    except BaseException:
        _kill(processes)
        raise


def ring_of(config: EngineConfig, world: World) -> DistributedRing | None:
    """What hidden states go round by; None where ranks are no pipeline. All ranks call it at the same time."""
    return DistributedRing(world) if config.model.pipeline_parallel > 1 else None


def captures(config: EngineConfig) -> bool:
    """Whether steps are captured in graphs.

    Those of a pipeline are not, as each has two halves, nor those of engines that share experts: how many rows meet in
    a layer differs from step to step.
    """
    return config.executor.cuda_graphs and config.model.pipeline_parallel == 1 and config.model.peers is None


def run_follower(config: EngineConfig, rank: int, port: int) -> None:
    """Be rank `rank` of the engine that waits at `port` of this machine, to its end."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # Sent to a whole group they are for the leader, which drains first and then ends this rank.
        signal.signal(each, signal.SIG_IGN)
    device = resolve_device(config.executor.device)
    if device.type == "cuda":
        # By which `transformers` takes a device: without it the first, on every rank.
        os.environ["LOCAL_RANK"] = str(rank)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    use_threads(config)
    world = World.join(rank, config.model.ranks, port, device)
    try:
        runner = _following(config, device, world)
        staging = Staging(device)
        follow(runner, world, partial(_pinned, staging))
    except StartupError as error:
        # Said by the leader, which waits for this rank.
        world.fail(str(error))
        raise SystemExit(error.exit_code) from None
    except RuntimeError as error:
        # The leader is gone, and has told its clients why.
        logger.error("rank %d ends: %s", rank, str(error).partition("\n")[0])
    finally:
        world.leave()


def _pinned(staging: Staging, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where the device copies from: ids as a step stages them, matrices of adapters in memory of their own."""
    if tensor.dtype == torch.int64:
        return staging.pinned([tensor.numpy()])
    return tensor.pin_memory() if staging.pins else tensor.clone()


def _following(config: EngineConfig, device: torch.device, world: World) -> StepRunner:
    """What `core.engine.build` makes on rank 0, without what plans and answers: each step there has its own here."""
    ring = ring_of(config, world)
    model = load_model(config.model, device, keeps_modules=True, ring=ring)
    streams = DeviceStreams(device)
    executor = config.executor
    attention = build_attention(executor.attention_backend, device, config.model.deterministic)
    format = check_kv_format(config, model.spec, type(attention))
    prove_attention(model, attention)
    prove_codes(model, attention, format)
    method, way = config.speculation.method, way_of(device)
    source = build_source(config, model, streams, why_no_speculation(model.spec, way, method, type(attention)))
    most = 0 if source is None else config.speculation.max_drafts
    config = dataclasses.replace(config, memory=sized_by(world.receive(), config.memory))
    pools = build_pools(config, model, streams, most)
    attention = build_attention(executor.attention_backend, device, config.model.deterministic)
    model.bind(pools.kv, attention, pools.companions)
    checks = DeviceChecks(AssertMode(executor.assert_mode), device)
    following: Callable[[DeviceState], Verification] | None = None
    if source is not None:
        following = partial(FollowingGrid, world, most=most) if way.is_grid else partial(FollowingSpeculator, world)
    runner = StepRunner(
        DeviceState(
            pool=pools.requests,
            kv_pool=pools.kv,
            future_map=FutureMap(pools.requests, streams, checks, ()),
            checks=checks,
            streams=streams,
            staging=Staging(device),
            model=model,
            sampler=build_sampler(model.spec.vocab_size, device),
            host=None if pools.host is None else build_arena(pools, streams),
            companions=pools.companions,
            attention=attention,
            graph_sizes=graph_sizes(config.memory.max_running_requests) if captures(config) else (),
            graph_tokens=chunk_tokens(config.scheduler.prompt_tokens) if captures(config) else (),
            share=world.share if ring is None else None,
            alone=False,
            sampling=FollowingSampling(),
            verification=following,
        )
    )
    if following is not None:
        # As rank 0 does, which has use for the figures.
        time_steps(runner.state, pools.memory.draft_room)
    return runner
