"""A server that was told to end ends, whatever hangs in it, and also where its log is not read."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.client import CallFailed, SlipstreamClient
from tests.chaos.process import PATIENCE, ServerProcess
from tests.security.certificates import Authority, needs_openssl
from tests.support.checkpoints import make_checkpoint
from tests.support.fakes.serve_unruly import SECONDS_ENV

MARGIN = 6.0
"""Seconds that ending, flushing and joining may take on two shared cores."""
UNRULY = "tests.support.fakes.serve_unruly"
EXIT_SECONDS = 0.5
"""What the unruly ones that are held up are given to end, and again until the kernel ends them."""
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"


class Unread(ServerProcess):
    """One whose stderr is read only at the end: the pipe holds 64 KiB."""

    def _read_errors(self) -> None:
        self.process.wait()
        super()._read_errors()


@asynccontextmanager
async def served(server: ServerProcess) -> AsyncIterator[SlipstreamClient]:
    server.wait_ready()
    async with server.client() as client:
        yield client


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A checkpoint whose chat template never ends."""
    folder = make_checkpoint("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(ENDLESS)
    return folder


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """Closed at the end."""
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.close()


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    # Threads, and forks, end while they are looked at.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


async def generated(client: SlipstreamClient, text: str) -> None:
    async for _ in client.generate(text, max_tokens=4):
        pass


@pytest.mark.alone
async def test_a_chat_template_without_end_does_not_outlive_its_server(
    endless: Path, servers: list[ServerProcess]
) -> None:
    server = ServerProcess(program="service", forked=True, model=endless, device="cpu", drain_grace=0.5, native="off")
    servers.append(server)
    async with served(server) as client:
        asking = [asyncio.create_task(_told(client)) for _ in range(8)]
        async with asyncio.timeout(PATIENCE):
            while not any(map(_works, _family(server.pid))):
                await asyncio.sleep(0.02)
        family = _family(server.pid)
        server.send(signal.SIGTERM)
        code, seconds = await server.exit_code(PATIENCE)
        codes = set(await asyncio.gather(*asking))
    assert code == 0 and seconds < MARGIN
    assert codes <= {"UNAVAILABLE", "INVALID_ARGUMENT", "CANCELLED"}, codes
    async with asyncio.timeout(PATIENCE):
        while any(Path(f"/proc/{pid}").exists() for pid in family):
            await asyncio.sleep(0.02)
    assert "did not end" not in server.errors


@pytest.mark.alone
async def test_a_chat_template_without_end_costs_only_its_own_calls(
    endless: Path, servers: list[ServerProcess]
) -> None:
    server = ServerProcess(program="service", forked=True, model=endless, device="cpu", native="off")
    servers.append(server)
    async with served(server) as client:
        asking = [asyncio.create_task(_told(client)) for _ in range(3)]
        async with asyncio.timeout(PATIENCE):
            while not any(map(_works, _family(server.pid))):
                await asyncio.sleep(0.02)
        assert await client.tokenize("hello there")
        assert not all(each.done() for each in asking), "texts need none of what templates hold"
        await generated(client, "hello")
        assert await asyncio.gather(*asking) == ["INVALID_ARGUMENT"] * 3


async def _told(client: SlipstreamClient) -> str:
    """The name of the status that a chat ended with."""
    try:
        async for _ in client.generate([{"role": "user", "content": "hi"}]):
            pass
    except CallFailed as failed:
        return failed.code.name
    return "OK"


def _family(pid: int) -> list[int]:
    """Children and their children."""
    children = children_of(pid)
    return [*children, *(each for child in children for each in children_of(child))]


def _works(pid: int) -> bool:
    """Whether a process that loaded nothing has used a third of a second: a fork in a template."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[1]) != 1 and not children_of(pid) and int(fields[11]) > 30


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started meanwhile have `EXIT_SECONDS` to end."""
    monkeypatch.setenv(SECONDS_ENV, str(EXIT_SECONDS))


@pytest.mark.alone
@pytest.mark.usefixtures("hurried")
async def test_a_thread_that_never_ends_is_named_and_left(servers: list[ServerProcess]) -> None:
    server = ServerProcess(program=UNRULY)
    servers.append(server)
    async with served(server) as client:
        await generated(client, "stuck")
        server.send(signal.SIGTERM)
        code, seconds = await server.exit_code(PATIENCE)
    server.close()
    assert code == 0 and seconds < EXIT_SECONDS + MARGIN
    assert "held up by stuck-in-a-library (" in server.errors


def test_a_process_that_failed_and_is_held_up_ends_as_one_that_failed() -> None:
    """What restarts it looks at the code."""
    held_up = "threading.Thread(target=threading.Event().wait, name='stuck').start()"
    script = f"import threading; from service.process.exit_guard import leave_within; {held_up}; leave_within(3, 0.01)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 3 and "held up by stuck (" in done.stderr, done.stderr


@pytest.mark.alone
@pytest.mark.usefixtures("hurried")
async def test_a_thread_that_keeps_the_interpreter_is_ended_by_the_system(servers: list[ServerProcess]) -> None:
    server = ServerProcess(program=UNRULY)
    servers.append(server)
    async with served(server) as client:
        await generated(client, "hog")
        server.send(signal.SIGTERM)
        code, seconds = await server.exit_code(PATIENCE)
    assert code == -signal.SIGALRM and seconds < 2 * EXIT_SECONDS + MARGIN


@pytest.mark.alone
async def test_a_log_that_is_not_read_holds_up_no_call_and_no_signal(servers: list[ServerProcess]) -> None:
    server = Unread(program=UNRULY)
    servers.append(server)
    async with served(server) as client:
        async with asyncio.timeout(PATIENCE):
            await generated(client, "flood")
            for _ in range(20):
                await asyncio.gather(*(generated(client, "hello") for _ in range(20)))
        server.send(signal.SIGTERM)
        code, seconds = await server.exit_code(PATIENCE)
    assert code == 0 and seconds < MARGIN


async def test_a_log_that_is_read_late_says_how_much_is_missing(servers: list[ServerProcess]) -> None:
    server = ServerProcess(program=UNRULY)
    servers.append(server)
    async with served(server) as client:
        await generated(client, "flood")
        server.send(signal.SIGTERM)
        await server.exit_code(PATIENCE)
    server.close()
    lines = server.errors.splitlines()
    written = sum(" flood: line " in line for line in lines)
    dropped = sum(int(line.split()[1]) for line in lines if line.endswith("it is read too slowly"))
    assert written + dropped == 20_000


@needs_openssl
async def test_the_transport_writes_nothing_that_clients_make_it_write(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    """A line for each handshake that is none, from the thread that serves all connections, would be theirs to cause."""
    leaf = Authority(tmp_path, "authority").issue("server")
    # gRPC reads how much it is to write when it is imported.
    server = ServerProcess(program=UNRULY, forked=False, tls_cert=leaf.cert, tls_key=leaf.key)
    servers.append(server)
    server.wait_ready()
    for number in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
            connection.settimeout(PATIENCE)
            while connection.recv(4096):
                pass
    server.send(signal.SIGTERM)
    code, _ = await server.exit_code(PATIENCE)
    server.close()
    assert (code, server.errors) == (0, "")
