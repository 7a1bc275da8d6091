"""A failed call as clients see it: its status code, the server's reason, and the details in its trailers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc.aio
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

from service.rpc.status import DETAILS_TRAILER, TOKENS_EMITTED_TRAILER


class CallFailed(Exception):
    """A call ended with a status other than OK.

    `reason` is the server's stable name of the error. `fields` are the bad fields of the request, each with its
    description. `retry_after` is the seconds after which a retry may succeed; None without a hint. `tokens_emitted`
    is the number of tokens that the server has written to the stream.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.reason = ""
        self.fields: dict[str, str] = {}
        self.retry_after: float | None = None
        self.tokens_emitted = 0
        self._read(dict(error.trailing_metadata() or ()))
        super().__init__(f"{self.code.name}: {self.message}")

    def _read(self, trailers: Mapping[str, Any]) -> None:
        self.tokens_emitted = int(trailers.get(TOKENS_EMITTED_TRAILER, 0))
        for packed in Status.FromString(trailers.get(DETAILS_TRAILER, b"")).details:
            info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
            if packed.Unpack(info):
                self.reason = info.reason
            elif packed.Unpack(bad):
                self.fields = {each.field: each.description for each in bad.field_violations}
            elif packed.Unpack(retry):
                self.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
