"""Makes a drafter of the heads that a checkpoint brings along: `mtp`."""

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
from core.models.hf.mtp import MtpHeads, Unavailable, load_mtp
from core.native.host import HostCode
from core.sampling.sampler import Sampler
from core.speculation.drafter import Drafter
from core.speculation.eagle_drafter import EagleDrafter
from core.speculation.head_chain import HeadChain


@dataclass(frozen=True, slots=True)
class MtpSource:
    """A `Source` of drafts: heads that are loaded already."""

    heads: MtpHeads
    spec: ModelSpec
    most: int
    attention: str
    """Name of the attention backend."""

    @property
    def keeps(self) -> DraftLayers:
        """Keys and values of one layer for each head."""
        return DraftLayers(self.heads.layers, self.spec.dtype, self.most)

    def drafter(self, pools: Pools, streams: DeviceStreams, code: HostCode) -> Drafter:
        """The drafter: draft heads, of which the first reads last hidden states."""
        assert pools.drafts is not None, "the pools were built with what this keeps"
        heads = self.heads.bound(pools.drafts.kv, build_attention(self.attention, streams.device))
        chain = HeadChain(heads, self.spec.hidden_size, self.spec.dtype)
        sampler = Sampler(self.spec.vocab_size, streams.device)
        reads, width = HiddenRequest(final=True), pools.requests.max_context_len
        return EagleDrafter(chain, reads, None, pools.drafts, sampler, width)


def mtp_source(config: EngineConfig, model: Model, streams: DeviceStreams) -> MtpSource:
    """The heads of `model`, as many as there may be drafts. Raises StartupError without any."""
    most = config.speculation.max_drafts
    try:
        heads = load_mtp(model, most)
    except Unavailable as reason:
        raise StartupError(f"speculative=mtp is not possible: {reason}") from reason
    return MtpSource(heads, model.spec, most, config.executor.attention_backend)
