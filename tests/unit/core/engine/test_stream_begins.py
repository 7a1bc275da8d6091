"""`Started`: told when the first token is on its way, before anything else; never of a stream that fails earlier."""

from __future__ import annotations

import numpy as np
import pytest

from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.engine.streams.token_stream import TokenStream
from core.errors import QueueTimeout
from core.scheduler.intake import Intake
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, FinishReason, OutputEvent, Started
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.unit.core.engine.test_output_processor import TOKENS, made_stream


class Engine:
    """A processor, and one stream of it that nothing was told of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.processor = OutputProcessor(Intake(), lambda: None, 100, lambda _: None, TextFailures())
        self.stream, self.req = made_stream(tokenizer, SamplingParams())

    def begins(self) -> None:
        self.processor.emit(StepOutputs((), (), (self.req,)), 1.0)

    def makes(self, place: int) -> None:
        self.processor.emit(StepOutputs((StepTokens([self.req], [TOKENS[place]], [place]),), ()), 1.0)

    def ends(self, req: Req, **how: object) -> None:
        self.processor.emit(StepOutputs((), (Ending(req, **how),)), 1.0)  # type: ignore[arg-type]

    def read(self) -> list[type[OutputEvent]]:
        return [type(event) for event in iter(self.stream.poll, None)]


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return Engine(tokenizer)


def test_nothing_is_told_in_the_queue(engine: Engine) -> None:
    assert engine.read() == [] and not engine.stream.ended


def test_begun_before_there_is_a_token(engine: Engine) -> None:
    engine.begins()
    assert engine.read() == [Started]
    engine.makes(0)
    engine.begins()
    engine.makes(1)
    assert engine.read() == [Delta], "begun once, also where its prompt is computed again"


async def test_a_reader_that_waits_is_woken(engine: Engine) -> None:
    called = list[int]()
    engine.stream.watch(lambda: called.append(1))
    before = len(called)
    engine.begins()
    assert len(called) == before + 1


def test_a_token_that_was_not_announced_begins_its_stream(engine: Engine) -> None:
    """One that comes back from host memory computes no prompt."""
    engine.makes(0)
    assert engine.read() == [Started, Delta]


def test_a_stream_that_ends_well_without_a_token_has_begun(engine: Engine) -> None:
    engine.req.outputs = np.empty(0, np.int32)
    engine.ends(engine.req, reason=FinishReason.CANCELLED)
    assert engine.read() == [Started, Finished] and engine.stream.ended


def read_to_failure(stream: TokenStream) -> tuple[list[type[OutputEvent]], str]:
    kinds = list[type[OutputEvent]]()
    with pytest.raises(QueueTimeout) as failed:
        while (event := stream.poll()) is not None:
            kinds.append(type(event))
    return kinds, failed.value.message


def test_a_failure_in_the_queue_is_all_there_is(engine: Engine) -> None:
    engine.req.outputs = np.empty(0, np.int32)
    engine.ends(engine.req, error=QueueTimeout("busy"))
    assert read_to_failure(engine.stream) == ([], "busy")


def test_a_sibling_of_a_failure_in_the_queue_tells_nothing(tokenizer: Tokenizer) -> None:
    """Its ending would come without a start."""
    engine = Engine(tokenizer)
    sibling = Req("r", 1, engine.req.prompt, SamplingParams(), 0, 16)
    sibling.sink = engine.stream = two_outputs(engine)
    engine.stream.reqs = [engine.req, sibling]
    engine.ends(engine.req, error=QueueTimeout("busy"))
    engine.ends(sibling, reason=FinishReason.CANCELLED)
    assert read_to_failure(engine.stream) == ([], "busy")
    assert engine.stream.open_outputs == 0


def two_outputs(engine: Engine) -> TokenStream:
    pending = [PendingOutput(index, None, None) for index in range(2)]
    engine.req.outputs = np.empty(0, np.int32)
    engine.req.sink = stream = engine.processor.stream(Started("r", 1), pending, lambda _: None, Turnstile())
    return stream


def test_a_failure_behind_the_start_comes_behind_it(engine: Engine) -> None:
    engine.begins()
    for place in range(len(TOKENS)):
        engine.makes(place)
    engine.ends(engine.req, error=QueueTimeout("late"))
    assert read_to_failure(engine.stream) == ([Started, Delta], "late")
