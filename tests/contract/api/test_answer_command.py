"""`slipstream generate --chat` with tools: what it asks for, of a server and of an engine here, and how it looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from core.types.chat import AnswerKind, AnswerPart, ToolCall, ToolMode
from core.types.io import Delta, GenerateRequest
from service.cli.cli import cli
from service.cli.commands.answers import AskedAnswer, ShownParts
from tests.contract.api.test_answers import checkpoint, tool
from tests.support.fakes.fake_engine import FakeEngine, Step, finished, info_with
from tests.support.servers import Serve

KNOWN = info_with(answer_form="hermes", grammar_backend="llguidance")


def answering(request: GenerateRequest) -> Iterator[Step]:
    """A thought and a text in two pieces each, and two calls."""
    call = AnswerPart(AnswerKind.CALL, call=ToolCall("look", '{"who": "é"}', "c1"))
    yield Delta(0, 0, (11,), parts=(AnswerPart(AnswerKind.REASONING, "h"),))
    yield Delta(0, 1, (12,), parts=(AnswerPart(AnswerKind.REASONING, "m"), AnswerPart(AnswerKind.CONTENT, "ye")))
    yield Delta(0, 2, (12,), parts=(AnswerPart(AnswerKind.CONTENT, "s"), call, call))
    yield finished(0, 3)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([tool("look"), tool("é")], ensure_ascii=False), encoding="utf-8")
    return str(path)


async def test_parts_of_an_answer_have_lines_of_their_own(serve: Serve, tools: str) -> None:
    async with serve(FakeEngine(answering, KNOWN)) as serving:

        async def printed(*args: str) -> Result:
            asked = ["generate", "--server", serving.target, "--chat", *args, "hi"]
            return await asyncio.to_thread(CliRunner().invoke, cli, asked, color=False)

        told = await printed("--tools", tools, "--tool-choice", "look", "--parse-answer")
        for choice in ("none", "required", "auto"):
            assert (await printed("--tools", tools, "--tool-choice", choice)).exit_code == 0
        asked = [stream.request for stream in serving.engine.streams]
    assert told.output == 'hm\nyes\nlook({"who": "é"})\nlook({"who": "é"})\n'
    assert [json.loads(each)["function"]["name"] for each in asked[0].chat_tools] == ["look", "é"]
    assert [each.parse_answer for each in asked] == [True, False, False, False]
    required = ToolMode.REQUIRED
    assert [each.tool_mode for each in asked] == [required, ToolMode.NONE, required, ToolMode.AUTO]
    assert [each.tool_name for each in asked] == ["look", "", "", ""]


def test_an_engine_here_calls_what_is_required(tmp_path: Path, tools: str) -> None:
    given = ["generate", "--model", checkpoint(tmp_path), "--chat", "--max-tokens", "600", "--seed", "1"]
    asked = [*given, "--tools", tools, "--tool-choice", "look", "--parse-answer", "where?"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    *thought, call = done.stdout.splitlines()
    name, _, arguments = call.partition("(")
    assert name == "look" and json.loads(arguments.removesuffix(")"))["far"] <= 99, (thought, call)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--parse-answer"], "go with --chat"),
        (["--tool-choice", "auto"], "go with --chat"),
        (["--chat", "--tool-choice", "required"], "goes with --tools"),
        (["--chat", "--tools", "{}"], "has no list, but dict"),
        (["--chat", "--tools", "[{]"], "is no JSON"),
    ],
)
def test_options_that_say_nothing_together_are_refused(tmp_path: Path, args: list[str], says: str) -> None:
    if "--tools" in args:
        file = tmp_path / "tools.json"
        file.write_text(args[-1])
        args = [*args[:-1], str(file)]
    done = CliRunner().invoke(cli, ["generate", *args, "hi"])
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ("", ToolMode.AUTO, ""),
        ("auto", ToolMode.AUTO, ""),
        ("none", ToolMode.NONE, ""),
        ("required", ToolMode.REQUIRED, ""),
        ("look", ToolMode.REQUIRED, "look"),
    ],
)
def test_an_engine_here_is_asked_by_mode_or_name(choice: str, mode: ToolMode, name: str) -> None:
    asked = AskedAnswer((), choice, parsed=True)
    assert (asked.mode, asked.name) == (mode, name)


def test_on_a_terminal_thoughts_are_dim_and_calls_bold() -> None:
    parts = [("reasoning", "h", None), ("content", "y", None), ("tool_call", "", ToolCall("f", "{}"))]
    assert ShownParts().text(parts) == "\x1b[2mh\x1b[0m\ny\n\x1b[1mf({})\x1b[0m"


def test_tools_may_be_ruled_out_where_there_are_none() -> None:
    options = {"tools": None, "tool_choice": "none", "parse_answer": False}
    assert AskedAnswer.taken_from(options, chat=True).choice == "none"
