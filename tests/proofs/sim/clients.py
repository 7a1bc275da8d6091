"""What each client saw, held against what the reference says it must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import DeadlinePassed, Overloaded, QueueTimeout, RequestFailed, SlipstreamError, SlowConsumer
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.types.io import FinishReason
from core.types.request import Req
from tests.proofs.sim.reference import Answer, EncoderSide, answer, spoken
from tests.proofs.sim.story import Hits, Story, Violation

PATIENCE = 4
"""Tokens that a reader may leave unread."""


@dataclass(slots=True)
class Admission:
    """One stay in a row, as the submitted batches tell of it."""

    at: float
    """Seconds: when its first step was planned."""
    cached: int
    """Tokens that were in the pools before that step."""
    target: int
    """Tokens known by then: behind the last of them the first new one is sampled."""
    planned: int
    """Tokens whose steps are planned so far."""


@dataclass(slots=True, eq=False)
class Client:
    """The reader of one output, and `Req.sink` of it."""

    name: str
    req: Req
    siblings: list[Client] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: Ending | None = None
    number: int = 0
    """In order of arrival, from 1."""
    arrived: float = 0.0
    """Seconds on the world's clock, as are all times below."""
    deadline: float | None = None
    queue_deadline: float | None = None
    priority: int = 0
    salt: str = ""
    """As the client said it."""
    times: list[float] = field(default_factory=list)
    """When each of `tokens` came."""
    ended_at: float = 0.0
    admissions: list[Admission] = field(default_factory=list)
    """Every time that it got a row, in order; the last is over when it waits or has ended."""
    reads: bool = True
    """A reader that does not read is ended after `patience` tokens, as the output processor does."""
    stop_after: int = 0
    """A stop string completes with this many tokens; 0: it has none."""
    done: bool = False
    """Its ending is decided on the output side; later tokens are dropped, but must still be right."""
    ordered: bool = False
    """Somebody asked for its end through the intake: a client, a reader, a drain."""
    owner: tuple[int, int] = (0, -1)
    """The row and generation it runs as, or ran as last."""
    pools: int = 1
    """How many pools the model reads that hold its tokens."""
    encoder: EncoderSide | None = None
    """What it sent, where an encoder reads it; `req.prompt` is then the same for everybody."""
    adapter: int | None = None
    """The number of the adapter that it came for, where there are any."""
    forced: int = 0
    """Retractions of it that the run forced; the others are the scheduler's own."""
    forced_before: int = 0
    """As many of those have been told from the others."""
    by_class: int = 0
    """Retractions of it in favour of a request of a higher class."""
    by_class_before: int = 0
    """As many of those have been told from the others."""
    by_share: int = 0
    """Retractions of it in favour of a tenant that held less."""
    by_share_before: int = 0
    """As many of those have been told from the others."""
    gave_way: int = 0
    """Its own retractions so far, the run's progress at the last, and how many in a row came without progress."""
    retracted_at: int = -1
    in_vain: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)
    """(when, how many) of each step that brought it tokens."""
    _answer: Answer | None = None
    _said: list[int] | None = None

    @property
    def sent(self) -> int:
        """Tokens that the client sent."""
        return self.req.prompt_len if self.encoder is None else len(self.encoder.ids)

    @property
    def encoder_len(self) -> int:
        """Of those, tokens that an encoder reads."""
        return 0 if self.encoder is None else len(self.encoder.ids)

    @property
    def failed(self) -> bool:
        """Whether it ended for what the device made of it."""
        return self.ended is not None and isinstance(self.ended.error, RequestFailed)

    @property
    def last(self) -> int:
        """Tokens that are in the pools when its last useful step is over: the last token out is never fed back."""
        return self.req.prompt_len + self.req.max_new_tokens - 1

    @property
    def answer(self) -> Answer:
        """What it must get; worked out when its first token arrives."""
        if self._answer is None:
            req = self.req
            prompt = req.prompt.tolist()
            limit = req.max_new_tokens
            self._answer = answer(prompt, req.params, req.seed, limit, self.pools, self.encoder, self.adapter)
        return self._answer

    @property
    def said(self) -> list[int]:
        """What a device samples for it that hears of no stop token, to the length that it asked for."""
        if self._said is None:
            req = self.req
            given = req.prompt.tolist(), req.params, req.seed, req.max_new_tokens
            self._said = list(spoken(*given, self.pools, self.encoder, self.adapter))
        return self._said


class Clients:
    """Takes what the scheduler emits, as the output processor would, and refuses anything that a client may not see."""

    def __init__(self, end: Callable[[Ending], None], spoiled: set[tuple[int, int]], story: Story, hits: Hits) -> None:
        self.live: dict[Req, Client] = {}
        """Without a terminal so far, in order of arrival."""
        self.gone: list[Client] = []
        self.progress = 0
        """Grows with every token and every terminal."""
        self.received = 0
        """Tokens, of all clients."""
        self.served = 0
        """Steps that brought a client tokens, of all clients."""
        self.closed: Callable[[Req], None] | None = None
        """Told of the last request of each stream that ends."""
        self._due: list[Client] = []
        self._intake_end = end
        self._spoiled = spoiled
        self._story, self._hits = story, hits

    def end(self, command: Ending) -> None:
        """Ask the scheduler to end a request; the very next step must do so."""
        client: Client = command.req.sink
        client.ordered = True
        self._due.append(client)
        self._intake_end(command)

    def take_due(self) -> list[Client]:
        """Whose end was asked for since the last call."""
        due, self._due = self._due, []
        return due

    def emit(self, outputs: StepOutputs, now: float) -> None:
        """The scheduler's `Emit`."""
        for step in outputs.tokens:
            self._take_tokens(step, now)
        for ended in outputs.ended:
            self._take_end(ended, now)

    def _take_tokens(self, step: StepTokens, now: float) -> None:
        logprobs = step.logprobs
        got: dict[Client, int] = {}
        for place, (req, token, position) in enumerate(zip(step.reqs, step.tokens, step.positions, strict=True)):
            client: Client = req.sink
            if client.ended is not None:
                raise Violation("after_terminal", f"{client.name} gets token {token} at {position} after its terminal")
            if position != len(client.tokens):
                raise Violation("positions", f"{client.name} gets position {position}, expected {len(client.tokens)}")
            expected = client.answer.tokens
            if position >= len(expected) or expected[position] != token:
                wanted = expected[position] if position < len(expected) else "nothing more"
                raise Violation("tokens", f"{client.name} gets {token} at {position}, the reference says {wanted}")
            client.tokens.append(token)
            client.times.append(now)
            got[client] = got.get(client, 0) + 1
            if req.params.logprobs:
                if logprobs is None:
                    raise Violation("logprobs", f"{client.name} asked for them at {position}")
                self._check_logprobs(client, token, step, place)
            self._react(client)
        self.progress += len(step.tokens)
        self.received += len(step.tokens)
        self.served += len(got)
        for client, count in got.items():
            client.steps.append((now, count))

    def _check_logprobs(self, client: Client, token: int, step: StepTokens, place: int) -> None:
        assert step.logprobs is not None
        row, count = step.logprob_rows[place], client.req.params.top_logprobs
        ids = step.logprobs.top_ids[row, :count].tolist()
        if step.logprobs.values[row] != token or ids != [token + rank for rank in range(count)]:
            raise Violation(
                "logprobs", f"{client.name} gets those of {step.logprobs.values[row]:.0f} with token {token}"
            )
        self._hits("logprobs")

    def _react(self, client: Client) -> None:
        """What the output processor does with a token: find the stop string, or the reader too slow."""
        if client.done:
            return
        if client.stop_after == len(client.tokens):
            client.done = True
            self._hits("stop_string")
            self.end(Ending(client.req, reason=FinishReason.STOP, matched_stop="text"))
        elif not client.reads and len(client.tokens) > PATIENCE:
            self._hits("slow_reader")
            for each in (client, *client.siblings):
                each.done = True
                self.end(Ending(each.req, error=SlowConsumer("too many tokens were left unread")))

    def _take_end(self, ended: Ending, now: float) -> None:
        client: Client = ended.req.sink
        if client.ended is not None:
            raise Violation("terminal_once", f"{client.name} ends twice")
        if (ended.reason is None) == (ended.error is None):
            raise Violation("terminal_once", f"{client.name} ends with {ended.reason} and {ended.error}")
        client.ended, client.ended_at = ended, now
        del self.live[ended.req]
        self.gone.append(client)
        self.progress += 1
        if self._story.tracing:
            why = ended.reason.value if ended.reason else repr(ended.error)
            self._story.note(f"{client.name} ends: {why}, {len(client.tokens)} tokens")
        if self.closed is not None and all(sibling.ended is not None for sibling in client.siblings):
            self.closed(client.req)
        if ended.error is None:
            self._check_reason(client, ended)
            return
        self._check_error(client, ended.error, now)
        # As the output processor does: the samples of one request fail together.
        for sibling in client.siblings:
            if sibling.ended is None and not sibling.done:
                self.end(Ending(sibling.req, reason=FinishReason.CANCELLED))

    def _check_reason(self, client: Client, ended: Ending) -> None:
        """The reference says when an output is complete; everything else somebody must have asked for."""
        if ended.reason is FinishReason.CANCELLED or ended.matched_stop == "text":
            if not client.ordered:
                raise Violation("unasked_end", f"{client.name} is ended as {ended.reason}, and nobody asked for it")
            return
        got, answer = tuple(client.tokens), client.answer
        if (got, ended.reason, ended.matched_stop) != (answer.tokens, answer.reason, answer.matched_stop):
            text = f"{len(got)} tokens, {ended.reason}, {ended.matched_stop}"
            raise Violation("ending", f"{client.name} ends with {text}; the reference says {answer}")
        self._hits("ended_by_length" if ended.reason is FinishReason.LENGTH else "stop_token")

    def _check_error(self, client: Client, error: SlipstreamError, now: float) -> None:
        """Time limits strike when they are due and not before; a pool is never too small for who fits it alone."""
        if isinstance(error, Overloaded) and error.reason == "POOL_EXHAUSTED":
            raise Violation("fits_alone", f"{client.name} fits the empty pool, and is ended with {error!r}")
        if isinstance(error, QueueTimeout):
            right = not client.admissions and client.queue_deadline is not None and client.queue_deadline <= now
        elif isinstance(error, DeadlinePassed):
            right = client.deadline is not None and client.deadline <= now
        elif isinstance(error, RequestFailed):
            right = client.owner in self._spoiled
        else:
            right = client.ordered
        if not right:
            raise Violation("unasked_end", f"{client.name} is ended at {now:.2f} with {error!r}: {client.req}")
        self._hits(type(error).__name__)
