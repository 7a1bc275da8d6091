"""What goes wrong between a client and the engine, beside `core.errors`; each has a status in `service.rpc.status`."""

from __future__ import annotations

from core.errors import SlipstreamError


class NotReady(SlipstreamError):
    """The server listens but its model is still being loaded."""

    reason = "STARTING"


class EngineSilent(SlipstreamError):
    """The engine's process says nothing to this front end, and may do so again; worth trying after `retry_after` s."""

    reason = "ENGINE_SILENT"
    retry_after = 1.0


class UnknownService(SlipstreamError):
    """A health check for a service that this server does not have."""

    reason = "UNKNOWN_SERVICE"


class RequestIncomplete(SlipstreamError):
    """The message of a call was not there in time; what had come of it is let go."""

    reason = "REQUEST_INCOMPLETE"


class Unauthenticated(SlipstreamError):
    """No token, or one that is not listed; which of these is not told."""

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
    """The server was started without a window in which streams are kept."""

    reason = "RESUME_OFF"


class StreamNotFound(SlipstreamError):
    """No stream of this id is kept for this caller, nor was one lately; other callers' are not there either."""

    reason = "STREAM_NOT_FOUND"


class StreamExpired(StreamNotFound):
    """There was one, and no client came back for it in time."""

    reason = "STREAM_EXPIRED"


class StreamEvicted(StreamNotFound):
    """There was one, and it gave way to others."""

    reason = "STREAM_EVICTED"


class PositionTooOld(SlipstreamError):
    """What follows the given place was given up to make room."""

    reason = "POSITION_TOO_OLD"


class PositionAhead(SlipstreamError):
    """Nothing was told up to the given place, so the caller cannot have it."""

    reason = "POSITION_AHEAD"


class StreamTakenOver(SlipstreamError):
    """Another call reads this stream now."""

    reason = "STREAM_TAKEN_OVER"
