"""Secrets are renewed as a kubelet renews them, by a link that is swapped, while the container serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.access.tls_credentials import ClientTls
from service.client import CallFailed, Chunk, End, SlipstreamClient
from tests.packaging.image.conftest import Played
from tests.packaging.image.worker import Contents, PlayedWorker, unique
from tests.security.certificates import Authority, Pair, needs_openssl
from tests.support.within import within

pytestmark = [pytest.mark.soak, needs_openssl]

TOKENS, CERT = unique("tokens"), unique("cert")
OLD, NEW = "a" * 32, "b" * 32
VALUES = {"auth": {"existingSecret": TOKENS}, "tls": {"existingSecret": CERT}}
RENEWED_SECONDS = 30.0


def listed(token: str) -> dict[str, bytes]:
    return {"tokens": f"ops:{token}\n".encode()}


def pem(pair: Pair) -> dict[str, bytes]:
    return {"tls.crt": pair.cert.read_bytes(), "tls.key": pair.key.read_bytes()}


async def serial_of(worker: PlayedWorker) -> str:
    """Serial number of the certificate that a new connection gets, as openssl prints it."""
    asked = f"openssl s_client -connect {worker.target} -alpn h2 </dev/null 2>/dev/null | openssl x509 -noout -serial"
    shell = await asyncio.create_subprocess_shell(asked, stdout=asyncio.subprocess.PIPE)
    told, _ = await shell.communicate()
    return told.decode().strip().removeprefix("serial=").lstrip("0")


async def answer(worker: PlayedWorker, authority: Authority, token: str) -> str:
    """The text of a call, or the name of the status with which it failed."""
    tls = ClientTls.read(ca=str(authority.cert))
    async with SlipstreamClient(worker.target, tls=tls, token=token) as client:
        try:
            events = [each async for each in client.generate("27+45=", max_tokens=8)]
        except CallFailed as failed:
            return failed.code.name
    return "".join(each.text for each in events if isinstance(each, Chunk))


async def eventually_answers(worker: PlayedWorker, authority: Authority, token: str, expected: str) -> None:
    async with within(RENEWED_SECONDS, f"a call is answered with {expected}"):
        while await answer(worker, authority, token) != expected:
            await asyncio.sleep(0.1)


@pytest.mark.timeout(400)
async def test_tokens_and_certificates_are_renewed_under_a_stream(played: Played, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    first, second = authority.issue("first"), authority.issue("second")
    contents: Contents = {TOKENS: listed(OLD), CERT: pem(first)}
    worker = await asyncio.to_thread(played(VALUES, contents).start)
    assert worker.probe("liveness") and worker.probe("readiness"), "probes are in plain text, on a port of their own"
    assert await serial_of(worker) == first.serial
    assert (await answer(worker, authority, OLD), await answer(worker, authority, NEW)) == ("72", "UNAUTHENTICATED")

    async with SlipstreamClient(worker.target, tls=ClientTls.read(ca=str(authority.cert)), token=OLD) as client:
        story = client.generate("A story:", max_tokens=1500, ignore_eos=True)
        await anext(story)
        worker.volumes.write_secret("tls", pem(second))
        async with within(RENEWED_SECONDS, "new connections get the new certificate"):
            while await serial_of(worker) != second.serial:
                await asyncio.sleep(0.1)
        *_, last = [each async for each in story]
        assert isinstance(last, End) and last.completion_tokens == 1500, "an open stream is not cut"

    worker.volumes.write_secret("auth", listed(NEW))
    await eventually_answers(worker, authority, NEW, "72")
    assert await answer(worker, authority, OLD) == "UNAUTHENTICATED"
    assert worker.state["RestartCount"] == 0
    assert await asyncio.to_thread(worker.stop) == 0


@pytest.mark.timeout(400)
async def test_a_broken_token_file_is_refused_and_lost_certificates_stay(played: Played, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    pair = authority.issue("first")
    worker = await asyncio.to_thread(played(VALUES, {TOKENS: listed(OLD), CERT: pem(pair)}).start)
    worker.volumes.write_secret("auth", {"tokens": b"ops:short\n"})
    await eventually_answers(worker, authority, OLD, "UNAUTHENTICATED")
    assert "/etc/slipstream/auth/tokens, line 1: a token has at least" in worker.output
    (worker.place("tls") / "..data").unlink()
    worker.volumes.write_secret("auth", listed(OLD))
    await eventually_answers(worker, authority, OLD, "72")
    worker.volumes.write_secret("auth", listed(NEW))
    worker.volumes.write_secret("tls", pem(pair))
    await eventually_answers(worker, authority, NEW, "72")
    assert await answer(worker, authority, OLD) == "UNAUTHENTICATED"
    assert worker.state["RestartCount"] == 0
