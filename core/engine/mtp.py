"""Makes a drafter of the head that a checkpoint brings along: `mtp`."""

from __future__ import annotations

from dataclasses import dataclass

from core.attention.registry import build_attention
from core.batch.hidden import HiddenRequest
from core.config import EngineConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import Pools
from core.errors import StartupError
from core.memory.draft_pool import DraftLayers
from core.models.base import Model, ModelSpec
from core.models.hf.mtp import MtpHead, Unavailable, load_mtp
from core.sampling.sampler import Sampler
from core.speculation.drafter import Drafter
from core.speculation.eagle_drafter import EagleDrafter


@dataclass(frozen=True, slots=True)
class MtpSource:
    """A `Source` of drafts: a head that is loaded already."""

    head: MtpHead
    spec: ModelSpec
    most: int
    attention: str
    """Name of the attention backend."""

    @property
    def keeps(self) -> DraftLayers:
        """Keys and values of the head's one layer."""
        return DraftLayers((self.head.layer,), self.spec.dtype, self.most)

    def drafter(self, pools: Pools, streams: DeviceStreams) -> Drafter:
        """The drafter: a draft head that reads last hidden states."""
        assert pools.drafts is not None, "the pools were built with what this keeps"
        self.head.bind(pools.drafts.kv, build_attention(self.attention, streams.device))
        sampler = Sampler(self.spec.vocab_size, streams.device)
        reads, width = HiddenRequest(final=True), pools.requests.max_context_len
        return EagleDrafter(self.head, reads, None, pools.drafts, sampler, width)


def mtp_source(config: EngineConfig, model: Model, streams: DeviceStreams) -> MtpSource:
    """The head of `model`. Raises StartupError without one."""
    try:
        head = load_mtp(model)
    except Unavailable as reason:
        raise StartupError(f"speculative=mtp is not possible: {reason}") from reason
    return MtpSource(head, model.spec, config.speculation.max_drafts, config.executor.attention_backend)
