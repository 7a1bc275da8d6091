"""A reader that is too slow for the last tokens of its output is told so, not that the output is complete.

Found by the simulation of the shell (seed 273): several steps arrived at once, the first of them went past the bound of
unread tokens, the last ended the output by its length, and what came between was gone.
"""

from __future__ import annotations

import pytest

from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.token_stream import TokenStream
from core.errors import SlowConsumer
from core.scheduler.intake import Intake
from core.scheduler.outputs import Ending, StepOutputs, StepTokens
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, FinishReason, OutputEvent
from core.types.sampling_params import SamplingParams
from tests.unit.core.engine.test_output_processor import TOKENS, made_stream


async def read(stream: TokenStream) -> tuple[list[int], list[OutputEvent]]:
    """Ids, and the terminals."""
    ids: list[int] = []
    ends: list[OutputEvent] = []
    async for event in stream:
        if isinstance(event, Delta):
            ids += event.token_ids
        elif isinstance(event, Finished):
            ends.append(event)
    return ids, ends


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED])
@pytest.mark.parametrize("bound", range(len(TOKENS) - 1))
async def test_an_output_whose_tokens_were_dropped_ends_with_the_error(
    tokenizer: Tokenizer, bound: int, reason: FinishReason
) -> None:
    stream, req = made_stream(tokenizer, SamplingParams(), bound)
    closed: list[TokenStream] = []
    processor = OutputProcessor(Intake(), lambda: None, bound, closed.append, TextFailures())
    steps = tuple(StepTokens([req], [token], [place]) for place, token in enumerate(TOKENS))
    processor.emit(StepOutputs(steps, (Ending(req, reason),)), 1.0)
    with pytest.raises(SlowConsumer):
        await read(stream)
    assert closed == [stream] and stream.open_outputs == 0


@pytest.mark.parametrize("bound", [len(TOKENS) - 1, len(TOKENS)])
async def test_an_output_that_is_all_there_is_complete(tokenizer: Tokenizer, bound: int) -> None:
    """With its last token it went past the bound: nothing is missing, so no caller has to send it again."""
    stream, req = made_stream(tokenizer, SamplingParams(), bound)
    processor = OutputProcessor(Intake(), lambda: None, bound, lambda _: None, TextFailures())
    steps = tuple(StepTokens([req], [token], [place]) for place, token in enumerate(TOKENS))
    processor.emit(StepOutputs(steps, (Ending(req, FinishReason.LENGTH),)), 1.0)
    ids, ends = await read(stream)
    assert ids == list(TOKENS) and len(ends) == 1
