"""A chat template that fails tells its operator where, and the log nothing of what a client wrote."""

from __future__ import annotations

import logging

import pytest

from core.errors import InvalidRequest
from core.text.chat_renderer import MOST_TOLD, ChatRenderer
from core.text.conversation import Conversation

SECRET = "what the client wrote"
NAME = "core.text.chat_renderer"


def failed(template: str, times: int = 1) -> None:
    renderer = ChatRenderer(template, {}, 1000)
    try:
        for _ in range(times):
            with pytest.raises(InvalidRequest, match="cannot render these messages"):
                renderer.render(Conversation([{"role": "user", "content": SECRET}]))
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("a\n{% for m in messages %}", "TemplateSyntaxError in line 2: Unexpected end of template"),
        ("a\n\n{{ messages[0]['content'] + 1 }}", "TypeError in line 3"),
        ("a\n{{ messages[7]['content'] }}", "UndefinedError in line 2"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError in line 1"),
        ("{% macro m(t) %}\n{{ t + 1 }}\n{% endmacro %}\n\n{{ m('a') }}", "TypeError in line 2"),
        ("{{ messages[0][messages[0]['content']].x }}", "UndefinedError in line 1"),
    ],
    ids=["syntax", "types", "undefined", "sandbox", "macro", "quoted"],
)
def test_the_log_says_where_it_fails(template: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, NAME):
        failed(template, times=2)
    lines = [each.message for each in caplog.records if each.name == NAME]
    assert len(lines) == 1
    assert lines[0].startswith(f"the chat template failed on a conversation: {says}") and SECRET not in lines[0]


def test_different_failures_are_told_up_to_a_number(caplog: pytest.LogCaptureFixture) -> None:
    renderer = ChatRenderer("", {}, 10)
    with caplog.at_level(logging.WARNING, NAME):
        for number in range(2 * MOST_TOLD):
            renderer._tell(f"cause {number}")
    assert len([each for each in caplog.records if each.name == NAME]) == MOST_TOLD
