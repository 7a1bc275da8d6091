"""`slipstream classify` and `slipstream score`: what they print, of a server and of an engine of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.errors import InvalidRequest
from core.types.io import TextPair
from core.types.labels import Activation, Labels
from service.cli.cli import cli
from tests.contract.api.test_classify import judge
from tests.contract.api.test_score import RELEVANCE
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import Serve


def run(*args: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(cli, args, input=typed)


async def test_labels_are_printed_best_first(serve: Serve) -> None:
    async with serve(judge(Labels(("bad", "excellent", "fine"), Activation.NONE))) as serving:

        async def printed(*args: str, typed: str | None = None) -> Result:
            return await asyncio.to_thread(run, "classify", "--server", serving.target, *args, typed=typed)

        one = await printed("--adapter", "french", "--truncate", "abc")
        several = await printed("--pair", "a", "bc d", "a\nb", "--pair", "x", "y")
        typed = await printed("-", typed="ab\nc\n")
        embedded = serving.engine.embedded
        bad = await printed("a", "")
        nothing = await printed("-", typed="")
    assert one.output == "bad        3.0000\nfine       1.0000\nexcellent  0.0000\n"
    assert several.output.split("\n\n")[0] == "a b\n  bad        3.0000\n  fine       1.0000\n  excellent  0.0000"
    assert [each.splitlines()[0] for each in several.output.split("\n\n")] == ["a b", "a | bc d", "x | y"]
    assert [(each.adapter, each.truncate) for each in embedded[:2]] == [("french", True), ("", False)]
    assert embedded[1].inputs == ("a\nb", TextPair("a", "bc d"), TextPair("x", "y"))
    assert embedded[2].inputs == ("ab", "c") and typed.exit_code == 0
    assert bad.exit_code == 1 and "inputs[1].text" in bad.output and "Traceback" not in bad.output
    assert (nothing.exit_code, len(embedded)) == (2, 3)


async def test_labels_are_one_object_with_json(serve: Serve) -> None:
    async with serve(judge()) as serving:
        done = await asyncio.to_thread(
            run, "classify", "--server", serving.target, "--json", "--raw-scores", "abc", "a"
        )
    scores = [[("bad", 3), ("fine", 0), ("good", 1)], [("bad", 1), ("fine", 1), ("good", 1)]]
    assert json.loads(done.output) == {
        "results": [
            {
                "scores": [{"label": label, "score": score} for label, score in each],
                "prompt_tokens": tokens,
                "cached_tokens": 1,
            }
            for each, tokens in zip(scores, (3, 1), strict=True)
        ]
    }


async def test_what_no_message_can_hold_is_told_in_one_line(serve: Serve) -> None:
    broken = b"a\xff".decode("utf-8", "surrogateescape")
    async with serve(judge(RELEVANCE)) as serving:

        async def told(command: str, *args: str) -> Result:
            return await asyncio.to_thread(run, command, "--server", serving.target, *args)

        texts = [
            await told("classify", broken),
            await told("classify", "--pair", "a", broken),
            await told("score", broken, "a"),
            await told("score", "q", "a", broken),
            await told("embed", broken),
        ]
        numbers = [await told("score", "--top-n", each, "q", "a") for each in (str(2**31), str(-(2**31) - 1))]
        numbers.append(await told("embed", "--dimensions", str(2**31), "a"))
    for each in texts:
        assert (each.exit_code, each.output) == (1, "Error: a text is no valid UTF-8\n")
    assert all(each.exit_code == 2 and "is beyond 32 bits" in each.output for each in numbers)


async def test_documents_are_printed_by_rank(serve: Serve) -> None:
    async with serve(judge(RELEVANCE)) as serving:

        async def printed(*args: str, typed: str | None = None) -> Result:
            return await asyncio.to_thread(run, "score", "--server", serving.target, *args, typed=typed)

        ranked = await printed("--raw-scores", "q", "a", "abc", "ab\nc", "b")
        best = await printed("--raw-scores", "--top-n", "1", "q", "-", typed="a\nabc\n")
        whole = await printed("--raw-scores", "--json", "q", "a", "abc")
        many = await printed("q", *"abcdefghij")
        scored = await printed("--adapter", "french", "--truncate", "q", "a")
        embedded = serving.engine.embedded
        bad = await printed("--top-n", "0", "q", "a")
    assert ranked.output == "1  5.0000  ab c\n2  4.0000  abc\n3  2.0000  a\n4  2.0000  b\n"
    assert best.output == "1  4.0000  abc\n"
    assert json.loads(whole.output) == {
        "results": [
            {"index": index, "score": tokens, "prompt_tokens": tokens, "cached_tokens": 1}
            for index, tokens in enumerate((2, 4))
        ]
    }
    assert [line[:3] for line in many.output.splitlines()][::9] == [" 1 ", "10 "]
    assert scored.output == "1  0.8808  a\n"
    assert [(each.adapter, each.truncate) for each in embedded[-2:]] == [("", False), ("french", True)]
    assert bad.exit_code == 1 and "top_n" in bad.output and "Traceback" not in bad.output


async def test_a_server_that_loads_is_waited_for_as_long_as_is_said(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []

    async def waited(client: object, target: str, seconds: float) -> None:
        told.append((target, seconds))

    monkeypatch.setattr("service.cli.commands.asking.wait_until_loaded", waited)
    async with serve(judge(RELEVANCE)) as serving:
        for args in (("classify", "a"), ("score", "q", "a"), ("embed", "a")):
            done = await asyncio.to_thread(run, args[0], "--server", serving.target, "--wait", "7", *args[1:])
            assert done.exit_code == 0
        assert told == [(serving.target, 7.0)] * 3


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines that commands make for themselves: each takes the last one that is here."""
    made: list[FakeEngine] = []
    monkeypatch.setattr("service.engine.builder.build_core_engine", lambda config, progress: made[-1])
    return made


@pytest.fixture
def model(checkpoint: Path) -> tuple[str, str]:
    return ("--model", str(checkpoint))


def test_the_commands_run_an_engine_of_their_own(engines: list[FakeEngine], model: tuple[str, str]) -> None:
    engines.append(judge())
    classified = run("classify", *model, "--raw-scores", "abc")
    assert classified.stdout == "bad   3.0000\ngood  1.0000\nfine  0.0000\n"
    engines.append(judge(RELEVANCE))
    scored = run("score", *model, "--top-n", "1", "--raw-scores", "q", "a", "abc")
    assert scored.stdout == "1  4.0000  abc\n"
    assert [(each.stopped, len(each.embedded)) for each in engines] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("engine", "args", "told"),
    [
        (judge, ("score", "q", "a"), "the served model has 3 labels and none says relevance; use Classify"),
        (lambda: judge(None), ("classify", "a"), "the served model has no labels to judge by; use Generate or Embed"),
        (judge, ("classify", "--pair", "a", ""), "inputs[0].pair.second: must not be empty"),
        (lambda: judge(RELEVANCE), ("score", "q", "a", ""), "documents[1]: must not be empty"),
    ],
)
def test_an_engine_of_ones_own_refuses_as_a_server_does(
    engines: list[FakeEngine], model: tuple[str, str], engine: Any, args: tuple[str, ...], told: str
) -> None:
    engines.append(engine())
    done = run(args[0], *model, *args[1:])
    assert done.exit_code == 1 and told in done.output and "Traceback" not in done.output
    assert engines[0].stopped == 1


def test_what_the_engine_refuses_has_the_names_of_the_command(engines: list[FakeEngine], model: Any) -> None:
    engines.append(judge(RELEVANCE))
    engines[0].refuse_with = InvalidRequest.of("inputs[1].pair", "has too many tokens")
    assert "documents[1]: has too many tokens" in run("score", *model, "q", "a", "b").output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("classify",), "give a TEXT or a --pair"),
        (("classify", "--pair", "a"), "requires 2 arguments"),
        (("classify", "--adapter", "x", "a"), "--adapter needs --server"),
        (("score", "q"), "Missing argument 'DOCUMENT...'"),
        (("score", "--adapter", "x", "q", "a"), "--adapter needs --server"),
        (("score", "q", "-"), "standard input holds no text"),
    ],
)
def test_what_says_nothing_is_refused_at_once(args: tuple[str, ...], told: str) -> None:
    done = run(*args, typed="")
    assert done.exit_code == 2 and told in done.output


def test_the_commands_teach() -> None:
    classify, score = (run(name, "--help").output for name in ("classify", "score"))
    assert 'slipstream classify --model DIR "' in classify and "--pair FIRST SECOND" in classify
    assert 'slipstream score --model DIR "' in score and "--top-n N" in score
    for shown in (classify, score):
        assert "--raw-scores" in shown and "--label-tokens" in shown and "--pair-template" in shown
        assert "--port" not in shown and "--seed" not in shown
    listed = run("--help").output
    assert "\n  classify " in listed and "\n  score " in listed
