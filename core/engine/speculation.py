"""What speculation is made of, and which engines cannot have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from core.config import EngineConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import Pools
from core.engine.draft_model import draft_model_source
from core.engine.eagle import eagle_source
from core.engine.mtp import mtp_source
from core.errors import StartupError
from core.memory.draft_pool import DraftLayers
from core.models.base import Model, ModelSpec
from core.relay.payload import Column
from core.scheduler.draft_depth import Depth
from core.speculation.drafter import Drafter, draft_columns
from core.speculation.suffix_drafter import SuffixDrafter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafter` guesses tokens, up to `most` behind each; `depth` says which of them a step verifies."""

    drafter: Drafter
    most: int
    depth: Depth | None = None
    """None until the model was timed: then what promises most."""

    def __post_init__(self) -> None:
        assert self.most >= 1, self.most

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the FutureMap that it needs."""
        return (*draft_columns(self.most), *self.drafter.columns)


class Source(Protocol):
    """What a drafter is made from, before the pools are sized."""

    @property
    def keeps(self) -> DraftLayers | None:
        """What it keeps of each token in the pages; None for nothing."""
        ...

    def drafter(self, pools: Pools, streams: DeviceStreams) -> Drafter:
        """The drafter, bound to `pools.drafts`."""
        ...


SourceOf = Callable[[EngineConfig, Model, DeviceStreams], Source]
"""(configuration, the model that is drafted for, streams) -> source. Raises StartupError or ModelLoadError."""


@dataclass(frozen=True, slots=True)
class Suffixes:
    """A `Source` of drafts from what was said before."""

    config: SpeculationConfig
    keeps: DraftLayers | None = None

    def drafter(self, pools: Pools, streams: DeviceStreams) -> Drafter:
        """A new index."""
        return SuffixDrafter(self.config.index_bytes, self.config.max_drafts)


def _suffixes(config: EngineConfig, model: Model, streams: DeviceStreams) -> Source:
    return Suffixes(config.speculation)


SOURCES: dict[str, SourceOf] = {
    "ngram": _suffixes,
    "auto": _suffixes,
    "draft": draft_model_source,
    "eagle": eagle_source,
    "mtp": mtp_source,
}
"""By the part of `method` before its colon, if it has one."""


def build_source(config: EngineConfig, model: Model, streams: DeviceStreams, reason: str | None) -> Source | None:
    """What the configuration names; None where it is off, or `auto` and not possible for `reason`. Loads what it needs.

    Raises StartupError where it is asked for by name and not possible.
    """
    method = config.speculation.method
    if method == "off":
        return None
    if reason is None:
        return SOURCES[method.partition(":")[0]](config, model, streams)
    if method != "auto":
        raise StartupError(f"speculative={method} is not possible: {reason}")
    logger.info("no drafts are made: %s", reason)
    return None


def build_speculation(
    config: EngineConfig, source: Source, pools: Pools, streams: DeviceStreams, spec: ModelSpec
) -> Speculation:
    """The drafter of `source`. `spec`: of the model that is drafted for.

    Raises StartupError where that does not give the hidden states that are needed.
    """
    speculation = Speculation(source.drafter(pools, streams), config.speculation.max_drafts)
    reason = why_no_states(spec, speculation.drafter)
    if reason is not None:
        raise StartupError(f"speculative={config.speculation.method} is not possible: {reason}")
    return speculation


def why_no_states(spec: ModelSpec, drafter: Drafter) -> str | None:
    """Why the model cannot give the hidden states that `drafter` needs, as the end of a sentence; None if it can."""
    needs = drafter.needs_hidden
    if (needs.final and not spec.hidden_size) or max(needs.layers, default=0) > spec.state_of_layers:
        return f"{spec.architecture} does not give the hidden states that drafts are made from"
    return None


def why_no_speculation(spec: ModelSpec, device: torch.device) -> str | None:
    """Why an engine cannot verify drafts, as the end of a sentence; None if it can."""
    if device.type != "cpu":
        return f"drafts are verified on the CPU, and the model is on {device.type}"
    if spec.encoder is not None:
        return "encoder-decoders are not speculated with"
    return None
