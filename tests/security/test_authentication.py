"""Default deny: every method that is registered, by whomever, needs a listed token; only health does not."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from core.types.io import GenerateRequest
from service.access.auth_interceptor import _Watch
from service.access.caller import caller_name
from service.access.token_file import parse_tokens
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.security import methods, replies
from tests.support.fakes.fake_engine import FakeEngine, count_up, held
from tests.support.log_lines import LogLines
from tests.support.repository import ROOT
from tests.support.scorecard import Scorecard
from tests.support.servers import Serve, loaded
from tests.support.within import within

GOOD = "alpha-0123456789abcdef"
OTHER = "omega-fedcba9876543210"
WRONG = "wrong-0123456789abcdef"
RECHECK = 0.1


def bearer(token: str, scheme: str = "Bearer") -> methods.Metadata:
    return (("authorization", f"{scheme} {token}"),)


REFUSED: dict[str, methods.Metadata] = {
    "none": (),
    "wrong": bearer(WRONG),
    "longer": bearer(GOOD + "x"),
    "shorter": bearer(GOOD[:-1]),
    "case": bearer(GOOD.upper()),
    "empty": bearer(""),
    "basic": bearer(GOOD, "Basic"),
    "no scheme": (("authorization", GOOD),),
    "name and token": bearer(f"alice:{GOOD}"),
    "name": bearer("alice"),
    "other header": (("x-api-key", GOOD),),
    "twice": bearer(GOOD) * 2,
    "wrong first": bearer(WRONG) + bearer(GOOD),
    "long": bearer("a" * 2000),
    "not ascii": (("authorization-bin", b"Bearer " + GOOD.encode()),),  # type: ignore[dict-item]
}

HEALTH = {f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List")}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may call\nalice:{GOOD}\n\nbob:{OTHER}\n")
    return path


async def test_every_registered_method_is_refused_without_a_token(
    config: Callable[..., ServerConfig], tokens: Path, scorecard: Scorecard, logged: LogLines
) -> None:
    with methods.registered() as found:
        server = Server(config(auth_token_file=str(tokens), reflection=True), lambda *_: FakeEngine())
    opened: dict[str, dict[str, str]] = {}
    async with loaded(server), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for kind, metadata in REFUSED.items():
            codes = {name: await methods.code_of(channel, name, each, b"", metadata) for name, each in found.items()}
            opened[kind] = {n: code.name for n, code in codes.items() if code is not grpc.StatusCode.UNAUTHENTICATED}
        for scheme in ("Bearer", "bearer", "BEARER"):
            for name, each in found.items():
                code = await methods.code_of(channel, name, each, b"", bearer(GOOD, scheme))
                assert code is not grpc.StatusCode.UNAUTHENTICATED, name
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/slipstream.v1.InferenceService/Nothing")(b"")
    own = {name for name in found if not name.startswith(("/sglang.", "/vllm."))}
    # The dialects of the gateway are there where its messages are installed.
    assert (len(own), len(found) - len(own)) in ((11 + 3 + 5 + 3 + 1, 0), (11 + 3 + 5 + 3 + 1, 10 + 10)), sorted(found)
    missed = {kind: codes for kind, codes in opened.items() if codes.keys() != HEALTH}
    what = f"of {len(found)} methods x {len(REFUSED)} ways without a token, open other than health"
    scorecard(32, what, missed, equals={})
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not any(secret in logged.text for secret in (GOOD, OTHER, WRONG))


async def test_a_refusal_says_one_closed_thing_and_reads_no_message(serve: Serve, tokens: Path) -> None:
    async with serve(auth_token_file=str(tokens)) as serving:
        method = serving.client.channel.unary_unary("/slipstream.v1.InferenceService/Tokenize")
        texts = set()
        for metadata in REFUSED.values():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                # No protobuf at all: had it been read, this were INVALID_ARGUMENT.
                await method(b"\xff\xff\xff", metadata=metadata)
            failed = replies.read(refused.value, (GOOD, OTHER, WRONG))
            texts.add((failed.code, failed.message, failed.reason))
        assert texts == {(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is needed", "UNAUTHENTICATED")}
        assert serving.engine.streams == []
        page = await serving.metrics()
    assert f'code="UNAUTHENTICATED",method="slipstream.v1.InferenceService/Tokenize"}} {len(REFUSED)}.0' in page
    assert not any(secret in page for secret in (GOOD, OTHER, WRONG))


def held_names(names: list[str | None], gate: asyncio.Event) -> Callable[[GenerateRequest], Any]:
    def script(request: GenerateRequest) -> Any:
        names.append(caller_name.get())
        return held(gate)(request) if request.text == "hold" else count_up(request)

    return script


def _looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """Period and verdict of every look that a live call has at its own token, as they are made."""
    looks: list[tuple[float, bool]] = []
    look = _Watch._look

    def noting(watch: _Watch) -> None:
        looks.append((watch._seconds, watch._still_listed()))
        look(watch)

    monkeypatch.setattr(_Watch, "_look", noting)
    return looks


async def test_a_revoked_token_ends_its_stream_and_no_other(
    serve: Serve, tokens: Path, scorecard: Scorecard, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str | None] = []
    looks = _looks(monkeypatch)
    gate = asyncio.Event()
    engine = FakeEngine(held_names(names, gate))
    async with serve(engine, auth_token_file=str(tokens), auth_recheck_seconds=RECHECK) as serving:
        async with (
            SlipstreamClient(serving.target, token=GOOD) as alice,
            SlipstreamClient(serving.target, token=OTHER) as bob,
        ):
            revoked, kept = alice.generate("hold"), bob.generate("hold")
            await anext(revoked), await anext(kept)
            assert names == ["alice", "bob"]
            replacement = tokens.with_suffix(".new")
            replacement.write_text(f"bob:{OTHER}\n")
            replacement.replace(tokens)
            with pytest.raises(CallFailed) as ended:
                async with within(10, "the stream of the revoked token ends"):
                    await anext(revoked)
            with pytest.raises(CallFailed) as again:
                await alice.complete("hi")
            # Several more looks at the token that is still listed.
            await asyncio.sleep(3 * RECHECK)
            gate.set()
            assert len([event async for event in kept]) == 8
    assert (ended.value.code, ended.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED")
    assert ended.value.tokens_emitted == 1
    assert again.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert {period for period, _ in looks} == {RECHECK}
    missed = [listed for _, listed in looks].count(False)
    scorecard(32, f"looks, one each {RECHECK} s, until a revoked stream ends", missed, equals=1)


async def test_a_revoked_token_frees_what_a_stalled_write_holds(serve: Serve, tokens: Path) -> None:
    """The client does not read, so the handler waits in a write when its token goes."""

    async with serve(auth_token_file=str(tokens), auth_recheck_seconds=RECHECK) as serving:
        async with SlipstreamClient(serving.target, token=GOOD) as client:
            stream = client.generate("hi", max_tokens=4000, n=64)
            await anext(stream)
            tokens.write_text(f"bob:{OTHER}\n")
            async with asyncio.timeout(10):
                await (await serving.engine.stream_number(1)).closed.wait()
            with contextlib.suppress(CallFailed):
                await stream.aclose()


async def test_a_new_token_counts_at_once_and_what_a_bad_file_holds_stays(
    serve: Serve, tokens: Path, logged: LogLines
) -> None:
    async with serve(auth_token_file=str(tokens)) as serving:
        async with SlipstreamClient(serving.target, token=WRONG) as client:
            with pytest.raises(CallFailed):
                await client.tokenize("a")
            # In place, of equal length, and within one tick of most clocks of file systems.
            tokens.write_text(f"# who may call\nalice:{WRONG}\n\nbob:{OTHER}\n")
            await client.tokenize("a")
            for bad in (
                f"{WRONG}\nshort\n".encode(),
                f"{WRONG}\n".encode() + b"\xff\xfe" * 20,
                f"{WRONG}\n{WRONG}".encode(),
            ):
                tokens.write_bytes(bad)
                await client.tokenize("a")
    assert logged.text.count("what it is not seen to hold is refused") == 3
    assert not any(secret in logged.text for secret in (GOOD, OTHER, WRONG))


async def test_without_a_token_file_anyone_may_call(serve: Serve) -> None:
    async with serve() as serving:
        assert await serving.client.tokenize("a") == [1, 97]
        async with SlipstreamClient(serving.target, token=WRONG) as client:
            assert await client.tokenize("a") == [1, 97]


SECRET_NAMES = re.compile(r"token(?!s_)|secret|digest|presented|password|credential", re.IGNORECASE)
BY_VALUE = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def comparisons_by_value(text: str) -> list[str]:
    """Comparisons that end at the first difference, of anything that is named like a secret."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and any(isinstance(op, BY_VALUE) for op in node.ops):
            shown = ast.unparse(node)
            if SECRET_NAMES.search(shown):
                found.append(f"line {node.lineno}: {shown}")
    return found


def test_no_token_is_compared_by_value(scorecard: Scorecard) -> None:
    """Comparison of secrets is `hmac.compare_digest` over digests of one length, of all entries, to the end."""
    access = ROOT / "service" / "access"
    rooms = [access / "auth_interceptor.py", access / "token_file.py"]
    found = [each for room in rooms for each in comparisons_by_value(room.read_text())]
    scorecard(32, "comparisons of tokens by value", found, equals=[])
    text = next(room for room in rooms if room.name == "token_file.py").read_text()
    loop = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For) and "compare" in ast.dump(node))
    assert "hmac.compare_digest" in ast.unparse(loop)
    assert not any(isinstance(node, ast.Break | ast.Return) for node in ast.walk(loop))


@pytest.mark.parametrize("text", ["token == given", "given in tokens", "a.digest != b", "x = presented_token not in y"])
def test_the_rule_on_comparisons_can_fail(text: str) -> None:
    assert comparisons_by_value(text)
    assert not comparisons_by_value("hmac.compare_digest(token, given)")


def test_every_entry_is_compared_however_early_one_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    book = parse_tokens("\n".join(f"n{i}:{i:032d}" for i in range(50)).encode(), "tokens")
    compared = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    for place in (0, 25, 49):
        found = book.find(f"{place:032d}")
        assert found is not None and found.name == f"n{place}"
    assert book.find("x") is None
    assert compared == [(32, 32)] * 50 * 4
