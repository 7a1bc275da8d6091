"""What a request asks of its answer, where no server stands before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from core.engine.answering import Answering
from core.engine.workers import Workers
from core.errors import InvalidRequest
from core.text.answers.answer_form import answer_form
from core.text.failures import TextFailures
from core.text.tokenizer import Tokenizer
from core.types.chat import ToolMode
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import GenerateRequest
from core.types.sampling_params import SamplingParams

PROMPT = np.array([5, 6, 7])
REQUIRED = GenerateRequest(
    chat_tools=('{"function": {"name": "look"}}',), tool_mode=ToolMode.REQUIRED, sampling=SamplingParams()
)


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers(1, "answering")
    yield found
    found.close()


def answering(form: str, tokenizer: Tokenizer, workers: Workers) -> Answering:
    return Answering(answer_form(form, "", None), tokenizer, workers, TextFailures())


async def test_calls_in_an_unknown_form_are_refused(tokenizer: Tokenizer, workers: Workers) -> None:
    with pytest.raises(InvalidRequest, match=r"chat\.tool_choice") as failed:
        await answering("none", tokenizer, workers).constraint(REQUIRED, PROMPT)
    assert "--answer-form" in str(failed.value)


async def test_a_request_without_a_required_call_keeps_its_own_constraint(
    tokenizer: Tokenizer, workers: Workers
) -> None:
    known = answering("hermes", tokenizer, workers)
    own = Constraint(ConstraintKind.REGEX, "a")
    for mode in (ToolMode.AUTO, ToolMode.NONE):
        request = GenerateRequest(tool_mode=mode, sampling=SamplingParams(), constraint=own)
        assert await known.constraint(request, PROMPT) is own
    found = await known.constraint(REQUIRED, PROMPT)
    assert found is not None and found.kind is ConstraintKind.CALLS and not found.violations()
    assert found == await known.constraint(REQUIRED, PROMPT), "equal texts are compiled once"
