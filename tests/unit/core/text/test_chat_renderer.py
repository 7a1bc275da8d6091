"""Chat templates run where they can be ended: same text as the library's, bounded time, memory and characters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from core.errors import Draining, InvalidRequest, RequestFailed, SlipstreamError
from core.text import chat_renderer
from core.text.chat_renderer import ChatRenderer
from core.text.conversation import Conversation
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from tests.support.repository import ROOT
from tests.support.until import eventually
from tests.unit.core.text.checkpoints import byte_level

PATIENCE = 60.0
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
"""A range has at most 100,000 in the sandbox; two loops are ten thousand million."""
IF_ASKED = "{% if messages[0]['content'] == 'endless' %}" + ENDLESS + "{% endif %}{{ messages[0]['content'] }}"


def said(text: str) -> Conversation:
    return Conversation([{"role": "user", "content": text}])


@pytest.fixture
def renderer() -> Iterator[ChatRenderer]:
    """Of a template that runs for ever when it is asked to; a fifth of a second is its limit."""
    made = ChatRenderer(IF_ASKED, {}, 1000, seconds=0.2)
    yield made
    made.close()


def told(renderer: ChatRenderer, text: str) -> str:
    """What becomes of a chat, in words."""
    try:
        return renderer.render(said(text))
    except SlipstreamError as error:
        return repr(error)


def forks_of(pid: int) -> list[int]:
    """Children of a process."""
    return [int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def only_process(renderer: ChatRenderer) -> int:
    (process,) = [each._process for each in renderer._processes if each._process is not None]
    return process.pid


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}",
        "{{ messages | tojson(indent=2) }}{% if add_generation_prompt %}|>{% endif %}{{ tools }}{{ documents }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if loop.index == 2 %}"
        "{% break %}{% endif %}{% endfor %}{{ ns.n }} {{ dict(a=1) }} {{ strftime_now('%Y')[:2] }}",
        "{% generation %}{{ messages[-1].content | upper }}{% endgeneration %}  {%- if true %}   x\n{% endif %}\n",
    ],
    ids=["loop", "tojson", "namespace and controls", "generation"],
)
def test_the_text_is_that_of_the_library(tmp_path: Path, template: str) -> None:
    folder = byte_level(tmp_path / "model", template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    chat = [ChatMessage("system", " Grüße \n"), ChatMessage("user", "<&>'\"\u2028 日本"), ChatMessage("user", "")]
    turns = [{"role": turn.role, "content": turn.content} for turn in chat]
    expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer.load(folder)
    assert ours.chats is not None, "in a process of its own"
    assert ours.render_chat(chat) == expected


def test_the_first_chat_is_rendered_by_the_process_that_was_started_for_it(renderer: ChatRenderer) -> None:
    renderer.start()
    process = only_process(renderer)
    assert renderer.render(said("first")) == "first"
    assert [each._process.pid for each in renderer._processes if each._process is not None] == [process]


def test_a_template_without_end_is_ended_and_the_next_chat_is_rendered(renderer: ChatRenderer) -> None:
    assert renderer.render(said("before")) == "before"
    process = only_process(renderer)
    for _ in range(3):
        assert told(renderer, "endless") == "InvalidRequest('chat: the chat template takes longer than 0.2 s')"
        assert renderer.render(said("after")) == "after"
    assert only_process(renderer) == process, "a fork was ended, not the process that took a second to start"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 2000 }}", "more than 1000 characters"),
        ("{{ 'x' * 10**9 }}", "cannot render"),
        ("{% set a = ['x' * 2**20] %}{{ (a * 2**20) | join }}", "cannot render|takes longer"),
        ("{{ 7 ** (7 ** 9) }}", "takes longer|cannot render"),
    ],
    ids=["long", "memory while compiling", "memory", "a number"],
)
def test_a_template_is_bounded_in_characters_memory_and_arithmetic(template: str, reason: str) -> None:
    renderer = ChatRenderer(template, {}, 1000, seconds=0.5)
    with pytest.raises(InvalidRequest, match=reason):
        renderer.render(said("hi"))
    renderer.close()


def test_a_template_at_work_ends_with_the_renderer() -> None:
    renderer, raised = ChatRenderer(IF_ASKED, {}, 1000, seconds=600.0), []
    assert renderer.render(said("ready")) == "ready"
    process = only_process(renderer)
    (fork,) = forks_of(process)

    def ask() -> None:
        try:
            renderer.render(said("endless"))
        except BaseException as error:
            raised.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    eventually(lambda: cpu_seconds(fork) > 0.1, PATIENCE)
    renderer.close()
    asking.join(PATIENCE)
    assert not asking.is_alive() and isinstance(raised[0], Draining)
    eventually(lambda: not alive(process) and not alive(fork), PATIENCE)


def test_a_fork_that_died_between_two_chats_gives_no_answer_to_another(renderer: ChatRenderer) -> None:
    assert renderer.render(said("one")) == "one"
    (fork,) = forks_of(only_process(renderer))
    os.kill(fork, signal.SIGKILL)
    assert [told(renderer, each) for each in ("two", "three", "four")] == ["two", "three", "four"]


def test_a_process_that_died_is_started_again(renderer: ChatRenderer) -> None:
    assert renderer.render(said("one")) == "one"
    os.killpg(only_process(renderer), signal.SIGKILL)
    with pytest.raises(RequestFailed):
        renderer.render(said("lost"))
    assert renderer.render(said("two")) == "two"


def test_a_machine_without_a_processor_for_it_refuses_nothing(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped is what a process looks like that gets no core: its time of the clock ends, its time of work does not."""
    assert renderer.render(said("one")) == "one"
    monkeypatch.setattr(chat_renderer, "PATIENCE_SECONDS", 0.3)
    os.killpg(only_process(renderer), signal.SIGSTOP)
    assert told(renderer, "stopped").startswith("Overloaded(")
    monkeypatch.undo()
    assert renderer.render(said("two")) == "two"


def test_chats_that_come_at_once_keep_their_own_text(renderer: ChatRenderer) -> None:
    wrong: list[str] = []

    def ask(name: str) -> None:
        for number in range(50):
            text = f"{name} {number}"
            if renderer.render(said(text)) != text:
                wrong.append(text)

    asking = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for each in asking:
        each.start()
    for each in asking:
        each.join(PATIENCE)
    assert not any(each.is_alive() for each in asking) and not wrong


def test_it_ends_when_its_server_is_killed() -> None:
    script = (
        "import sys\n"
        "from core.text.conversation import Conversation\n"
        "from core.text.chat_renderer import ChatRenderer\n"
        f"renderer = ChatRenderer({IF_ASKED!r}, {{}}, 1000, seconds=1.0)\n"
        "renderer.render(Conversation([{'content': 'ready'}]))\n"
        "print(renderer._processes[0]._process.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "renderer.render(Conversation([{'content': 'endless'}]))\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes) as server:  # type: ignore[call-overload]
        process = int(server.stdout.readline())
        (fork,) = forks_of(process)
        server.stdin.write("\n")
        server.stdin.flush()
        eventually(lambda: cpu_seconds(fork) > 0.1, PATIENCE)
        server.kill()
    eventually(lambda: not alive(process) and not alive(fork), PATIENCE)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Of a processor; what has used some since it was idle is at work."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
