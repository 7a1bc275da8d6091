"""Makes an EAGLE-3 drafter: `eagle` for the bundled model, `eagle:DIR` for a head of any other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.batch.hidden import HiddenRequest
from core.config import EngineConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import Pools
from core.errors import StartupError
from core.memory.draft_pool import DraftLayers
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.models.base import Model
from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.eagle.head import Head, HeadStep
from core.models.eagle.plain_head import PlainHead
from core.models.eagle.weights import HeadWeights, Target, load_head
from core.models.native.extension import load_extension
from core.models.native.head import NativeHead
from core.native.host import HostCode
from core.native.kept_library import ExtensionUnavailable
from core.sampling.sampler import Sampler
from core.speculation.drafter import Drafter
from core.speculation.eagle_drafter import EagleDrafter
from core.speculation.head_chain import HeadChain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EagleSource:
    """A `Source` of drafts: a head that is loaded already."""

    weights: HeadWeights
    model: Model
    most: int

    @property
    def keeps(self) -> DraftLayers:
        """Keys and values of the head's one layer."""
        weights = self.weights
        layer = KVLayerSpec(0, weights.kv_heads, weights.head_dim, weights.head_dim)
        return DraftLayers((layer,), weights.fc.dtype, self.most)

    def drafter(self, pools: Pools, streams: DeviceStreams, code: HostCode) -> Drafter:
        """The drafter; its head is computed by native code as soon as the model is."""
        assert pools.drafts is not None, "the pools were built with what this keeps"
        weights, spec = self.weights, self.model.spec
        head = UpgradingHead(weights, pools.drafts.kv, lambda: bool(getattr(self.model, "native", False)))
        sampler = Sampler(spec.vocab_size, streams.device)
        width = pools.requests.max_context_len
        chain = HeadChain((head,), spec.hidden_size, weights.fc.dtype)
        return EagleDrafter(chain, HiddenRequest(weights.layers), weights.target_ids, pools.drafts, sampler, width)


class UpgradingHead:
    """A head computed by torch until `ready()`, then by native code if that can be had. Forward thread only."""

    def __init__(self, weights: HeadWeights, pool: KVPool, ready: Callable[[], bool]) -> None:
        self._made_from: tuple[HeadWeights, KVPool] | None = (weights, pool)
        self._ready = ready
        self._current: Head = PlainHead(weights, pool)

    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        if self._made_from is not None and self._ready():
            made_from, self._made_from = self._made_from, None
            try:
                self._current = NativeHead(load_extension(), *made_from, torch.get_num_threads())
            except ExtensionUnavailable as reason:
                logger.warning("the draft head is computed by torch: %s", reason)
        return self._current.run(step)


def at_any_path(config: EngineConfig) -> EngineConfig:
    """`config` with the bundled model's head named: for other weights of that model, which lie elsewhere."""
    if config.speculation.method != "eagle":
        return config
    return replace(config, speculation=replace(config.speculation, method=f"eagle:{bundled_head_dir()}"))


def eagle_source(config: EngineConfig, model: Model, streams: DeviceStreams) -> EagleSource:
    """The head that the configuration names.

    Raises StartupError without one, and where the model gives no states to read; ModelLoadError where it does not fit.
    """
    name, _, folder = config.speculation.method.partition(":")
    if not folder and Path(config.model.path).resolve() != bundled_model_dir():
        raise StartupError(f"speculative={name} has a head for the bundled model only; name another: {name}:DIR")
    spec, most = model.spec, config.speculation.max_drafts
    if not spec.state_of_layers:
        reason = f"{spec.architecture} does not give the states of its layers"
        raise StartupError(f"speculative={config.speculation.method} is not possible: {reason}")
    longest = min(spec.context_length, config.model.context_length or spec.context_length)
    target = Target(
        path=Path(config.model.path),
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        layers=spec.state_of_layers,
        # A row of the table is a whole number of pages, and drafts may stand behind it.
        positions=longest + config.memory.page_size + most,
        dtype=spec.dtype,
    )
    return EagleSource(load_head(Path(folder) if folder else bundled_head_dir(), target), model, most)
