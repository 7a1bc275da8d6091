"""Errors between a client and the engine, beside those of `core.errors`; each has a status in `service.rpc.status`."""

from __future__ import annotations

from core.errors import SlipstreamError


class NotReady(SlipstreamError):
    """The server listens but has no engine that serves: its model is being loaded, or lost engines start again."""

    reason = "STARTING"


class EngineSilent(SlipstreamError):
    """The engine's process sends nothing to this front end now. A client may try again after `retry_after` seconds."""

    reason = "ENGINE_SILENT"
    retry_after = 1.0


class UnknownService(SlipstreamError):
    """A health check for a service that this server does not have."""

    reason = "UNKNOWN_SERVICE"


class RequestIncomplete(SlipstreamError):
    """The message of a call was not there in time; the part that had arrived is dropped."""

    reason = "REQUEST_INCOMPLETE"


class Unauthenticated(SlipstreamError):
    """The call has no token, or one that is not listed; the client is not told which."""

    reason = "UNAUTHENTICATED"


class TokenRevoked(Unauthenticated):
    """The token of a live call was taken off the list."""

    reason = "TOKEN_REVOKED"


class NotPermitted(SlipstreamError):
    """The caller is known, and may not do this."""

    reason = "NOT_PERMITTED"


class TenantLockedOut(SlipstreamError):
    """The tenants file gives this tenant no requests at all."""

    reason = "TENANT_LOCKED_OUT"


class TenantSequences(SlipstreamError):
    """One request has more sequences than its tenant may have at once."""

    reason = "TENANT_SEQUENCES"


class ResumeOff(SlipstreamError):
    """The server was started without a time for which streams are kept."""

    reason = "RESUME_OFF"


class StreamNotFound(SlipstreamError):
    """No stream of this id is kept for this caller, nor was one lately. Streams of other callers are never found."""

    reason = "STREAM_NOT_FOUND"


class StreamExpired(StreamNotFound):
    """There was a stream of this id, and no client attached to it in time."""

    reason = "STREAM_EXPIRED"


class StreamEvicted(StreamNotFound):
    """There was a stream of this id, and it was dropped to make room for others."""

    reason = "STREAM_EVICTED"


class StreamReplaced(StreamNotFound):
    """The stream of this incarnation is gone, and a newer one has its id; or none was named, and the id had several."""

    reason = "STREAM_REPLACED"


class PositionTooOld(SlipstreamError):
    """Events after the given position were dropped to make room."""

    reason = "POSITION_TOO_OLD"


class PositionAhead(SlipstreamError):
    """The stream has not reached the given position yet, so the caller cannot have received so much."""

    reason = "POSITION_AHEAD"


class StreamTakenOver(SlipstreamError):
    """Another call reads this stream now."""

    reason = "STREAM_TAKEN_OVER"
