"""The process of a chat renderer: templates run in it, so that a template that never ends can be killed.

Run as a module by `core.text.chat_renderer`; frames of JSON in and out, each behind its length. The first frame is the
template with its special tokens. Rendering happens in a fork: the kernel ends that fork when it used its seconds, and
another one, with everything imported, takes its place within milliseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import traceback
from collections.abc import Mapping
from typing import Any, Final

import jinja2

from core.text.lone_import import import_alone

LENGTH_BYTES: Final = 4
TEMPLATE_FILES: Final = frozenset({"<template>", "<unknown>"})
"""What Jinja calls a template that comes from no file, in tracebacks."""
_MAX_REASON_CHARS: Final = 200


def main() -> None:
    """Answer requests until the input ends, because the server closed it or has exited."""
    # The whole of `transformers` looks through the files of all its architectures, which takes most of a second.
    import_alone("transformers.utils.chat_template_utils")
    setup = _read()
    if setup is None:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Number of the question being rendered, which the fork writes and its parent reads; 0 between two questions.
    current = mmap.mmap(-1, mmap.PAGESIZE)
    _write({"ready": True})
    while True:
        worker = os.fork()
        if worker == 0:
            _work(setup, current)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if code == 0:
            return
        _write({"number": int.from_bytes(current[:8]), "out_of_time": code == -signal.SIGPROF, "ended": code})
        current[:8] = bytes(8)


def _work(setup: Mapping[str, Any], current: mmap.mmap) -> None:
    _limit_memory(setup["memory_bytes"])
    while (question := _read()) is not None:
        current[:8] = int(question["number"]).to_bytes(8)
        # Time of this process on a processor; the default of SIGPROF ends it, whatever it does.
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        answer = render(setup["template"], setup["special_tokens"], question, setup["max_chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        current[:8] = bytes(8)
        _write({"number": question["number"], **answer})


def render(
    template: str, special: Mapping[str, Any], conversation: Mapping[str, Any], max_chars: int
) -> dict[str, Any]:
    """`text`; or `too_long`, `refused` with the words that the template chose, `failed` with words for its operator.

    `conversation`: fields of a `core.text.conversation.Conversation`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[conversation["turns"]],
            tools=conversation["tools"] or None,
            chat_template=template,
            add_generation_prompt=True,
            **special,
            **conversation["arguments"],
        )
    except Exception as error:  # a template can fail in any way it likes
        reason = template_reason(error)
        return {"refused": reason} if reason else {"failed": _cause(error)}
    text: str = rendered[0][0]
    return {"text": text} if len(text) <= max_chars else {"too_long": True}


def template_reason(error: Exception) -> str | None:
    """The part of a template's failure that a client may read: the template's own message, nothing of Python's."""
    # `raise_exception` raises the base class itself; its subclasses are Jinja's view of a broken template.
    if type(error) is not jinja2.TemplateError or not error.message:
        return None
    lines = error.message.strip().splitlines()
    return lines[0][:_MAX_REASON_CHARS] if lines else None


def _cause(error: Exception) -> str:
    """What the operator may read of it: where the template fails, and why if that quotes nothing of a conversation."""
    found = type(error).__name__
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{found} in line {error.lineno}: {(error.message or '')[:_MAX_REASON_CHARS]}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in TEMPLATE_FILES]
    return f"{found} in line {lines[-1]}" if lines else found


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))


def _read() -> Any:
    """The next frame; None at the end. Unbuffered: bytes that one fork has not read are left for the next fork."""
    length = _exactly(LENGTH_BYTES)
    body = None if length is None else _exactly(int.from_bytes(length))
    return None if body is None else json.loads(body)


def _exactly(count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        piece = os.read(0, count - len(found))
        if not piece:
            return None
        found += piece
    return bytes(found)


def _write(message: dict[str, Any]) -> None:
    left = memoryview(frame(message))
    while left:
        left = left[os.write(1, left) :]


def frame(message: Mapping[str, Any]) -> bytes:
    """A message, preceded by its length."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(LENGTH_BYTES) + body


if __name__ == "__main__":
    main()
