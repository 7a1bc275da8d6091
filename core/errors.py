"""Typed errors for what can go wrong outside: bad input, full queues, dead engines, unreadable checkpoints.

Broken invariants are not here: those are programmer errors and live in `core.invariants`. Every message in this file
may reach a client verbatim, so none may carry a path, an address or a class name; startup errors are the exception,
because only the operator reads them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field of a request. `field` is the protobuf path a client can find, e.g. `sampling_params.top_p`."""

    field: str
    description: str


class SlipstreamError(Exception):
    """Base of all typed errors. `reason` is the stable UPPER_SNAKE word that clients may switch on."""

    reason = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(SlipstreamError):
    """The request can never be served as it is; `violations` names every bad field that is found at once: what only the
    tokenizer can tell comes once the rest is right."""

    reason = "INVALID_REQUEST"

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """The common case of a single violation."""
        return cls([FieldViolation(field, description)])


class DuplicateRequest(SlipstreamError):
    """A live request already has this `request_id`."""

    reason = "DUPLICATE_REQUEST_ID"


class Overloaded(SlipstreamError):
    """A bounded resource (queue, rate, pool) is full now; worth trying again after `retry_after` seconds."""

    reason = "OVERLOADED"

    def __init__(self, message: str, *, reason: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class QueueTimeout(Overloaded):
    """The request waited longer than its `queue_timeout` before its first forward step."""

    reason = "QUEUE_TIMEOUT"

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=type(self).reason)


class DeadlinePassed(SlipstreamError):
    """The client's deadline passed, in the queue or while decoding."""

    reason = "DEADLINE_EXCEEDED"


class SlowConsumer(SlipstreamError):
    """The client reads slower than its bounded queue allows; its rows and pages were taken back."""

    reason = "SLOW_CONSUMER"


class RequestFailed(SlipstreamError):
    """This request cannot go on, for instance because of non-finite logits; others in the batch are not affected."""

    reason = "REQUEST_FAILED"


class TextFailed(RequestFailed):
    """The tokenizer failed on this request's text; others in the batch are not affected."""

    reason = "TEXT_FAILED"


class RequestAborted(SlipstreamError):
    """`Abort` ended the request by its id, and it has no output in which to say so (an embedding)."""

    reason = "REQUEST_ABORTED"


class EngineDead(SlipstreamError):
    """The forward pass failed or hung, and the engine's process ends: every stream of that engine ends with this."""

    reason = "ENGINE_DEAD"


class Draining(SlipstreamError):
    """The server no longer takes new requests, or ended this one at the end of its drain."""

    reason = "DRAINING"


class Paused(SlipstreamError):
    """The engine is paused and turns requests away; it ended those it had. Another replica may take them."""

    reason = "PAUSED"


class KeysLost(SlipstreamError):
    """Keys that another engine has computed did not arrive, and nothing is computed again here."""

    reason = "KV_TRANSFER_FAILED"


class Asleep(SlipstreamError):
    """The engine has given its memory back and must be woken first."""

    reason = "ASLEEP"


class AdapterNotFound(SlipstreamError):
    """No adapter of this name is loaded: it never was, was unloaded, or was evicted for others."""

    reason = "ADAPTER_NOT_FOUND"


class AdapterExists(SlipstreamError):
    """An adapter of this name is loaded already, or being loaded."""

    reason = "ADAPTER_EXISTS"


class AdaptersOff(SlipstreamError):
    """The server was started without a directory to load adapters from."""

    reason = "ADAPTERS_OFF"


class Unsupported(SlipstreamError):
    """The call exists, but this server was started without what it needs; trying again changes nothing."""

    reason = "UNSUPPORTED"


class StartupError(SlipstreamError):
    """The process cannot start. `exit_code` is what it exits with: 2 for configuration and ports, 3 for the model."""

    reason = "STARTUP_FAILED"
    exit_code = 2


class ConfigError(StartupError):
    """A flag, an environment variable or a configuration file holds a value that cannot work."""


class ModelLoadError(StartupError):
    """The checkpoint cannot be read, or its architecture cannot be served correctly."""

    exit_code = 3
