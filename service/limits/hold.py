"""The place and the tokens that a request holds of its tenant's limits, until the engine is done with it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar


class Hold:
    """A place in a tenant's gate, held until `release`. `weight` is the tenant's part of the machine.

    `number` is the call by which a front end and the engine's process know the place; 0 where the gate is in this
    process. `charge` is the tokens taken from the tenant's budget in advance. `used` is the tokens known to have gone
    into the request so far. `leave(used)` is called at the release and gives the rest of `charge` back. `late(tokens)`
    is called for tokens that become known after the release.
    """

    def __init__(
        self,
        leave: Callable[[int], None] | None = None,
        number: int = 0,
        *,
        charge: int = 0,
        late: Callable[[int], None] | None = None,
        weight: float = 1.0,
    ) -> None:
        self.number, self.charge, self.used, self.weight = number, charge, 0, weight
        self._leave, self._late, self._prompt = leave, late, 0

    def saw_prompt(self, tokens: int) -> None:
        """The engine has taken a prompt of `tokens` tokens. A later call corrects an earlier one."""
        before, self._prompt = self._prompt, tokens
        self.use(tokens - before)

    def use(self, tokens: int) -> None:
        """`tokens` more tokens went into the request."""
        self.used += tokens
        if self._leave is None and self._late is not None and tokens:
            self._late(tokens)

    def use_up(self) -> None:
        """Count the whole charge as used, where the number of tokens made is not known."""
        self.use(max(0, self.charge - self.used))

    def move(self) -> Hold:
        """Hand the place to a new `Hold`, which releases it. From then on `release` of this one does nothing."""
        moved = Hold(self._leave, self.number, charge=self.charge, late=self._late, weight=self.weight)
        moved.used, moved._prompt = self.used, self._prompt
        self._leave = self._late = None
        return moved

    def release(self) -> None:
        """Give the place back, and the unused tokens of the charge. Idempotent."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self.used)


current_hold: ContextVar[Hold | None] = ContextVar("slipstream_hold", default=None)
"""The place of the current call, if the call reads its own stream. None for kept streams: `KeptStream` counts them."""


def note_prompt(tokens: int) -> None:
    """The engine has taken the current call's prompt of `tokens` tokens."""
    hold = current_hold.get()
    if hold is not None:
        hold.saw_prompt(tokens)


def note_made(tokens: int) -> None:
    """The engine has made `tokens` tokens for the current call."""
    hold = current_hold.get()
    if hold is not None:
        hold.use(tokens)
