"""What one request was told, over all the calls that read it, held against what it must be told: once, and in order.

A reader that comes back says what it has, so all that a request was told is one sequence, whichever calls brought it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.types.io import Delta, EmbedResult, Finished, FinishReason, GenerateRequest, OutputEvent, Started
from service.wire.position import Position
from tests.proofs.sim.shell.expected import Expected
from tests.proofs.sim.shell.tokens import text_of
from tests.proofs.sim.story import Violation


@dataclass(slots=True)
class Told:
    """Of one output."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None


class History:
    """Of one reader of one request. `took` each event as it comes; `ended` when the iteration is over."""

    def __init__(self, name: str, asked: GenerateRequest, prompt: Sequence[int], right: Sequence[Expected]) -> None:
        self.name = name
        self.asked, self.right = asked, right
        self.told = [Told() for _ in right]
        self.cancelled = False
        """Whether an output ended as cancelled."""
        self.request_id = asked.request_id
        self.incarnation = ""
        """That of the stream which the first call read, once it was told."""
        self._prompt_len = len(prompt)
        self._started = False

    @property
    def complete(self) -> bool:
        """Whether every output has its terminal."""
        return all(told.finished is not None for told in self.told)

    def positions(self) -> dict[int, Position]:
        """What this reader has, as Attach wants to know it."""
        return {
            index: Position(len(told.tokens), len(told.text.encode()), told.finished is not None)
            for index, told in enumerate(self.told)
        }

    @property
    def began(self) -> bool:
        """Whether the newest call told anything."""
        return self._started

    def begin(self) -> None:
        """Another call reads on."""
        self._started = False

    def took(self, event: OutputEvent, *, kept: bool) -> None:
        """One event; `kept`: of a stream that is kept for Attach."""
        if isinstance(event, Started):
            if self._started or event.prompt_tokens != self._prompt_len or event.request_id != self.request_id:
                self._object("started", f"{event}, with a prompt of {self._prompt_len}, {self._started=}")
            if (kept and not event.incarnation) or self.incarnation not in ("", event.incarnation):
                self._object("incarnation", f"gets {event}, and has read {self.incarnation!r}")
            self._started, self.incarnation = True, event.incarnation
            return
        told = self.told[event.index]
        if not self._started:
            self._object("started", f"gets {event} before its start")
        if told.finished is not None:
            self._object("after_terminal", f"gets {event} after {told.finished}")
        if isinstance(event, Delta):
            self._delta(told, event)
        else:
            told.finished = event
            self._ending(told, self.right[event.index])

    def ended(self) -> None:
        """The iteration ended without an error."""
        if not self._started:
            self._object("started", "its stream ended, and has told no start")
        if not self.complete:
            self._object("terminal_missing", f"its stream ended, and has told {self._so_far()}")

    def check_end(self, *, failed: bool, abortable: bool) -> None:
        """The reader is done, for good."""
        if self.cancelled and not (failed or abortable):
            self._object("unasked_end", "is cancelled, and no caller asked for it")

    def _delta(self, told: Told, event: Delta) -> None:
        right = self.right[event.index]
        if event.position != len(told.tokens):
            self._object("positions", f"gets {event}, and has {len(told.tokens)} tokens")
        if not (event.token_ids or event.text):
            self._object("empty_delta", f"gets {event}")
        told.tokens += event.token_ids
        if tuple(told.tokens) != right.tokens[: len(told.tokens)]:
            self._object("tokens", f"has {told.tokens}, the reference says {right.tokens}")
        if not self.asked.want_text:
            # Made all the same where a stop string is looked for; the servicer leaves it out.
            if event.text and not self.asked.sampling.stop:
                self._object("text", f"wants no text, and gets {event}")
            self._logprobs(event)
            return
        told.text += event.text
        if not text_of(told.tokens, self.asked.sampling.skip_special_tokens).startswith(told.text):
            self._object("text", f"has {told.text!r} after {told.tokens}")
        self._logprobs(event)

    def _logprobs(self, event: Delta) -> None:
        params = self.asked.sampling
        if len(event.logprobs) != (len(event.token_ids) if params.logprobs else 0):
            self._object("logprobs", f"gets {len(event.logprobs)} of them with {event}")
        for token, found in zip(event.token_ids, event.logprobs):
            top = tuple((token + rank, float(token - rank)) for rank in range(params.top_logprobs))
            if (found.token_id, found.logprob, tuple(map(tuple, found.top))) != (token, float(token), top):
                self._object("logprobs", f"gets {found} with token {token}")

    def _ending(self, told: Told, right: Expected) -> None:
        finished = told.finished
        assert finished is not None
        usage, timing = finished.usage, finished.timing
        if (usage.prompt_tokens, usage.completion_tokens) != (self._prompt_len, len(told.tokens)):
            self._object("usage", f"has {len(told.tokens)} tokens, and is told {usage}")
        in_order = 0 <= timing.queue <= timing.first_token <= timing.total
        if not in_order and finished.reason is not FinishReason.CANCELLED:
            self._object("timing", f"is told {timing}")
        if finished.reason is FinishReason.CANCELLED:
            self.cancelled = True
            text = text_of(told.tokens, self.asked.sampling.skip_special_tokens)
            if self.asked.want_text and told.text != text:
                self._object("text", f"ends with {told.text!r}, its tokens say {text!r}")
            return
        got = (tuple(told.tokens), finished.reason, finished.matched_stop)
        if got != (right.tokens, right.reason, right.matched):
            self._object("ending", f"ends with {got}, the reference says {right}")
        if self.asked.want_text and told.text != right.text:
            self._object("text", f"ends with {told.text!r}, the reference says {right.text!r}")

    def _so_far(self) -> str:
        return ", ".join(f"{len(told.tokens)} tokens{' and its end' * bool(told.finished)}" for told in self.told)

    def _object(self, oracle: str, text: str) -> None:
        raise Violation(oracle, f"{self.name} {text}")


def check_vectors(name: str, result: EmbedResult, right: Sequence[Sequence[float]], *, normalized: bool) -> None:
    """Every vector is that of its input."""
    if len(result.embeddings) != len(right):
        raise Violation("vectors", f"{name} asked for {len(right)}, and gets {len(result.embeddings)}")
    for place, (found, raw) in enumerate(zip(result.embeddings, right, strict=True)):
        wanted = np.asarray(raw, np.float32)
        if normalized:
            wanted = wanted / np.float32(np.linalg.norm(wanted.astype(np.float64)))
        if not np.allclose(found.values, wanted, rtol=1e-6):
            raise Violation("vectors", f"{name} gets {found.values} for input {place}, not {wanted}")
