"""Engines that share experts: what one of them knows of the others. The server starts them, and ends them together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import torch

from core.config import EngineConfig
from core.distributed.bells import Bells
from core.distributed.exchange import DistributedExchange
from core.distributed.joint_runner import JointRunner
from core.distributed.meeting import Meeting
from core.distributed.world import World, is_loss
from core.engine.build_pools import Pools
from core.engine.ranks import Ranks, Refusals, open_ranks, refuse
from core.errors import StartupError
from core.executor.device_state import DeviceState
from core.executor.joint_thread import JointThread
from core.executor.step import StepRunner
from core.models.experts.joint_model import JointModel
from core.models.loader import check_parts

REFUSED: Final[Refusals] = (
    ("tensor_parallel", lambda config: config.model.tensor_parallel > 1),
    ("pipeline_parallel", lambda config: config.model.pipeline_parallel > 1),
    ("overlap off", lambda config: not config.executor.overlap),
)
"""Beside what engines of several ranks cannot have: settings that engines which share experts cannot have yet."""


class Peers(Ranks):
    """The other engines, each with its own pools, requests and tokens: they hear only of steps, and of rows in them."""

    def __init__(self, world: World) -> None:
        super().__init__(world, [])
        self.exchange = DistributedExchange(world)
        self.bells = Bells(world)

    share = None

    def why(self, error: StartupError) -> StartupError:
        """What has kept these engines from starting: `error` of this one, or that of another which led to it."""
        if not is_loss(error):
            self.world.fail(str(error))
            return error
        try:
            return super().why(error)
        except RuntimeError:  # what was told is gone with the first engine
            return error

    def sized(self, pools: Pools) -> None:
        """Nothing: each has pools of its own size."""

    def runner(self, state: DeviceState) -> JointRunner:
        """What runs the steps of this engine, and its part in those of the others."""
        assert isinstance(state.model, JointModel), "loaded with this exchange"
        return JointRunner(state, self.bells, state.model.idle)

    def executor(self, runner: StepRunner, wake: Callable[[], None]) -> JointThread:
        """What `runner`, made here, runs on."""
        assert isinstance(runner, JointRunner), "made by `runner`"
        return JointThread(runner, runner, self.bells, wake)


def open_others(config: EngineConfig, device: torch.device) -> Ranks | None:
    """Meet the other processes that the model is shared with, or start them; None where there are none.

    Raises what `open_peers` and `open_ranks` do, and ModelLoadError where they could not share the checkpoint.
    """
    check_parts(config.model)
    return open_peers(config, device) or open_ranks(config, device)


def open_peers(config: EngineConfig, device: torch.device) -> Peers | None:
    """Meet the other engines; None where this one shares no experts.

    Raises ConfigError for a setting that cannot be, StartupError where an engine does not come.
    """
    peers = config.model.peers
    if peers is None:
        return None
    refuse(config, "expert_parallel", REFUSED)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    listener = None if peers.listener is None else socket.socket(fileno=peers.listener)
    return Peers(World.join(peers.rank, peers.size, Meeting(peers.port, listener), device))
