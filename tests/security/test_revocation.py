"""What a token file that is no longer in order keeps alive: never a token that was taken out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from service.access import reloaded_file
from service.access.reloaded_file import Reloaded
from service.access.token_file import TokenBook, token_file
from service.client import CallFailed, SlipstreamClient
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.fakes.granted import granted
from tests.support.log_lines import LogLines
from tests.support.servers import Serve
from tests.support.within import within

ALICE, BOB, CAROL = ("alice-0123456789abcdef", "bobby-0123456789abcdef", "carol-0123456789abcdef")
BOTH = f"alice:{ALICE}\nbob:{BOB}\n"


class Clock:
    """`time.monotonic` of `service.access.reloaded_file`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(reloaded_file, "time", found)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tokens"
    found.write_text(BOTH)
    return found


def holds(file: Reloaded[TokenBook]) -> str:
    """Whose tokens are good."""
    book = file.current()
    return "".join(name for name, token in (("a", ALICE), ("b", BOB), ("c", CAROL)) if book.find(token))


SPOILT: dict[str, tuple[bytes, str]] = {
    "a bad line, one token gone": (f"bob:{BOB}\nshort\n".encode(), "b"),
    "a bad line before it": (f"!\nbob:{BOB}\n".encode(), "b"),
    "bytes that are no text": (b"\xff\xfe\n" + f"alice:{ALICE}\n".encode(), "a"),
    "a bad name": (f"a b:{ALICE}\nbob:{BOB}\n".encode(), "ab"),
    "one token twice": (f"alice:{ALICE}\nother:{ALICE}\n".encode(), "a"),
    "a new token": (f"carol:{CAROL}\nbob:{BOB}\nshort\n".encode(), "b"),
    "a token cut short": (f"alice:{ALICE}\nbob:{BOB[:12]}".encode(), "a"),
    "nothing but a comment": (b"# alice:" + ALICE.encode() + b"\n", ""),
    "too large": (b"#" * (reloaded_file.MAX_FILE_BYTES + 1), ""),
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_bad_file_keeps_what_it_is_seen_to_hold_and_nothing_else(path: Path, clock: Clock, why: str) -> None:
    content, left = SPOILT[why]
    file = token_file(path)
    assert holds(file) == "ab" and not file.failed
    clock.now += 10
    path.write_bytes(content)
    for _ in range(3):
        assert holds(file) == left, "a removed token is alive"
        assert file.failed
        clock.now += 10
    path.write_text(BOTH)
    assert (holds(file), file.failed) == ("ab", False)


AWAY: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("why", AWAY)
def test_a_file_that_is_away_is_waited_for_a_moment_and_refuses_everybody_then(
    path: Path, clock: Clock, why: str
) -> None:
    file = token_file(path)
    clock.now += 100
    assert holds(file) == "ab"
    AWAY[why](path)
    # Another process writes it in place just now.
    clock.now += reloaded_file.GRACE_SECONDS / 2
    assert (holds(file), file.failed) == ("ab", False)
    clock.now += reloaded_file.GRACE_SECONDS / 2
    assert (holds(file), file.failed) == ("", True)
    clock.now += 100
    assert (holds(file), file.failed) == ("", True)


@pytest.mark.parametrize("why", AWAY)
def test_a_server_that_was_idle_waits_for_nothing(path: Path, clock: Clock, why: str) -> None:
    """It cannot tell that the file is away since just now, so it takes it to be away since it last looked."""
    file = token_file(path)
    AWAY[why](path)
    clock.now += reloaded_file.GRACE_SECONDS
    assert holds(file) == ""


def test_a_file_that_comes_back_in_time_was_never_away(path: Path, clock: Clock, logged: LogLines) -> None:
    file = token_file(path)
    for _ in range(3):
        path.unlink()
        clock.now += reloaded_file.GRACE_SECONDS / 2
        assert holds(file) == "ab"
        path.write_text(BOTH)
        clock.now += reloaded_file.GRACE_SECONDS / 2
        assert holds(file) == "ab"
    assert "token file" not in logged.text


async def test_streams_of_a_removed_token_end_though_the_file_is_bad(serve: Serve, path: Path) -> None:
    engine = FakeEngine(held(asyncio.Event()))
    async with serve(engine, auth_token_file=str(path), auth_recheck_seconds=0.05) as serving:
        async with (
            SlipstreamClient(serving.target, token=ALICE) as alice,
            SlipstreamClient(serving.target, token=BOB) as bob,
        ):
            stream = alice.generate("hold")
            await anext(stream)
            path.write_text(f"bob:{BOB}\nand a line that is none\n")
            with pytest.raises(CallFailed) as ended:
                async with within(10, "the stream of the removed token ends"):
                    await anext(stream)
            with granted("a call with the token that is left"):
                await bob.tokenize("a")
            with pytest.raises(CallFailed) as again:
                await alice.tokenize("a")
            assert await serving.metric('slipstream_reload_failed{file="tokens"}') == 1
            path.write_text(BOTH)
            with granted("a call with a token that is back"):
                await alice.tokenize("a")
            assert await serving.metric('slipstream_reload_failed{file="tokens"}') == 0
    assert (ended.value.code, ended.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED")
    assert again.value.code is grpc.StatusCode.UNAUTHENTICATED
