"""How a command reaches a server: the first token of a file with every call, and TLS where an authority is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from service.cli.cli import cli
from service.cli.server_access import ServerAccess, ServerTarget
from tests.security.certificates import Authority, needs_openssl
from tests.support.fakes.granted import granted
from tests.support.servers import Serve

ALICE, BOB = "a" * 20, "b" * 20


async def test_the_first_token_of_the_file_goes_with_every_call(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    async with serve(auth_token_file=str(tokens)) as serving:
        async with ServerAccess(str(tokens), None, None, None).client(serving.target) as client:
            assert client.metadata == (("authorization", f"Bearer {ALICE}"),)
            assert await client.tokenize("a") == [1, 97]


@needs_openssl
async def test_an_authority_alone_is_enough_for_tls(serve: Serve, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    pair = authority.issue("server")
    async with serve(tls_cert=str(pair.cert), tls_key=str(pair.key)) as serving:
        access = ServerAccess(None, str(authority.cert), None, None)
        async with access.client(serving.target) as client:
            with granted("the server is reached by TLS"):
                assert await client.tokenize("a") == [1, 97]


COMMANDS = (
    ("generate", "x"),
    ("embed", "x"),
    ("classify", "x"),
    ("score", "x", "y"),
    ("adapters", "list"),
    ("adapters", "load", "x"),
    ("adapters", "unload", "x"),
    ("health",),
)
PORTS = "must be between 1 and 65535"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("server", "told"), [("", "must not be empty"), ("127.0.0.1:99999", PORTS)])
def test_every_command_refuses_what_is_no_server(command: tuple[str, ...], server: str, told: str) -> None:
    done = CliRunner().invoke(cli, [*command, "--server", server])
    assert done.exit_code == 2, done.output
    assert "Invalid value for '--server'" in done.output and told in done.output


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", f"127.0.0.1:{'9' * 5000}", "worker:99999", "[::1]:99999"),
        *("dns:worker:99999", "dns:///worker:99999", "DNS://resolver/worker:99999", "ipv6:[::1]:99999"),
        *("ipv4:127.0.0.1:50051,127.0.0.1:99999", "  "),
    ],
)
def test_a_port_that_does_not_exist_is_refused_in_every_scheme(target: str) -> None:
    with pytest.raises(click.BadParameter):
        ServerTarget().convert(target, None, None)


@pytest.mark.parametrize(
    "target",
    [
        *("127.0.0.1:1", "127.0.0.1:65535", "worker.example.com:50051", "worker", "worker:https", "[::1]:50051"),
        *("[::1]", "::1", "127.0.0.1:050051", "dns:worker:50051", "dns:///worker", "dns://resolver:99/worker:50051"),
        *("ipv4:127.0.0.1:50051,127.0.0.1:50052", "ipv6:[::1]:50051", "unix:/run/a:99999", "unix:99999"),
        *("unix:///run/socket", "unix-abstract:name", "vsock:2:99999", "xds:///worker"),
    ],
)
def test_what_grpc_knows_is_passed_on_as_it_is(target: str) -> None:
    assert ServerTarget().convert(target, None, None) == target


async def test_a_server_is_reached_by_its_name_and_by_a_scheme(serve: Serve) -> None:
    async with serve() as serving:
        port = serving.server.port
        for server in (f"localhost:{port}", f"dns:///127.0.0.1:{port}", f"ipv4:127.0.0.1:{port}"):
            done = await asyncio.to_thread(CliRunner().invoke, cli, ["health", "--server", server])
            assert (done.exit_code, done.output) == (0, "SERVING\n")
