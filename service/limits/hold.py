"""What a request holds of its tenant's limits, from its admission until the engine is done with it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar


class Hold:
    """A place in a tenant's gate until `release`, which may be called again; `number` is its name between processes,
    `weight` that of the tenant.

    `used` are the tokens that are known to have gone into the request so far. `leave` is told them at the release, so
    that the rest of `charge` is given back; `late` is told of those that become known after it.
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
        """The engine has taken a prompt of so many tokens; the last word counts."""
        before, self._prompt = self._prompt, tokens
        self.use(tokens - before)

    def use(self, tokens: int) -> None:
        """So many more tokens went into the request."""
        self.used += tokens
        if self._leave is None and self._late is not None and tokens:
            self._late(tokens)

    def use_up(self) -> None:
        """What was made is not known, so that nothing of the charge is given back."""
        self.use(max(0, self.charge - self.used))

    def move(self) -> Hold:
        """The place, for another holder to release; from then on `release` of this one does nothing."""
        moved = Hold(self._leave, self.number, charge=self.charge, late=self._late, weight=self.weight)
        moved.used, moved._prompt = self.used, self._prompt
        self._leave = self._late = None
        return moved

    def release(self) -> None:
        """Give the place back, and what was not used of the charge."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self.used)


current_hold: ContextVar[Hold | None] = ContextVar("slipstream_hold", default=None)
"""Within a call that reads its own stream: its place. None for streams that are kept, which count for themselves."""


def note_prompt(tokens: int) -> None:
    """The engine has taken the current call's prompt of so many tokens."""
    hold = current_hold.get()
    if hold is not None:
        hold.saw_prompt(tokens)


def note_made(tokens: int) -> None:
    """So many tokens were made for the current call."""
    hold = current_hold.get()
    if hold is not None:
        hold.use(tokens)
