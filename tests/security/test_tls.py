"""TLS and mutual TLS on real sockets: rotated under load, refused when wrong, and never a broken stream."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from core.errors import ConfigError, StartupError
from service.access.tls_credentials import ClientTls
from service.access.tls_files import tls_files
from service.client import CallFailed, Chunk, SlipstreamClient
from service.config.server_config import ServerConfig
from service.server.startup_checks import check_security
from tests.security.certificates import Authority, Pair, needs_openssl
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.log_lines import LogLines
from tests.support.scorecard import Scorecard
from tests.support.servers import Serve, Serving

pytestmark = needs_openssl

STREAMS = 32


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ca")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def first(authority: Authority) -> Pair:
    return authority.issue("server-1")


@pytest.fixture(scope="module")
def second(authority: Authority) -> Pair:
    return authority.issue("server-2")


def install(pair: Pair, folder: Path) -> dict[str, str]:
    """Put the pair where the server looks, each file by a rename; the settings that name them."""
    for source, name in ((pair.cert, "tls.crt"), (pair.key, "tls.key")):
        fresh = folder / f"{name}.fresh"
        shutil.copy(source, fresh)
        fresh.replace(folder / name)
    return {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


async def serial(serving: Serving, authority: Authority) -> str:
    """Serial number of the certificate that a new connection is shown."""

    def shake() -> str:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", serving.server.port), timeout=10) as raw:
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as secured:
                return str((secured.getpeercert() or {})["serialNumber"])

    return await asyncio.to_thread(shake)


@asynccontextmanager
async def client(serving: Serving, authority: Authority, own: Pair | None = None) -> AsyncIterator[SlipstreamClient]:
    files = (str(authority.cert), own and str(own.cert), own and str(own.key))
    # Connections would otherwise be shared between clients of the same arguments.
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with SlipstreamClient(serving.target, options, tls=ClientTls.read(*files)) as made:
        yield made


async def refused(serving: Serving, authority: Authority, own: Pair | None = None) -> bool:
    """Whether a new connection gets no answer."""
    async with client(serving, authority, own) as made:
        try:
            async with asyncio.timeout(5):
                await made.tokenize("a")
        except (CallFailed, TimeoutError) as error:
            return isinstance(error, TimeoutError) or error.code is grpc.StatusCode.UNAVAILABLE
        return False


async def test_rotation_under_load_breaks_no_stream(
    serve: Serve, authority: Authority, first: Pair, second: Pair, tmp_path: Path, scorecard: Scorecard
) -> None:
    gate = asyncio.Event()
    broken: list[CallFailed] = []
    calls = 0

    async def load(made: SlipstreamClient, stop: asyncio.Event) -> None:
        nonlocal calls
        while not stop.is_set():
            try:
                await made.tokenize("a")
                calls += 1
            except CallFailed as error:
                broken.append(error)

    async with serve(FakeEngine(held(gate, after=3)), **install(first, tmp_path)) as serving:
        async with client(serving, authority) as old:
            streams = [old.generate("hi") for _ in range(STREAMS)]
            for each in streams:
                await anext(each)
            stop = asyncio.Event()
            loading = asyncio.create_task(load(old, stop))
            assert await serial(serving, authority) == first.serial
            install(second, tmp_path)
            stale = int(await serial(serving, authority) != second.serial)
            async with client(serving, authority) as new:
                assert await new.tokenize("a") == [1, 97]
            gate.set()
            rest = await asyncio.gather(*(collect(each) for each in streams))
            stop.set()
            await loading
    scorecard(37, f"of {STREAMS} streams, whole after a rotation", rest.count(7), equals=STREAMS)
    scorecard(37, "calls beside them", calls, at_least=1)
    scorecard(37, "of these, broken", len(broken), equals=0)
    scorecard(37, "new connections that were shown the old certificate", stale, equals=0)


async def collect(stream: AsyncIterator[object]) -> int:
    return len([event async for event in stream if isinstance(event, Chunk)])


async def test_an_authority_can_be_changed_too(
    serve: Serve, authority: Authority, stranger: Authority, first: Pair, tmp_path: Path
) -> None:
    async with serve(**install(first, tmp_path)) as serving:
        assert await refused(serving, stranger)
        install(stranger.issue("server"), tmp_path)
        assert await refused(serving, authority)
        assert not await refused(serving, stranger)


async def test_a_bad_pair_is_not_taken(
    serve: Serve, authority: Authority, first: Pair, second: Pair, tmp_path: Path, logged: LogLines
) -> None:
    async with serve(**install(first, tmp_path)) as serving:
        cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
        # Half of a rotation, then rubbish, then nothing.
        shutil.copy(second.cert, cert)
        assert await serial(serving, authority) == first.serial
        key.write_text("-----BEGIN PRIVATE KEY-----\nrubbish\n-----END PRIVATE KEY-----\n")
        assert await serial(serving, authority) == first.serial
        cert.unlink()
        assert await serial(serving, authority) == first.serial
        install(second, tmp_path)
        assert await serial(serving, authority) == second.serial
    assert "do not belong together" in logged.text and "does not exist" in logged.text
    assert "PRIVATE KEY" not in logged.text and "rubbish" not in logged.text


async def test_mutual_tls_takes_only_clients_of_its_authority(
    serve: Serve, authority: Authority, stranger: Authority, first: Pair, tmp_path: Path, scorecard: Scorecard
) -> None:
    settings = {**install(first, tmp_path), "tls_client_ca": str(authority.cert), "tls_client_names": "*"}
    async with serve(**settings) as serving:
        verdicts = {
            "missing": await refused(serving, authority),
            "stranger's": await refused(serving, authority, stranger.issue("client")),
            "expired": await refused(serving, authority, authority.issue("late", days=0)),
            "plaintext": await plaintext_refused(serving),
        }
        refusals = [name for name, answer in verdicts.items() if answer]
        scorecard(37, "client certificates refused", refusals, equals=list(verdicts))
        assert not await refused(serving, authority, authority.issue("client"))
        # Metrics are plain HTTP on an address of their own, whatever the gRPC port does.
        assert "slipstream_ready 1.0" in await serving.metrics()


async def plaintext_refused(serving: Serving) -> bool:
    with pytest.raises(CallFailed) as failed:
        async with asyncio.timeout(5):
            await serving.client.tokenize("a")
    return failed.value.code is grpc.StatusCode.UNAVAILABLE


async def test_the_authority_of_clients_can_be_changed(
    serve: Serve, authority: Authority, stranger: Authority, first: Pair, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    shutil.copy(authority.cert, ca)
    async with serve(**install(first, tmp_path), tls_client_ca=str(ca), tls_client_names="*") as serving:
        own = stranger.issue("client")
        assert await refused(serving, authority, own)
        shutil.copy(stranger.cert, ca)
        assert not await refused(serving, authority, own)


def spoilt(first: Pair, second: Pair, folder: Path) -> list[tuple[dict[str, str], str]]:
    """Settings that cannot work, and what must be told."""
    rubbish = folder / "rubbish"
    rubbish.write_text("rubbish")
    good = {"tls_cert": str(first.cert), "tls_key": str(first.key)}
    any_client = good | {"tls_client_names": "*"}
    return [
        (good | {"tls_key": str(second.key)}, "do not belong together"),
        (good | {"tls_cert": str(rubbish)}, "are not a PEM certificate and unencrypted key"),
        (good | {"tls_key": str(rubbish)}, "are not a PEM certificate and unencrypted key"),
        (good | {"tls_cert": str(folder / "absent")}, "does not exist"),
        (any_client | {"tls_client_ca": str(rubbish)}, "holds no PEM certificate"),
        (any_client | {"tls_client_ca": str(first.key)}, "holds no PEM certificate"),
        (good | {"auth_token_file": str(folder / "absent")}, "does not exist"),
        (good | {"auth_token_file": str(rubbish)}, "line 1: a token has at least"),
    ]


def test_what_cannot_work_is_told_at_the_start_in_one_line(
    config: Callable[..., ServerConfig], first: Pair, second: Pair, tmp_path: Path
) -> None:
    for settings, told in spoilt(first, second, tmp_path):
        with pytest.raises(StartupError, match=told) as refusal:
            check_security(config(**settings))
        assert (refusal.value.exit_code, "\n" in refusal.value.message) == (2, False)
    check_security(config(tls_cert=str(first.cert), tls_key=str(first.key)))
    for halves in ({"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}):
        with pytest.raises(ConfigError):
            config(**halves)


def test_an_encrypted_key_is_refused_without_asking(
    config: Callable[..., ServerConfig], first: Pair, tmp_path: Path
) -> None:
    import subprocess

    locked = tmp_path / "locked.key"
    command = ("openssl", "ec", "-in", str(first.key), "-aes128", "-passout", "pass:secret", "-out", str(locked))
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(StartupError, match="unencrypted"):
        check_security(config(tls_cert=str(first.cert), tls_key=str(locked)))


def test_the_authority_of_clients_is_read_where_one_is_named(
    config: Callable[..., ServerConfig], authority: Authority, first: Pair
) -> None:
    named = {"tls_cert": str(first.cert), "tls_key": str(first.key)}
    named_ca = {"tls_client_ca": str(authority.cert), "tls_client_names": "*"}
    for more, ca in (({}, None), (named_ca, authority.cert.read_bytes())):
        files = tls_files(config(**named, **more))
        assert files is not None and files.current().client_ca == ca


def test_keys_do_not_show(config: Callable[..., ServerConfig], first: Pair) -> None:
    files = tls_files(config(tls_cert=str(first.cert), tls_key=str(first.key)))
    assert files is not None
    own = ClientTls.read(None, str(first.cert), str(first.key))
    shown = repr(files.current()) + repr(own) + repr(vars(files))
    assert "PRIVATE" not in shown
