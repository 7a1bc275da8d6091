"""A file system that never answers holds up one thread, and no call."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from core.errors import StartupError
from service.access import reloaded_file, timed_look
from service.access.reloaded_file import Reloaded
from service.access.token_file import token_file
from service.client import SlipstreamClient
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.log_lines import LogLines
from tests.support.servers import Serving
from tests.support.until import eventually

TOKEN = "0123456789abcdefghijklmnopqrstuv"
PATIENCE = 30.0
Serve = Callable[..., AbstractAsyncContextManager[Serving]]


class Mount:
    """What `stat` of the files' directory goes through; while it hangs, callers wait for ever."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = str(folder), monkeypatch
        self.answers = threading.Event()
        self.answers.set()
        self.asked: list[str] = []

    def hang(self) -> None:
        """From now on; until then, a look that a busy machine delays is waited for."""
        self._monkeypatch.setattr(timed_look, "LOOK_SECONDS", 0.25)
        self.asked.clear()
        self.answers.clear()

    def stat(self, path: str | Path, *args: object, **options: object) -> os.stat_result:
        """As `os.stat`."""
        if str(path).startswith(self.folder):
            self.asked.append(threading.current_thread().name)
            self.answers.wait()
        return STAT(path, *args, **options)  # type: ignore[arg-type]


STAT = os.stat


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    made = Mount(tmp_path, monkeypatch)
    monkeypatch.setattr(reloaded_file.os, "stat", made.stat)
    yield made
    made.answers.set()


def test_a_look_that_hangs_is_waited_for_once(
    tmp_path: Path, mount: Mount, logged: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    found = Reloaded("text", (path,), lambda contents: contents[0].decode())
    assert found.current() == "one"
    path.write_text("two")
    monkeypatch.setattr(timed_look, "HUNG_SECONDS", 0.0)
    mount.hang()
    assert found.current() == "one"
    monkeypatch.setattr(timed_look, "LOOK_SECONDS", 3600.0)
    seen: list[str] = []
    looking = threading.Thread(target=lambda: seen.extend(found.current() for _ in range(200)), daemon=True)
    looking.start()
    looking.join(PATIENCE)
    assert seen == ["one"] * 200, "only the first one waits"
    assert mount.asked == ["slipstream-look"], "one thread hangs, however many ask"
    assert logged.text.count("its file system does not answer") == 1
    mount.answers.set()
    eventually(lambda: found.current() == "two")
    assert logged.text.count("its file system answers again") == 1


def test_only_a_look_that_is_late_for_seconds_is_told_of(
    tmp_path: Path, mount: Mount, logged: LogLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine makes one late too."""
    path = tmp_path / "file"
    path.write_text("one")
    found = Reloaded("text", (path,), lambda contents: contents[0].decode())
    monkeypatch.setattr(timed_look, "HUNG_SECONDS", 3600.0)
    mount.hang()
    for _ in range(2):
        assert found.current() == "one"
    path.write_text("two")
    mount.answers.set()
    eventually(lambda: found.current() == "two")
    assert "file system" not in logged.text
    mount.hang()
    eventually(lambda: found.current() == "two" and len(mount.asked) == 1)
    monkeypatch.setattr(timed_look, "HUNG_SECONDS", 0.0)
    eventually(lambda: found.current() == "two" and "its file system does not answer" in logged.text)


def test_what_a_look_raises_is_raised_where_it_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("good")

    def parse(contents: tuple[bytes, ...]) -> str:
        if contents[0] == b"bad":
            raise StartupError("not good")
        return contents[0].decode()

    def spoilt(last: str, contents: tuple[bytes, ...] | None) -> str:
        raise RecursionError("of a library")

    found = Reloaded("text", (path,), parse, spoilt)
    path.write_text("bad")
    with pytest.raises(RecursionError):
        found.current()
    path.write_text("fine")
    assert found.current() == "fine"


def test_calls_that_come_together_share_a_look(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_look, "FRESH_SECONDS", 3600.0)
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    tokens = token_file(path)
    tokens.current()
    mount.asked.clear()
    assert all(tokens.current().find(TOKEN) for _ in range(100)) and not mount.asked


async def test_calls_go_on_while_the_mount_of_the_tokens_hangs(tmp_path: Path, mount: Mount, serve: Serve) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"alice:{TOKEN}\n")
    async with (
        serve(FakeEngine(), auth_token_file=str(path), auth_recheck_seconds=0.05) as serving,
        SlipstreamClient(serving.target, token=TOKEN) as client,
    ):
        async with asyncio.timeout(PATIENCE):
            await client.complete("hello", max_tokens=4)
            mount.hang()
            for _ in range(20):
                await asyncio.gather(*(client.complete("hello", max_tokens=4) for _ in range(10)))
        assert mount.asked == ["slipstream-look"], "the calls asked for the file, and one thread hangs"
