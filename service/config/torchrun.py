"""What torchrun tells a process that it starts: which rank of how many it is, and where all meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from core.config import EngineConfig
from core.errors import ConfigError

PLACE: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that are all set where a launcher like torchrun has started a rank."""


def launched(config: EngineConfig, env: Mapping[str, str]) -> EngineConfig:
    """`config` of the rank that `env` says this process is; as it is where `env` says nothing, or flags have.

    Raises ConfigError for an environment that is not that of one rank of this engine.
    """
    if config.nodes.nnodes > 1 or not all(env.get(name) for name in PLACE):
        return config
    rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size != config.model.ranks:
        raise ConfigError(
            f"the environment is that of {size} processes (WORLD_SIZE), and the engine has {config.model.ranks} ranks: "
            "set tensor_parallel or pipeline_parallel to their number, or unset RANK"
        )
    if size == 1:
        return config
    nodes = replace(
        config.nodes,
        nnodes=size,
        node_rank=rank,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
        first_device=_number(env, "LOCAL_RANK") if env.get("LOCAL_RANK") else 0,
        # The agent of machine 0 has the store then, at that port.
        hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") if env.get("TORCHELASTIC_RESTART_COUNT") else 0,
    )
    return replace(config, nodes=nodes)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} must be a number; got {env[name]!r}") from None
