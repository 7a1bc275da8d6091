"""What all ranks of an engine go by: settings that each has by itself, and sizes that rank 0 tells the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from core.config import EngineConfig, MemoryConfig
from core.distributed.meeting import LEADER
from core.distributed.ring import DistributedRing
from core.distributed.world import World
from core.engine.build_pools import Pools
from core.errors import StartupError
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool
from core.models.identity import checkpoint_identity

OWN: Final = frozenset({"model", "served_model_name", "device", "cpu_threads", "adapter", "lora_dir"})
"""Settings of a machine's own: where its files are, and what it computes with."""
PACKAGES: Final = ("slipstream", "torch", "transformers")
SETTINGS: Final = "settings"
"""The word that each rank leaves for the others."""
_SIZE: Final = 8
"""Bytes of a size, as it is told."""


def sizes_of(pools: Pools) -> bytes:
    """How many tokens the pools of rank 0 hold; those of others hold as many, whatever memory they find."""
    window = pools.companions.get(WINDOW)
    held = window.kv.num_pages if isinstance(window, SlidingWindowPool) else 0
    sizes = (pages * pools.memory.page_size for pages in (pools.memory.allocator.num_pages, held))
    return b"".join(tokens.to_bytes(_SIZE, "little") for tokens in sizes)


def sized_by(told: memoryview, memory: MemoryConfig) -> MemoryConfig:
    """`memory` with the sizes of pools that rank 0 has `told`: `sizes_of`."""
    total, window = (int.from_bytes(told[at : at + _SIZE], "little") for at in (0, _SIZE))
    return dataclasses.replace(memory, max_total_tokens=total, max_window_tokens=window or None)


def ring_of(config: EngineConfig, world: World) -> DistributedRing | None:
    """What hidden states go round by; None where ranks are no pipeline. All ranks call it at the same time."""
    return DistributedRing(world) if config.model.pipeline_parallel > 1 else None


def captures(config: EngineConfig) -> bool:
    """Whether steps are captured in graphs.

    Those of a pipeline are not, as each has two halves, nor those of engines that share experts: how many rows meet in
    a layer differs from step to step.
    """
    return config.executor.cuda_graphs and config.model.pipeline_parallel == 1 and config.model.peers is None


def check_alike(config: EngineConfig, device: torch.device, world: World) -> None:
    """Raises StartupError if a rank of another machine has other settings, packages or weights; all ranks call it.

    Each compares itself with rank 0, and rank 0 with all: so every machine's log says what differs.
    """
    mine = dict(_facts(config, device))
    world.say(SETTINGS, json.dumps(mine))
    for rank in range(1, world.size) if world.rank == LEADER else (LEADER,):
        theirs = json.loads(world.said(rank, SETTINGS))
        for name, value in mine.items():
            if theirs.get(name) != value:
                here, there = f"rank {world.rank}", world.called(rank)
                told = f"{name} {theirs.get(name)} at {there}, and {value} at {here}"
                raise StartupError(f"ranks of one engine need the same settings, packages and weights: {told}")


def _facts(config: EngineConfig, device: torch.device) -> Iterator[tuple[str, str]]:
    """By name, as an operator knows it."""
    yield from ((name, version(name)) for name in PACKAGES)
    yield "device", device.type
    yield "adapter", ", ".join(name for name, _ in config.lora.adapters) or "none"
    parts = (config.model, config.memory, config.scheduler, config.executor, config.lora, config.speculation)
    for part in parts:
        for each in dataclasses.fields(part):
            name = each.metadata.get("flag") or each.name
            if "help" in each.metadata and name not in OWN:
                yield name, str(getattr(part, each.name))
    yield "checkpoint", checkpoint_identity(Path(config.model.path))
