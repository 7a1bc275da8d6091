"""A token may be revoked at any time of a call, not only before it is looked at for the first time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from service.access.token_file import Caller, TokenBook
from service.client import CallFailed, SlipstreamClient
from tests.security.test_authentication import GOOD, OTHER, tokens
from tests.support.fakes.fake_engine import FakeEngine, held
from tests.support.servers import Serve
from tests.support.until import PATIENCE

__all__ = ["tokens"]

RECHECK = 0.05


@pytest.mark.parametrize("looks", [1, 3])
async def test_a_token_revoked_after_it_was_found_listed_ends_its_stream(
    serve: Serve,
    tokens: Path,
    looks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, enough = [], asyncio.Event()
    holds = TokenBook.holds

    def counted(self: TokenBook, caller: Caller) -> bool:
        listed = holds(self, caller)
        found.append(listed)
        if len(found) == looks:
            enough.set()
        return listed

    monkeypatch.setattr(TokenBook, "holds", counted)
    engine = FakeEngine(held(asyncio.Event()))
    async with serve(engine, auth_token_file=str(tokens), auth_recheck_seconds=RECHECK) as serving:
        async with SlipstreamClient(serving.target, token=GOOD) as alice:
            stream = alice.generate("hold")
            await anext(stream)
            looked, _ = await asyncio.wait([asyncio.ensure_future(enough.wait())], timeout=PATIENCE)
            assert looked, f"the token was looked at {len(found)} times"
            assert found == [True] * looks
            fresh = tokens.with_suffix(".new")
            fresh.write_text(f"bob:{OTHER}\n")
            fresh.replace(tokens)
            more = asyncio.ensure_future(anext(stream))
            ended, _ = await asyncio.wait([more], timeout=PATIENCE)
            assert ended, "the stream of a revoked token goes on"
            error = more.exception()
    assert isinstance(error, CallFailed)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED")
    assert found[-1] is False and all(found[:-1]), "and it is not looked at any more"
