"""Ranks of one engine on several machines: how many there are, which of them this is, and where all meet."""

from __future__ import annotations

from dataclasses import dataclass

from core.disagg_config import MAX_PORT, is_loopback
from core.errors import ConfigError
from core.setting import check_settings, setting

GROUP = "Several machines"


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """The machines of one engine. `slipstream serve` is started on each; the first one serves.

    The names are those of torchrun, which also sets all of it by its environment (`service.config.torchrun`).
    """

    nnodes: int = setting(
        1,
        GROUP,
        "Machines with equally many ranks of tensor_parallel or pipeline_parallel each. Start the server on each, with "
        "the same settings but for node_rank.",
        low=1,
    )
    node_rank: int = setting(0, GROUP, "Which of them this is; 0 serves, the others follow it.", low=0)
    master_addr: str = setting(
        "127.0.0.1",
        GROUP,
        "Name or address of machine 0, where it listens and the others reach it; not loopback: needs a secret.",
        metavar="HOST",
    )
    master_port: int = setting(29500, GROUP, "Port of machine 0 at which ranks meet.", low=1)
    rank_secret_file: str | None = setting(
        None, GROUP, "File with a secret of 16 bytes or more that all machines share.", metavar="FILE"
    )
    join_timeout: float = setting(600.0, GROUP, "Seconds that machines wait for each other at the start.", low=1)

    first_device: int = 0
    """Number of the device of the first rank here: torchrun starts each rank as a process of its own."""
    hosted: bool = False
    """Whether another process, torchrun's agent, has the store at `master_port`."""
    attempt: int = 0
    """How often that process has started these ranks before, which left words in its store."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.master_port > MAX_PORT:
            raise ConfigError(f"master_port must be at most {MAX_PORT}")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be less than nnodes, which is {self.nnodes}; got {self.node_rank}")
        if self.nnodes > 1 and self.rank_secret_file is None and not is_loopback(self.master_addr):
            raise ConfigError("master_addr is not loopback: rank_secret_file is needed")

    def ranks_here(self, size: int) -> range:
        """Which of `size` ranks are on this machine. Raises ConfigError where machines cannot have equally many."""
        if self.nnodes > 1 and size % self.nnodes:
            raise ConfigError(f"nnodes {self.nnodes} needs a multiple of as many ranks: there are {size}")
        here = size // self.nnodes
        return range(self.node_rank * here, (self.node_rank + 1) * here)

    def device_of(self, rank: int, size: int) -> int:
        """Number of the device of `rank`, which is on this machine, among this machine's."""
        return self.first_device + rank - self.ranks_here(size).start
