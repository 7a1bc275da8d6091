"""Tensor and pipeline parallelism: starts the other ranks of an engine, and is what each of them does.

Weights, keys and values of each layer are shared out among the ranks by `transformers`, or each rank has some of the
layers (`core/models/stages`). Rank 0 is the engine; the others load their shards, prove them by the same steps at the
same time, and then follow (`core/distributed`).
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Final, cast

import torch

from core.config import EngineConfig
from core.device.streams import resolve_device
from core.distributed.drafts import LeadingGrid, LeadingSpeculator
from core.distributed.follower import STOP
from core.distributed.leader import LeadingRunner
from core.distributed.meeting import LEADER, Meeting
from core.distributed.pipeline_leader import PipelineLeader
from core.distributed.pulse import SILENT_SECONDS
from core.distributed.world import World, is_loss
from core.engine.build_pools import Pools
from core.engine.determinism import settled
from core.engine.disagg import Disagg, with_host_memory
from core.engine.disk_cache import DiskCache
from core.engine.nodes import meeting_of
from core.engine.rank_follower import be_rank, be_started, end_now
from core.engine.rank_settings import check_alike, sizes_of
from core.engine.speculation import GUESSERS, Speculation
from core.errors import ConfigError, StartupError
from core.executor.device_state import DeviceState
from core.executor.interface import Executor
from core.executor.step import StepRunner
from core.executor.verification import Verification
from core.models.loader import check_parts
from core.speculation.drafter import Drafter
from core.speculation.guesses import Guesser

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 20.0
SEEN_SECONDS: Final = 0.5
"""In which a process that has ended is seen to have: its connections close a little before."""
TELL_SECONDS: Final = 2.0
"""In which a rank that has failed has said why."""

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
    ("disk_cache", lambda config: config.memory.disk_cache is not None),
)
"""Settings that engines of several ranks cannot have yet, and when a configuration has them."""


class RankLost(StartupError):
    """Another process of this engine is gone: it cannot start, or no step can be finished any more."""

    # As of an engine that has failed: another start may go well.
    exit_code = 1


class Ranks:
    """The other ranks of this engine, as its rank 0 knows them."""

    def __init__(
        self, world: World, processes: list[BaseProcess], *, pipelined: bool = False, elsewhere: Sequence[int] = ()
    ) -> None:
        """`processes`: those that were started here. `elsewhere`: the ranks of other machines.

        `pipelined`: each has layers of its own.
        """
        self.world = world
        self._processes = processes
        self._pipelined = pipelined
        self._elsewhere = elsewhere
        self._looks: Callable[[], None] = lambda: None
        """To be called by whatever looks from now on whether the others live."""

    def beat(self) -> None:
        """Give signs of life, and end this process if another machine gives none, until `check` is asked.

        Weights are loaded and proved by all ranks together, in a thread that waits for each of them without end.
        """
        self._looks = self.world.beat().end_when_silent(end_now)

    def sized(self, pools: Pools) -> None:
        """Tell all how many tokens the pools of this rank hold."""
        self.world.send(sizes_of(pools))

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
        # Of another machine's process that has ended nothing is known here but where it was.
        named = self.world.named(str(cause))
        return cause if named is None else RankLost(f"{named} is gone")

    def check(self) -> None:
        """Raises RankLost if one of them has ended before its time, or is silent. To be asked each second."""
        self._looks()
        _check(self._processes)
        if self.world.pulse is not None and (lost := self.world.pulse.silent(time.monotonic())) is not None:
            raise RankLost(f"{lost} has given no sign of life for {SILENT_SECONDS:.0f} s")

    def why(self, error: StartupError) -> StartupError:
        """What has kept this engine from starting: `error` of this rank, or the one of another that led to it."""
        # A rank that has failed has told so before its connection closes, which is what this one notices.
        if not is_loss(error) or (told := self.world.failure(TELL_SECONDS)) is None:
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
            if (processes or self._elsewhere) and all(process.is_alive() for process in processes):
                self.world.send(STOP)
                self.world.wait_for_ended(self._elsewhere, STOP_SECONDS)
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


def stop_all(executor: Executor, ranks: Ranks | None, disagg: Disagg, disk: DiskCache, *, dead: bool) -> None:
    """Run what was submitted to `executor`, and end what ran it, in other processes too. Blocks for as long.

    And what sends keys to other engines, or gets theirs, and what writes them to files.

    `dead`: wait for nothing. The executor's thread may hang for ever then; it is a daemon and ends with the process.
    """
    disagg.close()
    if not dead:
        executor.stop()
    disk.close()
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
    """Start the other ranks of this machine, and meet all; None where the engine has one.

    Raises ConfigError for a setting that cannot be, StartupError where a rank does not come, or has other settings,
    RankLost where it ends.
    """
    size = config.model.ranks
    if size == 1:
        return None
    refuse(config, config.model.shared_by)
    meeting = meeting_of(config, device, leads=True)
    processes = start_ranks(config, meeting)
    try:
        world = World.join(LEADER, size, meeting, device, partial(_check, processes))
        elsewhere = range(config.nodes.ranks_here(size).stop, size)
        ranks = Ranks(world, processes, pipelined=config.model.pipeline_parallel > 1, elsewhere=elsewhere)
        if elsewhere:
            try:
                check_alike(config, device, world)
            except BaseException:
                world.leave()
                raise
            ranks.beat()
        return ranks
    except BaseException:
        _kill(processes)
        raise


def start_ranks(config: EngineConfig, meeting: Meeting) -> list[BaseProcess]:
    """Start all ranks of this machine but the first one, which this process is."""
    spawning = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    for rank in config.nodes.ranks_here(config.model.ranks)[1:]:
        name, told = f"slipstream-rank-{rank}", (config, rank, replace(meeting, listener=None))
        processes.append(spawning.Process(target=be_started, args=told, name=name, daemon=True))
        processes[-1].start()
    # Before what multiprocessing does then: it asks, which followers do not hear, and waits for them without end.
    atexit.register(_kill, processes)
    return processes


def follow_leader(config: EngineConfig, joined: Callable[[], None]) -> bool:
    """Be the ranks of a machine that is not the first, to their end: whether rank 0 has said that it is.

    `joined` is called once all ranks have met. Raises what `open_ranks` raises.
    """
    check_parts(config.model)
    refuse(config, config.model.shared_by)
    device = resolve_device(config.executor.device)
    config = with_host_memory(settled(config, device))
    meeting = meeting_of(config, device, leads=False)
    processes = start_ranks(config, meeting)
    try:
        first = config.nodes.ranks_here(config.model.ranks)[0]
        return be_rank(config, first, meeting, joined, partial(_check, processes))
    finally:
        for process in processes:
            process.join(SEEN_SECONDS)
        _kill(processes)
