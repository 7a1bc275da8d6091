"""What is a failure of a tokenizer, and what passes as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from core.errors import DeadlinePassed, TextFailed
from core.invariants import InvariantViolation
from core.text.failures import TextFailures
from tests.support.fakes.brittle_tokenizer import SECRET, panic, value_error

OTHERS = (
    InvariantViolation("terminal_once", {}),
    DeadlinePassed("late"),
    asyncio.CancelledError(),
    KeyboardInterrupt(),
    SystemExit(),
    GeneratorExit(),
)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_what_is_no_failure_of_a_tokenizer_passes(error: BaseException) -> None:
    """A broken invariant ends the engine, and a cancelled task ends as cancelled; neither is an error of one text."""
    failures = TextFailures()
    with pytest.raises(BaseException) as caught, failures.told():
        raise error
    assert caught.value is error and failures.count == 0


@pytest.mark.parametrize("failure", [value_error, panic])
def test_the_error_of_a_request_leads_to_no_text_of_its_client(failure: Callable[[], BaseException]) -> None:
    """Neither by its message nor by what a traceback prints with it."""
    failures = TextFailures()
    with pytest.raises(TextFailed) as caught, failures.told():
        raise failure()
    assert SECRET not in str(caught.value) and failures.count == 1
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
