"""What speculation is made of, and which engines cannot have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from core.attention.base import AttentionBackend
from core.config import EngineConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import Pools
from core.engine.draft_model import draft_model_source
from core.engine.eagle import eagle_source
from core.engine.mtp import mtp_source
from core.errors import StartupError
from core.executor.device_state import DeviceState
from core.executor.grid_speculator import GridSpeculator
from core.executor.speculator import Speculator
from core.executor.verification import Verification
from core.memory.draft_pool import DraftLayers
from core.models.base import Model, ModelSpec
from core.native.host import HostCode
from core.relay.payload import Column
from core.scheduler.draft_depth import Depth
from core.speculation.compiled import UpgradingDrafter
from core.speculation.drafter import Drafter, draft_columns
from core.speculation.guesses import Guesser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to verify drafts."""

    of: Callable[[int, Any, DeviceState], Verification]
    """(most drafts for a row, drafter, state) -> what steps use."""
    columns: Callable[[int, Any], tuple[Column, ...]]
    """(most drafts for a row, drafter) -> the columns of the FutureMap that it needs."""
    is_grid: bool
    """Whether lengths stay on the device, which model, attention and drafter must be made for."""


RAGGED: Final = Way(
    lambda most, drafter, state: Speculator(drafter, state),
    lambda most, drafter: (*draft_columns(most), *drafter.columns),
    is_grid=False,
)
GRID: Final = Way(
    lambda most, drafter, state: GridSpeculator(drafter, state, most), lambda most, drafter: (), is_grid=True
)
WAYS: Final = {"cpu": RAGGED}
"""By the type of a device; those that are not named compute grids."""
GUESSERS: Final = ("ngram", "auto")
"""Sources whose drafters can guess from text that they hear late."""


def way_of(device: torch.device) -> Way:
    """How drafts are verified on `device`."""
    return WAYS.get(device.type, GRID)


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafter` guesses tokens, up to `most` behind each; `depth` says which of them a step verifies."""

    drafter: Drafter | Guesser
    """What the way needs: a `Guesser` for grids."""
    most: int
    depth: Depth | None = None
    """None until the model was timed: then what promises most."""
    way: Way = RAGGED

    def __post_init__(self) -> None:
        assert self.most >= 1, self.most

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the FutureMap that it needs."""
        return self.way.columns(self.most, self.drafter)

    def verification(self, state: DeviceState) -> Verification:
        """What the steps of `state` use."""
        return self.way.of(self.most, self.drafter, state)


class Source(Protocol):
    """What a drafter is made from, before the pools are sized."""

    @property
    def keeps(self) -> DraftLayers | None:
        """What it keeps of each token in the pages; None for nothing."""
        ...

    def drafter(self, pools: Pools, streams: DeviceStreams, code: HostCode) -> Drafter:
        """The drafter, bound to `pools.drafts`. `code`: what compiled code takes over once there is any, it may do."""
        ...


SourceOf = Callable[[EngineConfig, Model, DeviceStreams], Source]
"""(configuration, the model that is drafted for, streams) -> source. Raises StartupError or ModelLoadError."""


@dataclass(frozen=True, slots=True)
class Suffixes:
    """A `Source` of drafts from what was said before."""

    config: SpeculationConfig
    keeps: DraftLayers | None = None

    def drafter(self, pools: Pools, streams: DeviceStreams, code: HostCode) -> Drafter:
        """A new index."""
        return UpgradingDrafter(code, self.config.index_bytes, self.config.max_drafts)


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
    config: EngineConfig, source: Source, pools: Pools, streams: DeviceStreams, spec: ModelSpec, code: HostCode
) -> Speculation:
    """The drafter of `source`. `spec`: of the model that is drafted for. `code`: see `Source`.

    Raises StartupError where that does not give the hidden states that are needed.
    """
    drafter, most = source.drafter(pools, streams, code), config.speculation.max_drafts
    reason = why_no_states(spec, drafter)
    if reason is not None:
        raise StartupError(f"speculative={config.speculation.method} is not possible: {reason}")
    return Speculation(drafter, most, way=way_of(streams.device))


def why_no_states(spec: ModelSpec, drafter: Drafter) -> str | None:
    """Why the model cannot give the hidden states that `drafter` needs, as the end of a sentence; None if it can."""
    needs = drafter.needs_hidden
    if (needs.final and not spec.hidden_size) or max(needs.layers, default=0) > spec.state_of_layers:
        return f"{spec.architecture} does not give the hidden states that drafts are made from"
    return None


def why_no_speculation(
    spec: ModelSpec, way: Way, method: str = "ngram", attention: type[AttentionBackend] = AttentionBackend
) -> str | None:
    """Why an engine cannot verify drafts, as the end of a sentence; None if it can.

    `method`: what drafts. `attention`: the backend that the engine will have.
    """
    if spec.encoder is not None:
        return "encoder-decoders are not speculated with"
    if spec.whole_prompts:
        return "an encoder puts out no tokens"
    if spec.vision is not None and spec.vision.places:
        return "images move the positions of tokens behind them, which drafts do not know"
    return _why_no_grid(spec, method, attention) if way.is_grid else None


def _why_no_grid(spec: ModelSpec, method: str, attention: type[AttentionBackend]) -> str | None:
    """Why lengths cannot stay on the device."""
    kind = method.partition(":")[0]
    if kind not in GUESSERS:
        return f"{kind} drafts on the CPU alone, where it reads what a step has sampled"
    if spec.state_layers:
        return "states behind drafts are kept on the CPU alone"
    if not spec.capturable:
        return "the model does not promise to leave host lengths alone"
    return None if attention.grid_safe else "the attention backend plans on the host"
