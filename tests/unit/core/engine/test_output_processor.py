"""What reaches a stream when several steps arrive at once, which only timing decides."""

from __future__ import annotations

import numpy as np
import pytest

from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.engine.streams.unread import UnreadBytes
from core.scheduler.intake import Intake
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.text.detokenizer import IncrementalDetokenizer
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, FinishReason, OutputEvent, Started
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
