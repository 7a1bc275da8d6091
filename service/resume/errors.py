"""What can go wrong when a client comes back for its stream. Each message says what to do instead."""

from __future__ import annotations

from core.errors import SlipstreamError


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
