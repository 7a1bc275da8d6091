"""The ceiling: the least that grpc.aio can do for the same messages. No engine, no interceptors, no bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from service.pb.slipstream.v1 import inference_pb2 as pb

RAW_METHOD = "/slipstream.bench.Raw/Generate"
_SERVICE, _NAME = RAW_METHOD[1:].split("/")
REQUEST_ID = "0123456789abcdef0123456789abcdef"


async def _generate(request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateResponse]:
    for position in range(request.sampling_params.max_tokens):
        delta = pb.Delta(position=position, token_ids=(200 + position % 200,), text=" token")
        yield pb.GenerateResponse(request_id=REQUEST_ID, delta=delta)


class RawServer:
    """A server of `RAW_METHOD` on a free loopback port: each token is a message of its own, as fast as they go."""

    def __init__(self) -> None:
        self._grpc = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(
            _generate,
            request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_NAME: handler}),))
        self.port = self._grpc.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        """Begin to serve."""
        await self._grpc.start()

    async def close(self) -> None:
        """End at once."""
        await self._grpc.stop(None)
