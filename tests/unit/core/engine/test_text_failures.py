"""A tokenizer that fails ends the request whose text it was to make, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from core.engine.api import EngineState
from core.engine.async_engine import AsyncEngine
from core.errors import EngineDead, TextFailed
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Finished, FinishReason, GenerateRequest
from service.bench.emulated import EmulatedModel, expected_output
from tests.support.fakes.brittle_tokenizer import SECRET, BrittleTokenizer, panic, value_error
from tests.support.until import until
from tests.unit.core.engine.emulation import HookedModel, ask, assert_opened, last, read, running
from tests.unit.core.text.checkpoints import pure_python

PROMPT = (5, 6, 7)
OTHERS = ((3, 3), (2, 9), (8, 1))
TOKENS = 60
FAILURES = pytest.mark.parametrize("failure", [value_error, panic])


def bad_token(vocab_size: int, prompt: tuple[int, ...] = PROMPT, after: int = 20) -> int:
    """A token that the output of `prompt` has behind its first `after` ones, and no output of OTHERS at all."""
    output = expected_output(list(prompt), TOKENS, vocab_size)
    spoken = {token for other in OTHERS for token in (*other, *expected_output(list(other), TOKENS, vocab_size))}
    return next(token for token in output[after:] if token not in {*spoken, *output[:after], *prompt})


@contextmanager
def told_once(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The failure is one line of the log, and no line has the client's text."""
    with caplog.at_level(logging.DEBUG):
        yield
    assert len([each for each in caplog.records if each.levelno >= logging.ERROR]) == 1
    assert SECRET not in caplog.text


async def neighbours_go_on(engine: AsyncEngine, tokenizer: Tokenizer, work: Callable[[], Any]) -> None:
    """`work` beside streams that must end as if they were alone; afterwards nothing is held."""
    reading = [asyncio.create_task(read(engine, ask(other, tokens=TOKENS, want_text=True))) for other in OTHERS]
    await work()
    for other, task in zip(OTHERS, reading, strict=True):
        ids, text, end = await task
        assert ids == expected_output(list(other), TOKENS, tokenizer.vocab_size)
        assert (text, end.reason) == (tokenizer.decode(ids, True), FinishReason.LENGTH)
    with suppress(TimeoutError):
        await until(lambda: engine.live_requests == 0 and all(pool.used == 0 for pool in engine.stats.pools))
    assert engine.live_requests == 0 and all(pool.used == 0 for pool in engine.stats.pools), "rows and pages went back"
    assert engine.state is EngineState.READY
    assert engine.stats.text_failures == 1
    ids, _, _ = await read(engine, ask(OTHERS[0], tokens=3, want_text=True))
    assert ids == expected_output(list(OTHERS[0]), 3, tokenizer.vocab_size)


async def fails(engine: AsyncEngine, request: GenerateRequest) -> list[int]:
    """Read `request` to its TextFailed; the ids that came before it."""
    ids: list[int] = []
    with pytest.raises(BaseException) as caught:
        async for event in await engine.generate(request):
            assert not isinstance(event, Finished), "an output whose text failed has no good end"
            ids += event.token_ids if isinstance(event, Delta) else ()
    assert caught.type is TextFailed, "and no panic, which passes every except Exception"
    assert SECRET not in str(caught.value)
    return ids


@FAILURES
@pytest.mark.parametrize("stop", [(), ("never said",)], ids=["read", "emit"])
async def test_text_that_cannot_be_made_ends_its_request_alone(
    tokenizer: Tokenizer, failure: Any, stop: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Where a reader takes text, and with a stop string where the step hands out its tokens."""
    brittle = BrittleTokenizer(tokenizer, [bad_token(tokenizer.vocab_size)], failure)
    async with running(brittle, max_running_requests=8) as engine:

        async def doomed() -> None:
            ids = await fails(engine, ask(PROMPT, tokens=2000, stop=stop, want_text=True))
            output = expected_output(list(PROMPT), TOKENS, tokenizer.vocab_size)
            place = output.index(*brittle.bad)
            if stop:
                assert ids == output[: place + 1], "what came before the failure is delivered"
            else:
                assert ids == output[: len(ids)] and len(ids) <= place

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)
        assert engine.stats.finished["text_failed"] == 1


@FAILURES
async def test_text_that_fails_at_the_end_of_its_output(
    tokenizer: Tokenizer, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was read by then, so all text is made when the output ends, inside the scheduler's step."""
    brittle = BrittleTokenizer(tokenizer, [bad_token(tokenizer.vocab_size, after=4)], failure)
    async with running(brittle) as engine:

        async def doomed() -> None:
            stream = await engine.generate(ask(PROMPT, tokens=TOKENS, want_text=True))
            await until(lambda: stream.open_outputs == 0)
            with pytest.raises(TextFailed):
                await last(stream)

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)


async def test_text_that_fails_with_the_last_token_has_no_good_end(tokenizer: Tokenizer) -> None:
    """The step that hands the token out ends the output too, by its length."""
    output = expected_output(list(PROMPT), TOKENS, tokenizer.vocab_size)
    bad = bad_token(tokenizer.vocab_size)
    brittle, length = BrittleTokenizer(tokenizer, [bad], times=1), output.index(bad) + 1
    async with running(brittle) as engine:
        stream = await engine.generate(ask(PROMPT, tokens=length, stop=("never said",), want_text=True))
        await until(lambda: engine.live_requests == 0)
        seen: list[object] = []
        with pytest.raises(TextFailed):
            async for event in stream:
                seen.append(event)
        assert not any(isinstance(event, Finished) for event in seen)


@FAILURES
@pytest.mark.parametrize("stop", [(), ("never said",)], ids=["read", "emit"])
async def test_siblings_of_a_failed_output_end_with_it(
    tokenizer: Tokenizer, failure: Any, stop: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    brittle = BrittleTokenizer(tokenizer, [bad_token(tokenizer.vocab_size)], failure, times=1)
    async with running(brittle) as engine:

        async def doomed() -> None:
            stream = await engine.generate(ask(PROMPT, tokens=1500, n=3, stop=stop, want_text=True))
            with pytest.raises(TextFailed):
                await last(stream)
            await until(lambda: all(output.done for output in stream.outputs))

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)
        assert engine.stats.step < 1000, "the siblings did not run to their own ends"


@FAILURES
async def test_a_reader_that_comes_late_gets_the_failure_of_an_output_that_had_ended(
    tokenizer: Tokenizer, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two outputs is over when the text of the other fails, and what it had is still delivered."""
    brittle = BrittleTokenizer(tokenizer, [], failure)
    gate, model = threading.Event(), HookedModel(tokenizer)
    async with running(brittle, model) as engine:
        output = expected_output(list(PROMPT), TOKENS, tokenizer.vocab_size)

        async def doomed() -> None:
            stream = await engine.generate(ask(PROMPT, tokens=TOKENS, want_text=True))
            await until(lambda: stream.outputs[0].total >= 10)
            model.hook = lambda *_: assert_opened(gate)
            brittle.bad = {output[5]}
            with pytest.raises(TextFailed):
                await last(stream)
            brittle.bad = set()
            gate.set()

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)


@FAILURES
async def test_a_prompt_whose_text_fails_is_refused_before_it_holds_anything(
    tokenizer: Tokenizer, failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the prompt is decoded when the request enters: the text of the output depends on it."""
    brittle = BrittleTokenizer(tokenizer, [bad_token(tokenizer.vocab_size)], failure)
    async with running(brittle) as engine:

        async def doomed() -> None:
            with pytest.raises(TextFailed):
                await engine.generate(ask((*PROMPT, *brittle.bad), want_text=True))

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)


@FAILURES
@pytest.mark.parametrize("call", ["generate", "tokenize", "detokenize"])
async def test_calls_that_make_text_or_ids_off_the_loop_fail_typed(
    tokenizer: Tokenizer, failure: Any, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = bad_token(tokenizer.vocab_size)
    brittle = BrittleTokenizer(tokenizer, [bad], failure)
    async with running(brittle) as engine:
        calls: dict[str, Callable[[], Any]] = {
            "generate": lambda: engine.generate(GenerateRequest(text=SECRET)),
            "tokenize": lambda: engine.tokenize(SECRET),
            "detokenize": lambda: engine.detokenize((5, bad)),
        }

        async def doomed() -> None:
            with pytest.raises(TextFailed) as caught:
                await calls[call]()
            assert SECRET not in str(caught.value)

        with told_once(caplog):
            await neighbours_go_on(engine, tokenizer, doomed)


@pytest.mark.parametrize("stop", [(), ("never said",)], ids=["read", "emit"])
async def test_ids_beyond_a_python_tokenizer_add_no_text(tmp_path: Path, stop: tuple[str, ...]) -> None:
    """Many models have more logits than their tokenizer has ids, and such an id may be sampled."""
    tokenizer = Tokenizer.load(pure_python(tmp_path / "byt5"))
    assert tokenizer.backend is None
    model = HookedModel(tokenizer)
    EmulatedModel.__init__(model, model.timeline, tokenizer.vocab_size + 200)
    async with running(tokenizer, model) as engine:
        ids, text, end = await read(engine, ask(PROMPT, tokens=TOKENS, stop=stop, want_text=True))
        assert ids == expected_output(list(PROMPT), TOKENS, tokenizer.vocab_size + 200)
        assert max(ids) >= tokenizer.vocab_size and end.reason is FinishReason.LENGTH
        assert text == tokenizer.decode([token for token in ids if token < tokenizer.vocab_size], True)
        assert engine.stats.text_failures == 0


async def test_a_panic_outside_any_text_ends_the_engine_at_once(tokenizer: Tokenizer) -> None:
    """It is no `Exception`: the scheduler's task ended without a word, and its streams hung."""
    model = HookedModel(tokenizer)

    def fail(*_: object) -> None:
        raise panic()

    model.hook = fail
    async with running(tokenizer, model, overlap=False, hang_timeout=1000.0) as engine:
        stream = await engine.generate(ask(tokens=5))
        with pytest.raises(EngineDead):
            await asyncio.wait_for(last(stream), 30)
        assert engine.state is EngineState.DEAD
