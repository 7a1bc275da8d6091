"""The device state that steps read and write, put together once when the engine is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from core.attention.base import AttentionBackend
from core.device.checks import DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.executor.sampling_step import StepSampling
from core.executor.verification import Verification
from core.lanes import LaneRecorder
from core.memory.companion import DeviceCompanion
from core.memory.host_arena import HostArena
from core.memory.kv_pool import KVPool
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.base import LabelHead, Model
from core.native.host import HostCode
from core.relay.future_map import FutureMap
from core.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Everything that only the forward thread writes (law 2), and the tools that it writes with."""

    pool: ReqToTokenPool
    kv_pool: KVPool
    future_map: FutureMap
    checks: DeviceChecks
    streams: DeviceStreams
    staging: Staging
    model: Model
    sampler: Sampler
    head: LabelHead | None = None
    """Of a model that judges texts."""
    host: HostArena | None = None
    """Where keys and values are copied to; None where all is computed again."""
    companions: Mapping[str, DeviceCompanion] = field(default_factory=dict)
    """Companion name -> its device side, for pools beside the KV pages."""
    attention: AttentionBackend | None = None
    """The backend that the model was bound to; None if the model chose its own."""
    verification: Callable[[DeviceState], Verification] | None = None
    """Makes what verifies drafts, whose columns are in `future_map`; None where speculation is off."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes of decode steps to capture as graphs, where device and model allow that."""
    graph_tokens: tuple[int, ...] = ()
    """Numbers of prompt tokens of steps to capture beside these, where backend and model allow that too."""
    lanes: LaneRecorder = field(default_factory=LaneRecorder)
    share: Callable[[torch.Tensor], None] | None = None
    """Makes the tokens of a step what they are on rank 0; None where there is one rank."""
    alone: bool = True
    """Whether no other process takes part in forward passes."""
    sampling: StepSampling | None = None
    """Of a rank that does not sample, what stands in for it."""
    host_code: HostCode = field(default_factory=HostCode)
    """Compiled code for the host's part of a step, once there is any."""
