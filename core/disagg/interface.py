"""How keys and values travel between engines: what every way to do it offers (`core.disagg.registry`).

The engine that decodes asks, and the one that has prefilled answers. An offer ends once, delivered or not. Delivered is
what the other side has said, and not what this side's system has taken: NIXL over shared memory tells DONE of a peer
that is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Facts = Mapping[str, Any]
"""What two engines must have in common so that keys of the one mean the same to the other; plain values by name."""


class TransferFailed(Exception):
    """Keys did not arrive. `reason` is one of `REASONS`; the text is for a log."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        assert reason in REASONS, reason
        self.reason = reason


REASONS = (
    "no_room",
    "peer_refused",
    "unreachable",
    "unauthenticated",
    "mismatch",
    "gone",
    "timeout",
    "lost",
    "asleep",
)
"""Host memory is full; the address is not among `transfer_peers`; nothing answers there; the secret is another one; the
engines differ; the room is not there, or no more; nothing came for too long; the connection broke; no pools now."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Keys of the first `tokens` tokens of a prompt, in `room`, for the one engine that has its `claim`."""

    room: str
    claim: str
    tokens: int
    cached_tokens: int
    """How many of the prompt's tokens were not computed for it."""
    parts: Callable[[int], Sequence[memoryview]]
    """Bytes of the tokens from a given one on. They stay as they are until the offer is over."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for: tokens [start, tokens) of the prompt of `claim`, which is in `room`.

    `engine_id`: of the engine that has it. Empty: that may still be on its way, so the asking engine waits.
    """

    room: str
    claim: str
    start: int
    tokens: int
    engine_id: str


class Giver(Protocol):
    """Gives keys away. Methods belong to the engine's loop."""

    @property
    def address(self) -> tuple[str, int]:
        """Where it is asked: what the other engine is told."""
        ...

    def expect(self, room: str) -> None:
        """Keys will be offered in `room`, or that is withdrawn: engines that ask wait."""
        ...

    def offer(self, offer: Offer, over: Callable[[bool], None]) -> None:
        """Give it to the engine that asks for it. `over(delivered)` is called once, from any thread."""
        ...

    def withdraw(self, room: str) -> None:
        """Nothing is offered there any more, if it was; an engine that waits is told. An offer is then soon over."""
        ...

    def retire(self) -> None:
        """Nothing that is offered now is given any more; every offer is soon over."""
        ...

    def close(self) -> None:
        """End it; every offer is over when this returns. Idempotent."""
        ...


class Taker(Protocol):
    """Fetches keys. Methods belong to the engine's loop."""

    async def take(self, address: tuple[str, int], wanted: Wanted, parts: Sequence[memoryview]) -> int:
        """Fill `parts`; returns how many tokens of the prompt were not computed for it. Raises TransferFailed.

        When it returns nothing writes to `parts` any more; where it raises or is cancelled, once `settle` says so.
        """
        ...

    def settle(self, parts: Sequence[memoryview], then: Callable[[], None]) -> None:
        """Behind a `take` that has failed or was cancelled: call `then` once nothing writes to its `parts` any more.

        It is called on the engine's loop: mostly at once, and not at all where `close` comes before.
        """
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...
