"""What an onlooker is told of one stream: how far it is, its tokens, its adapter."""

from __future__ import annotations

import numpy as np
import pytest

from core.engine.streams.open_streams import LiveStreams, stage
from core.engine.streams.output_processor import OutputProcessor
from core.engine.streams.pending_output import PendingOutput
from core.engine.streams.reader_turns import Turnstile
from core.scheduler.intake import Intake
from core.text.failures import TextFailures
from core.types.io import Pooling, Started
from core.types.request import Req, RequestState
from core.types.sampling_params import SamplingParams
from tests.unit.core.engine.test_adapter_table import adapter, table, use


def req(words: str = "waiting", index: int = 0, prompt: int = 3) -> Req:
    made = Req("r", index, np.zeros(prompt, np.int64), SamplingParams(), 1, 8, arrived_at=7.0)
    if words in ("prefill", "decode"):
        made.state = RequestState.RUNNING
    made.first_token_at = 1.0 if words == "decode" else None
    made.retractions = int(words == "preempted")
    if words == "finished":
        made.state = RequestState.FINISHED
    return made


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ("waiting", "waiting"),
        ("waiting prefill", "prefill"),
        ("preempted waiting", "preempted"),
        ("preempted prefill", "prefill"),
        ("decode preempted", "decode"),
        ("decode prefill", "decode"),
        ("finished decode", "decode"),
        ("finished waiting", "waiting"),
    ],
)
def test_a_request_is_where_its_furthest_output_is(outputs: str, told: str) -> None:
    assert stage([req(words) for words in outputs.split()]) == told


def test_tokens_of_all_outputs_count_and_prompts_once_unless_they_differ() -> None:
    books = table()
    books.load("french", adapter(), pinned=False)
    slot = use(books, "french")
    live = {}
    processor = OutputProcessor(Intake(), lambda: None, 100, lambda _: None, TextFailures())
    for name, prompts, pooling in (("chat", (3, 3), None), ("vectors", (3, 5), Pooling.MEAN)):
        outputs = [PendingOutput(index, None, None) for index in range(2)]
        stream = processor.stream(Started(name, 3), outputs, lambda _: None, Turnstile())
        stream.reqs = [req("decode", index, prompt) for index, prompt in enumerate(prompts)]
        for each in stream.reqs:
            each.pooling = pooling
        live[name] = stream
    live["chat"].reqs[0].adapter_slot = slot
    for tokens, output in enumerate(live["chat"].outputs, 4):
        output.ids.extend(range(tokens))
        output.take()
        output.ids.append(1)
    streams = LiveStreams(live, books)
    chat, vectors = streams.oldest(9)
    assert chat == ("chat", "decode", 3, 4 + 5 + 2, 7.0, "french")
    assert (vectors.prompt_tokens, vectors.output_tokens, vectors.adapter) == (8, 0, "")
    assert len(streams) == 2 and streams.oldest(1) == (chat,)
