"""The sockets of a server process, as the kernel sees them: two that listen, where configured, and none that go out."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from service.client import CallFailed, SlipstreamClient
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard

READY = re.compile(r"serving \S+ on (\S+):(\d+), metrics on http://(\S+):(\d+)/metrics")
LISTEN, ESTABLISHED = 0x0A, 0x01
TOKEN = "a-token-of-this-test"
PROMPT = "a prompt that nobody else should read"


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net/tcp: addresses as the kernel writes them, in hexadecimal."""

    host: str
    port: int
    peer: str
    state: int


def sockets_of(pid: int) -> list[Socket]:
    """TCP sockets, of both families, that the process holds."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
        except OSError:
            continue
        if found:
            inodes.add(found[1])
    held = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes:
                (host, port), peer = words[1].split(":"), words[2]
                held.append(Socket(host, int(port, 16), peer, int(words[3], 16)))
    return held


def is_loopback(address: str) -> bool:
    """Of an address as in /proc/net/tcp: 127/8, ::1, or one of the former written as IPv6."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "00000000000000000000000001000000" or (
        address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    )


@asynccontextmanager
async def process(
    tiny: Path, noted: Path, *args: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, re.Match[str]]]:
    """A server process and what its first line says."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.serve_watched", str(noted), "serve", "--model", str(tiny)),
        *("--port", "0", "--metrics-port", "0", "--drain-linger", "0", "--cpu-threads", "1", *args),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert started.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await started.stdout.readline()).decode()
        found = READY.search(line)
        assert found, line
        yield started, found
    finally:
        if started.returncode is None:
            started.kill()
            await started.communicate()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc/net")
async def test_it_listens_where_it_was_told_and_connects_nowhere(
    tiny: Path, tmp_path: Path, scorecard: Scorecard
) -> None:
    tokens, noted = tmp_path / "tokens", tmp_path / "noted"
    tokens.write_text(f"me:{TOKEN}\n")
    async with process(tiny, noted, "--auth-token-file", str(tokens)) as (server, told):
        listening = {(each.host, each.port) for each in sockets_of(server.pid) if each.state == LISTEN}
        ports = {int(told[2]), int(told[4])}
        scorecard(33, "listening ports", sorted(port for _, port in listening), equals=sorted(ports))
        assert all(is_loopback(host) for host, _ in listening)
        target = f"{told[1]}:{told[2]}"
        async with SlipstreamClient(target, token=TOKEN) as client, SlipstreamClient(target) as nobody:
            await client.complete(PROMPT, max_tokens=4)
            await client.complete([{"role": "user", "content": PROMPT}], max_tokens=4)
            with pytest.raises(CallFailed) as refused:
                await nobody.complete(PROMPT)
            with pytest.raises(CallFailed):
                await client.complete(PROMPT, temperature=-1.0)
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
            open_now = [each for each in sockets_of(server.pid) if each.state != LISTEN]
            assert open_now and all(each.port in ports for each in open_now), "somebody else's port"
        assert (await present(target, "--token-file", str(tokens)))[0] == 0
        code, errors_of_nobody = await present(target)
        assert code == 1 and "UNAUTHENTICATED" in errors_of_nobody
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, errors = await server.communicate()
    assert server.returncode == 0
    looked = noted.read_text().splitlines() if noted.exists() else []
    scorecard(33, "connections opened, names looked up", looked, equals=[])
    logged = errors.decode()
    found = [logged.count(TOKEN), logged.count(PROMPT)]
    scorecard(31, "tokens and prompts in the log", found, equals=[0, 0])


async def test_a_bad_security_setting_is_one_line_and_exit_code_two(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("rubbish")
    for flags, told in (
        (("--auth-token-file", str(tmp_path / "empty")), f"{tmp_path}/empty: holds no token"),
        (
            ("--tls-cert", str(rubbish), "--tls-key", str(rubbish)),
            f"{rubbish} and {rubbish} are not a PEM certificate and unencrypted key",
        ),
        (("--tls-cert", str(rubbish)), "tls_cert and tls_key must be given together"),
    ):
        done = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service", "serve", "--model", str(tiny), "--port", "0", "--metrics-port", "0"),
            *flags,
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            _, errors = await done.communicate()
        assert (done.returncode, errors.decode()) == (2, f"slipstream: {told}\n")


async def present(target: str, *flags: str) -> tuple[int, str]:
    """Exit code and stderr of `slipstream generate --server`."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "generate", "--server", target, "--max-tokens", "3", *flags, "hi"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        _, errors = await done.communicate()
    assert done.returncode is not None
    return done.returncode, errors.decode()
