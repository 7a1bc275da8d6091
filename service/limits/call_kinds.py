"""The kind of each method of each service, by which the gate bounds calls. A method without a kind is never served.

A test walks the methods that servers register, dialects included, and compares them with the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from service.config.server_config import ServerConfig

FEW: Final = 1024
"""Calls of one kind that one caller may have open, where each is over in a moment or waits and holds little."""


class Kind(Enum):
    """What a call takes from the server."""

    HEALTH = "health"
    """A look at two flags, or a watch of them; a client needs no token for it."""
    FACTS = "facts"
    """Facts that are known without asking the device: descriptions, load, adapters, the tokenizer's files."""
    TEXT = "text"
    """A turn of the threads that turn text into ids and back."""
    STREAM = "stream"
    """Reading something that is made anyway (a kept stream, prefix events), or ending a request."""
    WORK = "work"
    """Rows of a batch: the call passes the limits of its tenant, and those that all tenants share."""

    def most_open(self, config: ServerConfig) -> int:
        """Calls of this kind that one caller may have open at once."""
        if self in (Kind.WORK, Kind.STREAM):
            # One caller alone may fill the batch and the queue; FEW more of its calls may wait in front of them.
            return config.concurrency_limit + FEW
        return FEW


def _methods(service: str, kind: Kind, names: str) -> dict[str, Kind]:
    return {f"/{service}/{name}": kind for name in names.split()}


_INFERENCE = "slipstream.v1.InferenceService"
_DIALECTS = ("sglang.grpc.scheduler.SglangScheduler", "vllm.grpc.engine.VllmEngine")

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        **_methods("grpc.health.v1.Health", Kind.HEALTH, "Check List Watch"),
        **_methods("grpc.reflection.v1alpha.ServerReflection", Kind.FACTS, "ServerReflectionInfo"),
        **_methods(_INFERENCE, Kind.WORK, "Generate Embed Classify Score"),
        **_methods(_INFERENCE, Kind.STREAM, "Attach Abort"),
        **_methods(_INFERENCE, Kind.TEXT, "Tokenize Detokenize"),
        **_methods(_INFERENCE, Kind.FACTS, "GetModelInfo GetServerInfo GetLoad"),
        **_methods("slipstream.v1.AdapterService", Kind.FACTS, "LoadAdapter UnloadAdapter ListAdapters"),
        **_methods("slipstream.v1.ControlService", Kind.FACTS, "Pause Resume UpdateWeights Sleep Wake"),
        **{
            method: kind
            for dialect in _DIALECTS
            for method, kind in {
                **_methods(dialect, Kind.WORK, "Generate Embed"),
                **_methods(dialect, Kind.STREAM, "Abort SubscribeKvEvents"),
                **_methods(
                    dialect,
                    Kind.FACTS,
                    "HealthCheck GetModelInfo GetServerInfo GetLoads GetTokenizer FlushCache",
                ),
            }.items()
        },
    }
)
"""By full method name."""
