"""The client of a server: `from slipstream import SlipstreamClient`, or `SyncSlipstreamClient` without asyncio.

with SyncSlipstreamClient("127.0.0.1:50051") as client:
    for event in client.generate("Once upon a time", max_tokens=32): ...
"""

from pkgutil import extend_path

from service.access.tls_credentials import ClientTls
from service.client import (
    FLEET_CONFIG,
    SERVICE_CONFIG,
    AdapterClient,
    Call,
    CallFailed,
    Chunk,
    Classification,
    Completion,
    ControlClient,
    DocumentScore,
    End,
    LabelScore,
    Part,
    Prompt,
    PromptChunk,
    Received,
    SamplingOptions,
    SlipstreamClient,
    Sound,
    SyncControlClient,
    SyncSlipstreamClient,
    Vector,
    answer_turn,
)

# Code that a user generates from our protos has the package slipstream.v1, and may lie anywhere on the path.
__path__ = extend_path(__path__, __name__)

__all__ = [
    "SlipstreamClient",
    "SyncSlipstreamClient",
    "AdapterClient",
    "ControlClient",
    "SyncControlClient",
    "Chunk",
    "End",
    "PromptChunk",
    "Completion",
    "Vector",
    "Classification",
    "LabelScore",
    "DocumentScore",
    "Prompt",
    "SamplingOptions",
    "Sound",
    "Received",
    "Part",
    "Call",
    "answer_turn",
    "CallFailed",
    "ClientTls",
    "SERVICE_CONFIG",
    "FLEET_CONFIG",
]
