"""What reaches a stream when several steps arrive at once, which only timing decides."""

from __future__ import annotations

import numpy as np
import pytest

from core.batch.result import LogprobResult
from core.engine.streams.output_processor import OutputProcessor, StepLogprobs
from core.engine.streams.pending_output import PendingOutput, pending_output
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.engine.streams.unread import UnreadBytes
from core.scheduler.intake import Intake
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.text.detokenizer import IncrementalDetokenizer
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, FinishReason, OutputEvent, Started, TokenLogprob
from core.types.logprobs import ALTERNATIVE_BYTES, TokenLogprobs
from core.types.request import Req
from core.types.sampling_params import SamplingParams

TOKENS = (40, 41, 42, 50)
STOP = 50


def unfailing(_stream: TokenStream, _output: PendingOutput, error: BaseException) -> None:
    raise error


def made_stream(tokenizer: Tokenizer, params: SamplingParams, most: int = 100) -> tuple[TokenStream, Req]:
    req = Req("r", 0, np.array([7]), params, 0, 16)
    output = PendingOutput(0, IncrementalDetokenizer(tokenizer, [7], True), None, most=most)
    stream = TokenStream(
        Started("r", 1), [output], lambda _: None, Turnstile(), unfailing, lambda _: None, UnreadBytes()
    )
    stream.reqs = [req]
    req.sink = stream
    req.outputs = np.array(TOKENS, np.int32)
    return stream, req


async def events(stream: TokenStream) -> list[OutputEvent]:
    return [event async for event in stream]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("split", range(len(TOKENS)))
async def test_only_the_stop_token_has_no_text(tokenizer: Tokenizer, split: int, include: bool) -> None:
    """Found by the equivalence suite: when two steps came at once, the token before the stop token lost its text."""
    params = SamplingParams(stop_token_ids=(STOP,), include_stop_in_output=include)
    stream, req = made_stream(tokenizer, params)
    closed: list[TokenStream] = []
    processor = OutputProcessor(Intake(), lambda: None, 100, closed.append, TextFailures())
    steps = [StepTokens([req], [token], [place]) for place, token in enumerate(TOKENS)]
    ended = Ending(req, FinishReason.STOP, STOP)
    if split:
        processor.emit(StepOutputs(tuple(steps[:split]), ()), 1.0)
    processor.emit(StepOutputs(tuple(steps[split:]), (ended,)), 2.0)
    got = await events(stream)
    text = "".join(event.text for event in got if isinstance(event, Delta))
    assert text == tokenizer.decode(TOKENS if include else TOKENS[:-1], True)
    assert [t for event in got if isinstance(event, Delta) for t in event.token_ids] == list(TOKENS)
    assert isinstance(got[-1], Finished) and got[-1].matched_stop == STOP
    assert closed == [stream]


def test_the_bound_on_unread_tokens_is_on_those_of_the_output() -> None:
    output = PendingOutput(0, None, None, most=9, prompt=5)
    output.bound(2)
    for token in range(5):
        output.push_prompt(token)
        assert output.total == 0
    output.ids += [40, 41]
    assert not output.overfull
    output.ids.append(42)
    assert output.overfull
    first = output.take()
    assert isinstance(first, Delta) and (first.position, first.token_ids) == (-5, (0, 1, 2, 3, 4))
    assert isinstance(second := output.take(), Delta) and (second.position, second.token_ids) == (0, (40, 41, 42))


def test_alternatives_of_a_prompt_are_counted_before_they_come(tokenizer: Tokenizer) -> None:
    req = Req("r", 0, np.arange(900), SamplingParams(prompt_logprobs=20), 0, 16)
    plain = Req("r", 0, np.arange(900), SamplingParams(), 0, 16)
    told, silent = (pending_output(each, tokenizer, want_text=False) for each in (req, plain))
    assert told.charge() - silent.charge() >= told.room * 20 * ALTERNATIVE_BYTES


def test_each_prompt_has_as_many_alternatives_as_it_asks_for(tokenizer: Tokenizer) -> None:
    """Of a step that tells of several."""
    streams, reqs = [], []
    for top in (2, 0):
        params = SamplingParams(prompt_logprobs=top)
        req = Req("r", 0, np.array([7, 8]), params, 0, 16)
        output = pending_output(req, tokenizer, want_text=False)
        stream = TokenStream(
            Started("r", 2), [output], lambda _: None, Turnstile(), unfailing, lambda _: None, UnreadBytes()
        )
        stream.reqs, req.sink = [req], stream
        streams.append(stream)
        reqs.append(req)
    ranked = np.array([[1, 2], [3, 4]])
    found = LogprobResult(np.array([-1.0, -2.0], np.float32), ranked, -ranked.astype(np.float32))
    step = StepTokens(reqs, [8, 8], np.array([-1, -1]), found, np.array([0, 1]), of_prompts=True)
    processor = OutputProcessor(Intake(), lambda: None, 100, lambda _: None, TextFailures())
    processor.emit(StepOutputs((step,), ()), 1.0)
    told = [stream.outputs[0].take() for stream in streams]
    assert [list(each.logprobs) for each in told if isinstance(each, Delta)] == [
        [TokenLogprob(8, -1.0, ((1, -1.0), (2, -2.0)))],
        [TokenLogprob(8, -2.0)],
    ]


def test_a_token_has_what_its_own_row_was_told() -> None:
    """Of columns that are as wide as the row that wants most."""
    ranked = np.array([[1, 2], [3, 4]])
    found = LogprobResult(
        np.array([-1.0, -2.0], np.float32), ranked, -ranked.astype(np.float32), np.array([[5, 6], [7, 8]], np.float32)
    )
    kept, told = TokenLogprobs(), StepLogprobs(found)
    told.add_to(kept, 1, 40, 1, 2)
    told.add_to(kept, 0, 41, 2, 2)
    assert list(kept) == [
        TokenLogprob(40, -2.0, ((3, -3.0),), (7.0, 8.0)),
        TokenLogprob(41, -1.0, ((1, -1.0), (2, -2.0)), (5.0, 6.0)),
    ]
    few = TokenLogprobs()
    told.add_to(few, 1, 40, 0, 1)
    assert few[0] == TokenLogprob(40, -2.0, (), (7.0,))
