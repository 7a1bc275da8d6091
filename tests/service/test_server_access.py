"""How a command reaches a server: the first token of a file with every call, and TLS where an authority is named."""

from __future__ import annotations

from pathlib import Path

from service.server_access import ServerAccess
from tests.fakes.granted import granted
from tests.security.certificates import Authority, needs_openssl
from tests.service.conftest import Serve

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
