"""Puts the outputs of a step into their streams: the only loop over tokens on the event loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from core.batch.result import LogprobResult
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.engine.streams.unread import UnreadBytes, too_many_bytes, too_many_tokens
from core.errors import SlipstreamError
from core.scheduler.intake import Intake
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.text.failures import TextFailures, is_failure
from core.types.handover import Handed
from core.types.io import Finished, FinishReason, Started, Timing, Usage
from core.types.logprobs import NUMBER_BYTES, TokenLogprobs
from core.types.request import Req


class StepLogprobs:
    """Log probabilities of one step. Three calls take them out of numpy; a token then costs slices of bytes."""

    def __init__(self, found: LogprobResult) -> None:
        self._values: list[float] = found.values.tolist()
        self._width = found.top_ids.shape[1] * NUMBER_BYTES
        self._top_ids = found.top_ids.astype(np.int32).tobytes()
        self._top_values = found.top_values.astype(np.float32, copy=False).tobytes()
        self._chosen = b"" if found.chosen is None else found.chosen.tobytes()
        self._chosen_width = 0 if found.chosen is None else found.chosen.shape[1] * NUMBER_BYTES

    def add_to(self, kept: TokenLogprobs, place: int, token: int, count: int, chosen: int) -> None:
        """Add to `kept` those of `token`, which is row `place` of the step, with its best `count` alternatives, and
        those of the first `chosen` ids that the row named."""
        first = place * self._width
        end = first + count * NUMBER_BYTES
        named = place * self._chosen_width
        told = self._chosen[named : named + chosen * NUMBER_BYTES]
        kept.add(token, self._values[place], self._top_ids[first:end], self._top_values[first:end], told)


class OutputProcessor:
    """Fills streams, finds stop strings, bounds what readers leave unread. Requests that it ends go to the intake."""

    def __init__(
        self,
        intake: Intake,
        wake: Callable[[], None],
        max_pending_tokens: int,
        on_closed: Callable[[TokenStream], None],
        failures: TextFailures,
        weight_version: Callable[[], str] = str,
        handed: Callable[[Req], Handed | None] = lambda req: None,
    ) -> None:
        """`weight_version`: of the weights that the newest tokens are of. `handed`: where the keys of a prompt are."""
        self._intake = intake
        self._wake = wake
        self._max_pending = max_pending_tokens
        self._on_closed = on_closed
        self._failures = failures
        self._weight_version = weight_version
        self._handed = handed
        self._unread = UnreadBytes()

    def stream(
        self,
        started: Started,
        outputs: list[PendingOutput],
        abort: Callable[[TokenStream], None],
        turnstile: Turnstile,
    ) -> TokenStream:
        """A new stream that this processor fills. Its unread bytes count with those of all other streams."""
        for output in outputs:
            output.bound(self._max_pending)
        return TokenStream(started, outputs, abort, turnstile, self.text_failed, self.give_way, self._unread)

    def emit(self, outputs: StepOutputs, now: float) -> None:
        """Take over one step: tokens first, then terminals (the order that `StepOutputs` promises).

        `now`: `time.monotonic` seconds.
        """
        for req in outputs.begun:
            begun: TokenStream = req.sink  # type: ignore[assignment]
            begun.begin()
        # Two steps may arrive at once, so a request's stop token is known by its place: the last of its outputs.
        stops = {id(e.req): len(e.req.outputs) - 1 for e in outputs.ended if isinstance(e.matched_stop, int)}
        for tokens in outputs.tokens:
            if tokens.of_prompts:
                self._emit_prompts(tokens)
            else:
                self._emit_tokens(tokens, stops)
        for ended in outputs.ended:
            self._emit_end(ended, now)

    def _emit_tokens(self, step: StepTokens, stops: dict[int, int]) -> None:
        logprobs = None if step.logprobs is None else StepLogprobs(step.logprobs)
        # The one loop that costs Python per request and step: what a token does not need is not done for it.
        for i, (req, token) in enumerate(zip(step.reqs, step.tokens)):
            # Without an `isinstance` check, which would cost each token as much as the look at `done` below.
            stream: TokenStream = req.sink  # type: ignore[assignment]
            output = stream.outputs[req.index]
            if output.done:
                continue
            if output.looks_at_tokens or (stops and id(req) in stops):
                self._push(step, i, stream, output, stops, logprobs)
            else:
                output.ids.append(token)
            if len(output.ids) > output.room and not output.done:
                self._ask_for_room(stream, output)
            stream.notify(output)

    def _emit_prompts(self, step: StepTokens) -> None:
        """Tokens of prompts, which come before all tokens of their output."""
        assert step.logprobs is not None, "they are told for their log probabilities"
        logprobs = StepLogprobs(step.logprobs)
        for req, token, place in zip(step.reqs, step.tokens, step.logprob_rows.tolist(), strict=True):
            stream: TokenStream = req.sink  # type: ignore[assignment]
            output = stream.outputs[req.index]
            if output.done:
                continue
            logprobs.add_to(output.logprobs, place, token, req.params.prompt_logprobs or 0, 0)
            output.push_prompt(token)
            if len(output.ids) > output.room and not output.done:
                self._ask_for_room(stream, output)
            stream.notify(output)

    def _push(
        self,
        step: StepTokens,
        i: int,
        stream: TokenStream,
        output: PendingOutput,
        stops: dict[int, int],
        logprobs: StepLogprobs | None,
    ) -> None:
        """Token `i` of the step, for an output that looks at single tokens or may just have ended."""
        req, token = step.reqs[i], step.tokens[i]
        if logprobs is not None and req.params.logprobs:
            params = req.params
            place, named = int(step.logprob_rows[i]), len(params.logprob_token_ids)
            logprobs.add_to(output.logprobs, place, token, params.top_logprobs, named)
        if step.drafts is not None and step.drafts[i]:
            output.accepted += 1
        try:
            matched = output.push(
                token,
                textless=stops.get(id(req)) == step.positions[i] and not req.params.include_stop_in_output,
                match_stops=output.total + 1 >= req.params.min_tokens,
            )
        except BaseException as error:
            self.text_failed(stream, output, error)
            return
        if matched is not None:
            self._stopped_by_text(req, output, matched)

    def _stopped_by_text(self, req: Req, output: PendingOutput, matched: str) -> None:
        """End `req` at the stop string `matched`. Tokens that are already on their way for it are dropped."""
        output.done = True
        output.stop_match = matched
        self._end(Ending(req, reason=FinishReason.STOP, matched_stop=matched))

    def _ask_for_room(self, stream: TokenStream, output: PendingOutput) -> None:
        """`output` holds more than its room: give it more, or end the request of a reader that is too slow."""
        if output.overfull:
            self._end_all(stream, too_many_tokens(self._max_pending))
        else:
            stream.hold_more(output)

    def give_way(self, stream: TokenStream) -> None:
        """End the request of `stream` with SlowConsumer, and forget what is unread: it takes too many bytes."""
        error = too_many_bytes()
        stream.discard(error)
        self._end_all(stream, error)

    def _end_all(self, stream: TokenStream, error: SlipstreamError) -> None:
        for req, output in stream.sequences():
            if not output.done:
                output.done = True
                self._end(Ending(req, error=error))

    def text_failed(self, stream: TokenStream, output: PendingOutput, error: BaseException) -> None:
        """End the request of `stream`, all of its outputs: the tokenizer raised `error` on the text of `output`.

        Counted and logged once for a request. Raises `error` again if it is no failure of a tokenizer.
        """
        if not is_failure(error):
            raise error
        output.give_up()
        if stream.failed:
            return
        failure = self._failures.noted(error)
        stream.fail(failure)
        self._end_all(stream, failure)

    def _end(self, command: Ending) -> None:
        self._intake.end(command)
        self._wake()

    def _emit_end(self, ended: Ending, now: float) -> None:
        req = ended.req
        stream = req.sink
        assert isinstance(stream, TokenStream), type(stream)
        output = stream.outputs[req.index]
        output.done = True
        error = ended.error
        if output.stop_match is None and output.total < len(req.outputs):
            # The output ended with a reason before the scheduler heard that its reader is too slow. Its last tokens
            # were dropped, so the client must get the error.
            error = too_many_tokens(self._max_pending)
        if error is not None:
            stream.fail(error)
            for sibling, its_output in stream.sequences():
                if sibling is not req and not its_output.done:
                    self._end(Ending(sibling, reason=FinishReason.CANCELLED, condemned=ended.condemned))
        else:
            reason, matched = self._reason(ended, output)
            measures, version = (_usage(req, output), _timing(req, now)), self._weight_version()
            self._finish(stream, output, Finished(req.index, reason, *measures, matched, version, self._handed(req)))
        stream.output_ended()
        if stream.open_outputs == 0:
            self._on_closed(stream)

    def _finish(self, stream: TokenStream, output: PendingOutput, event: Finished) -> None:
        try:
            output.finish(event)
        except BaseException as error:
            self.text_failed(stream, output, error)
        stream.notify(output)

    @staticmethod
    def _reason(ended: Ending, output: PendingOutput) -> tuple[FinishReason, str | int | None]:
        # A length limit or an abort may have reached the scheduler first, but the client's text stops at the match.
        if output.stop_match is not None:
            return FinishReason.STOP, output.stop_match
        assert ended.reason is not None, "an ending without error has a reason"
        return ended.reason, ended.matched_stop


def _usage(req: Req, output: PendingOutput) -> Usage:
    # The scheduler does not know of tokens that were dropped behind a stop string.
    accepted = req.accepted_draft_tokens if output.stop_match is None else output.accepted
    return Usage(req.input_len, req.cached_tokens, output.total, req.draft_tokens, accepted)


def _timing(req: Req, now: float) -> Timing:
    started = req.scheduled_at if req.scheduled_at is not None else now
    first = req.first_token_at if req.first_token_at is not None else now
    return Timing(started - req.arrived_at, first - req.arrived_at, now - req.arrived_at)
