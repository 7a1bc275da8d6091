"""Certificates: which names of an authority's may call, when they end, and a renewal with the wrong key, live."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.errors import ConfigError
from service.access.certificate_expiry import earliest_end
from service.access.tls_credentials import ClientTls
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from tests.security.certificates import Authority, Pair, needs_openssl
from tests.security.test_tls import client, install, serial
from tests.support.fakes.granted import granted
from tests.support.servers import Serve, Serving

pytestmark = needs_openssl

FAILED = 'slipstream_reload_failed{file="certificates"}'
EXPIRY = 'slipstream_certificate_expiry_seconds{certificate="%s"}'
DAY = 24 * 3600.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ca")


@pytest.fixture(scope="module")
def first(authority: Authority) -> Pair:
    return authority.issue("server-1", days=1)


@pytest.fixture(scope="module")
def second(authority: Authority) -> Pair:
    return authority.issue("server-2", days=2)


async def refusal(serving: Serving, authority: Authority, own: Pair, token: str | None = None) -> str:
    """How a call with this certificate ends."""
    files = (str(authority.cert), str(own.cert), str(own.key))
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with SlipstreamClient(serving.target, options, tls=ClientTls.read(*files), token=token) as made:
        try:
            await made.tokenize("a")
        except CallFailed as failed:
            return failed.code.name
    return "OK"


async def test_only_listed_names_of_the_authority_may_call(
    serve: Serve, authority: Authority, first: Pair, tmp_path: Path
) -> None:
    listed, other = authority.issue("gateway"), authority.issue("somebody")
    mutual = {**install(first, tmp_path), "tls_client_ca": str(authority.cert)}
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:alice-0123456789abcdef\n")
    found: dict[str, list[str]] = {}
    for names in ("gateway, batch", "*"):
        async with serve(**mutual, tls_client_names=names) as serving:
            found[names] = [await refusal(serving, authority, each) for each in (listed, other)]
    async with serve(**mutual, tls_client_names="gateway", auth_token_file=str(tokens)) as serving:
        token = "alice-0123456789abcdef"
        found["beside a token"] = [await refusal(serving, authority, each, token) for each in (listed, other)]
        found["without one"] = [await refusal(serving, authority, listed)]
    assert found == {
        "gateway, batch": ["OK", "UNAUTHENTICATED"],
        "*": ["OK", "OK"],
        "beside a token": ["OK", "UNAUTHENTICATED"],
        "without one": ["UNAUTHENTICATED"],
    }


def test_an_authority_alone_lets_nobody_in(config: Callable[..., ServerConfig]) -> None:
    with pytest.raises(ConfigError, match="tls_client_ca needs tls_client_names"):
        config(tls_cert="c", tls_key="k", tls_client_ca="ca")
    with pytest.raises(ConfigError, match="tls_client_names needs tls_client_ca"):
        config(tls_cert="c", tls_key="k", tls_client_names="a")
    assert config(tls_cert="c", tls_key="k", tls_client_ca="ca", tls_client_names=" a,b ,").client_names == {"a", "b"}
    assert config(tls_cert="c", tls_key="k", tls_client_ca="ca", tls_client_names=",").client_names == frozenset()


async def test_a_renewal_with_the_key_of_another_serves_the_old_pair_and_says_so(
    serve: Serve, authority: Authority, first: Pair, second: Pair, tmp_path: Path
) -> None:
    async with serve(**install(first, tmp_path)) as serving:
        assert await serving.metric(FAILED) == 0
        install(Pair(second.cert, first.key, ""), tmp_path)
        # Nobody calls: who scrapes is told all the same.
        assert await serving.metric(FAILED) == 1
        assert await serial(serving, authority) == first.serial
        async with client(serving, authority) as made:
            with granted("a call over the old pair"):
                await made.tokenize("a")
        assert await serving.metric(EXPIRY % "server") == pytest.approx(DAY, abs=600)
        install(second, tmp_path)
        assert await serving.metric(FAILED) == 0
        assert await serial(serving, authority) == second.serial
        assert await serving.metric(EXPIRY % "server") == pytest.approx(2 * DAY, abs=600)


async def test_the_end_of_both_certificates_is_told(
    serve: Serve, authority: Authority, first: Pair, tmp_path: Path
) -> None:
    async with serve(**install(first, tmp_path)) as serving:
        assert 'certificate="client_ca"' not in await serving.metrics()
    names = {"tls_client_ca": str(authority.cert), "tls_client_names": "*"}
    async with serve(**install(first, tmp_path), **names) as serving:
        assert await serving.metric(EXPIRY % "client_ca") == pytest.approx(2 * DAY, abs=600)
    async with serve() as serving:
        assert "slipstream_certificate_expiry_seconds{" not in await serving.metrics()


def shown_by_openssl(cert: Path) -> datetime:
    done = subprocess.run(
        ["openssl", "x509", "-enddate", "-noout", "-in", str(cert)], check=True, capture_output=True, text=True
    )
    text = done.stdout.strip().removeprefix("notAfter=").removesuffix(" GMT")
    return datetime.strptime(text, "%b %d %H:%M:%S %Y").replace(tzinfo=UTC)


@pytest.mark.parametrize("days", [-1, 1, 365 * 10, 365 * 40])
def test_the_end_of_a_certificate_is_what_openssl_reads(tmp_path: Path, days: int) -> None:
    """Past 2049 the date has another form."""
    made = Authority(tmp_path, "some").issue("leaf", days=days)
    assert earliest_end(made.cert.read_bytes()) == shown_by_openssl(made.cert)


@pytest.mark.parametrize("year", [1950, 1999, 2000, 2049])
def test_years_of_two_digits_are_those_of_the_standard(tmp_path: Path, year: int) -> None:
    """Nothing is verified here, so a date may be written over."""
    made = Authority(tmp_path, "some").issue("leaf", days=1)
    der = ssl.PEM_cert_to_DER_cert(made.cert.read_text())
    before = f"{shown_by_openssl(made.cert):%y%m%d%H%M%SZ}".encode()
    assert der.count(before) == 1
    made.cert.write_text(ssl.DER_cert_to_PEM_cert(der.replace(before, f"{year % 100:02}0102030405Z".encode())))
    end = earliest_end(made.cert.read_bytes())
    assert end == datetime(year, 1, 2, 3, 4, 5, tzinfo=UTC) == shown_by_openssl(made.cert)


def test_of_a_chain_the_first_end_counts(authority: Authority, first: Pair, second: Pair) -> None:
    chain = second.cert.read_bytes() + b"rubbish\n" + first.cert.read_bytes() + authority.cert.read_bytes()
    end = earliest_end(chain)
    assert end == shown_by_openssl(first.cert)
    assert abs(end - datetime.now(UTC) - timedelta(days=1)) < timedelta(minutes=10)


@pytest.mark.parametrize("cut", [0, 1, 40, 100])
def test_what_is_no_certificate_has_no_end(first: Pair, cut: int) -> None:
    assert earliest_end(first.key.read_bytes()) is None
    lines = first.cert.read_text().splitlines()
    body = "".join(lines[1:-1])[:cut]
    assert earliest_end(f"{lines[0]}\n{body}\n{lines[-1]}\n".encode()) is None
