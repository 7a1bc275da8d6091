"""Registers the dialects on a server, if the package with their messages is installed.

Only `service.gateway` imports that package, so a server without it lacks nothing else.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from core.errors import StartupError
from service.calls.open_calls import OpenCalls
from service.config.server_config import ServerConfig

log = logging.getLogger(__name__)

PACKAGE = "smg_grpc_proto"
DIALECTS = {
    "service.gateway.sglang": "SglangDialect",
    "service.gateway.vllm": "VllmDialect",
}
"""Module -> codec in it. Gateways that find several prefer SGLang's."""


class Gateway:
    """The dialects of one server."""

    def __init__(self, calls: OpenCalls, version: str) -> None:
        from service.gateway.servicer import GatewayServicer
        from service.gateway.worker import Worker

        self._worker = Worker(calls, version)
        found = [getattr(importlib.import_module(module), name)() for module, name in DIALECTS.items()]
        self.servicers = [GatewayServicer(each, calls, self._worker) for each in found]

    @property
    def service_names(self) -> list[str]:
        """Full names of the services, for reflection."""
        return [each.dialect.service.full_name for each in self.servicers]

    def register(self, server: grpc.aio.Server) -> None:
        """Add every method that is served; grpc answers UNIMPLEMENTED for the others."""
        server.add_generic_rpc_handlers(tuple(handlers(each.dialect.service, each) for each in self.servicers))

    def tell(self) -> None:
        """Log which dialects there are, once they can be used: a start that fails has one line to say."""
        log.info("gateway dialects: %s", ", ".join(each.dialect.name for each in self.servicers))

    def close(self) -> None:
        """End all subscriptions to prefix events."""
        self._worker.subscriptions.close()


def gateway_of(config: ServerConfig, calls: OpenCalls, version: str) -> Gateway | None:
    """The dialects; None if they are switched off or the package is not installed.

    Raises StartupError if the package is there and cannot be used.
    """
    if not config.gateway or find_spec(PACKAGE) is None:
        return None
    try:
        return Gateway(calls, version)
    except (ImportError, RuntimeError, TypeError) as error:
        # Generated code checks the version of protobuf when it is imported.
        reason = str(error).strip().splitlines()[0]
        raise StartupError(f"{PACKAGE} cannot be used: {reason} (--no-gateway leaves it out)") from None


_BUILDERS: dict[bool, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    False: grpc.unary_unary_rpc_method_handler,
    True: grpc.unary_stream_rpc_method_handler,
}
"""Handler makers, by whether the answers stream. No dialect has a method that takes a stream."""


def handlers(service: Any, servicer: object) -> grpc.GenericRpcHandler:
    """Handlers for the methods of the descriptor `service` that `servicer` has, by name."""
    found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name, None)
        if behaviour is None:
            continue
        found[method.name] = _BUILDERS[method.server_streaming](
            behaviour,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, found)
