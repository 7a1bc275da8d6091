"""Renders conversations in processes of their own, since a template may run for ever and a thread cannot be ended.

A process is started once and kept. Three limits apply to it: processor time per conversation, memory, and the number of
characters in its answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from core.errors import Draining, InvalidRequest, Overloaded, RequestFailed
from core.text.chat_process import LENGTH_BYTES, frame
from core.text.conversation import Conversation

log = logging.getLogger(__name__)

PROCESSES: Final = 2
"""The second one is started when two conversations come at once."""
RENDER_SECONDS: Final = 2.0
"""Processor time for one conversation, in seconds. A megabyte in 500 turns takes 5 ms."""
PATIENCE_SECONDS: Final = 20.0
"""Wall time for one conversation, in seconds, for a machine that has no processor free for it."""
START_SECONDS: Final = 60.0
MEMORY_BYTES: Final = 1 << 29
"""Memory that a process may take beyond what it has once it is ready, in bytes; 512 MiB."""
MOST_TOLD: Final = 20
"""Different failures that are logged."""
PATHS = (str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if path))
"""Where this process found its modules, whatever directory it runs in."""


class ChatRenderer:
    """One template with the special tokens that it may name. All methods may be called from any thread."""

    def __init__(
        self, template: str, special_tokens: Mapping[str, Any], max_chars: int, seconds: float = RENDER_SECONDS
    ) -> None:
        setup = {
            "template": template,
            "special_tokens": dict(special_tokens),
            "max_chars": max_chars,
            "seconds": seconds,
            "memory_bytes": MEMORY_BYTES,
        }
        self._max_chars, self._seconds = max_chars, seconds
        self._told = set[str]()
        self._processes = tuple(_Process(setup) for _ in range(PROCESSES))
        # The last one used is the next one used, so that the others need not even be started.
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for process in reversed(self._processes):
            self._idle.put(process)
        weakref.finalize(self, _close, self._processes)

    def start(self) -> None:
        """Start the first process without waiting for it, so that the first conversation need not."""
        with contextlib.suppress(RequestFailed):  # said again to the first conversation
            self._processes[0].start()

    def render(self, conversation: Conversation) -> str:
        """The prompt that the template makes. Blocks; its limits end it.

        Raises InvalidRequest, field `chat`, where the template refuses, fails, or goes beyond time or characters;
        Overloaded where the machine had no processor for it, RequestFailed without a process, Draining where `close`
        ended it.
        """
        try:
            process = self._idle.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise _no_processor() from None
        try:
            answer = process.ask(asdict(conversation))
        finally:
            self._idle.put(process)
        return self._judged(answer)

    def close(self) -> None:
        """End the processes and what they are rendering. A later conversation would start them again."""
        _close(self._processes)

    def _judged(self, answer: Mapping[str, Any]) -> str:
        if "text" in answer:
            return str(answer["text"])
        if "refused" in answer:
            raise InvalidRequest.of("chat", f"refused by the chat template: {answer['refused']}")
        if "too_long" in answer:
            raise InvalidRequest.of("chat", f"more than {self._max_chars} characters once rendered")
        if answer.get("out_of_time"):
            raise InvalidRequest.of("chat", f"the chat template takes longer than {self._seconds:g} s")
        if "ended" in answer:
            raise RequestFailed("the process that renders chats ended")
        self._tell(str(answer.get("failed", "")))
        raise InvalidRequest.of("chat", "the chat template cannot render these messages")

    def _tell(self, cause: str) -> None:
        """Log a failure of the template, the first time: whether it is broken for all, its operator has to see."""
        if cause not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(cause)
            log.warning("the chat template failed on a conversation: %s", cause)


class _Process:
    """One process, started when first needed and again after it was killed. It renders one conversation at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._number = 0

    def start(self) -> socket.socket:
        """The connection to the process, which is started if it does not run."""
        with self._lock:
            if self._socket is None:
                self._ready, self._socket = False, self._spawn()
            return self._socket

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a question, by its number: no other one's is ever taken for it."""
        connection = self.start()
        self._number += 1
        try:
            if not self._ready:
                connection.settimeout(START_SECONDS)
                connection.sendall(frame(self._setup))
                _receive(connection, START_SECONDS)
                self._ready = True
            connection.settimeout(PATIENCE_SECONDS)
            connection.sendall(frame({"number": self._number, **question}))
            until = time.monotonic() + PATIENCE_SECONDS
            while (answer := _receive(connection, until - time.monotonic())).get("number") != self._number:
                pass  # a fork that ended between two questions
        except TimeoutError:
            self.end()
            raise _no_processor() from None
        except (OSError, EOFError, ValueError):
            ended_by_us = self._socket is not connection
            self.end()
            if ended_by_us:
                raise Draining("the server is shutting down") from None
            raise RequestFailed("the process that renders chats ended") from None
        return answer

    def end(self) -> None:
        """Kill it with its fork, if it runs."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._socket = self._socket, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if connection is not None:
            # Wakes the thread that reads from it; closing alone would not.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "core.text.chat_process"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), **threads},
                    # Ctrl-C at the terminal is for the server, which drains first.
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise RequestFailed("the process that renders chats cannot be started") from error
        return ours


def _close(processes: Sequence[_Process]) -> None:
    for process in processes:
        process.end()


def _receive(connection: socket.socket, seconds: float) -> Mapping[str, Any]:
    """The next frame. Raises TimeoutError, EOFError at the end, and ValueError for bytes that are no frame."""
    until = time.monotonic() + seconds
    length = int.from_bytes(_exactly(connection, LENGTH_BYTES, until))
    answer: Mapping[str, Any] = json.loads(_exactly(connection, length, until))
    return answer


def _exactly(connection: socket.socket, count: int, until: float) -> bytes:
    found = bytearray(count)
    view, have = memoryview(found), 0
    while have < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        got = connection.recv_into(view[have:])
        if got == 0:
            raise EOFError
        have += got
    return bytes(found)


def _no_processor() -> Overloaded:
    return Overloaded("the machine has no processor to render the conversation on", reason="CHAT_TEMPLATE")
