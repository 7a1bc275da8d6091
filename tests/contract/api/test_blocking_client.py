"""The client for programs without asyncio, and a server in another process: same outputs, errors and ends of calls."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.access.tls_credentials import ClientTls
from service.client import CallFailed, Chunk, End, SyncSlipstreamClient, blocking
from tests.chaos.process import PATIENCE, ServerProcess, settled
from tests.support.blocking import THREAD, interruptible, outcome, threads
from tests.support.repository import ROOT

LONG = 3000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess()
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SyncSlipstreamClient]:
    with SyncSlipstreamClient(server.target) as client:
        yield client


def test_a_stream_is_what_its_completion_is(client: SyncSlipstreamClient) -> None:
    (whole,) = client.complete("27+45=", max_tokens=9, ignore_eos=True, seed=5)
    events = list(client.generate("27+45=", max_tokens=9, ignore_eos=True, seed=5))
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert isinstance(events[-1], End) and events[-1].reason == whole.end.reason == "length"
    assert (
        tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids and len(whole.token_ids) == 9
    )
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_every_other_call_is_there(client: SyncSlipstreamClient) -> None:
    ids = client.tokenize("a b c")
    assert client.detokenize(ids) == "a b c"
    assert client.model_info().vocab_size > max(ids) and client.load().running_requests == 0
    assert client.server_info(timeout=PATIENCE).version and not client.is_loading()
    assert not client.abort("nothing.of.that.name")
    assert [vector.prompt_tokens for vector in client.embed("a b c", ids)] == [len(ids)] * 2
    for judge in (lambda: client.classify("a b c"), lambda: client.score("a", ["b", "c"])):
        with pytest.raises(CallFailed, match="the served model has no labels to judge by; use Generate or Embed"):
            judge()


def test_a_bad_field_is_named_where_the_call_was_made(client: SyncSlipstreamClient) -> None:
    with pytest.raises(CallFailed) as failed:
        list(client.generate("hi", temperature=-1.0))
    assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(failed.value.fields) == ["sampling_params.temperature"]
    with pytest.raises(ValueError, match="temperatur"):
        client.complete("hi", temperatur=1.0)


def test_leaving_a_loop_ends_the_request(server: ServerProcess, client: SyncSlipstreamClient) -> None:
    for event in client.generate("hi", max_tokens=LONG, ignore_eos=True):
        assert isinstance(event, Chunk)
        break
    gc.collect()
    assert not asyncio.run(settled(server))[0].live


def test_an_interrupt_leaves_nothing_running(server: ServerProcess, client: SyncSlipstreamClient) -> None:
    """Control-C, as soon as the server has begun: what waits is the main thread, and what works is the client's."""
    main = threading.main_thread().ident
    assert main is not None
    stream = client.generate(
        "hi",
        max_tokens=LONG,
        ignore_eos=True,
        resumable=True,
        on_started=lambda _: signal.pthread_kill(main, signal.SIGINT),
    )
    with interruptible(), pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    assert not asyncio.run(settled(server))[0].live
    assert client.complete("hi", max_tokens=2, ignore_eos=True)[0].end.completion_tokens == 2


def test_another_client_goes_on_with_a_kept_stream(server: ServerProcess, client: SyncSlipstreamClient) -> None:
    begun: list[str] = []
    options = {"max_tokens": 200, "ignore_eos": True, "seed": 3}
    (whole,) = client.complete("hi", **options)
    first = client.generate("hi", request_id="kept", resumable=True, on_started=begun.append, **options)  # type: ignore[arg-type]
    next(first)
    with SyncSlipstreamClient(server.target) as other:
        rest = list(other.attach("kept", incarnation=begun[0], timeout=PATIENCE))
    ids = [token for event in rest if isinstance(event, Chunk) for token in event.token_ids]
    assert tuple(ids) == whole.token_ids
    with pytest.raises(CallFailed) as taken:
        list(first)
    assert taken.value.reason in ("STREAM_TAKEN_OVER", "STREAM_NOT_FOUND", "STREAM_EXPIRED")


def test_threads_may_share_one(client: SyncSlipstreamClient) -> None:
    def ask(number: int) -> int:
        return sum(
            len(event.token_ids) for event in client.generate("hi", max_tokens=number) if isinstance(event, Chunk)
        )

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(1, 33))) == list(range(1, 33))


def test_its_thread_ends_with_the_last_client(server: ServerProcess) -> None:
    assert threads() == []
    one, other = SyncSlipstreamClient(server.target), SyncSlipstreamClient(server.target)
    assert threads() == [THREAD]
    one.close()
    one.close()
    assert threads() == [THREAD] and other.tokenize("a")
    other.close()
    assert threads() == []
    with SyncSlipstreamClient(server.target) as again:
        assert again.tokenize("a")


@pytest.mark.parametrize("beside", [False, True], ids=["the last client", "beside another"])
def test_all_that_wait_learn_that_the_client_is_closed(server: ServerProcess, beside: bool) -> None:
    """Those that wait for an event, and those that wait for an answer."""
    options: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True}
    with SyncSlipstreamClient(server.target) if beside else nullcontext(), ThreadPoolExecutor(6) as pool:
        client = SyncSlipstreamClient(server.target)
        begun = threading.Barrier(7)

        def read() -> None:
            stream = client.generate("hi", **options)
            next(stream)
            begun.wait(PATIENCE)
            list(stream)

        def ask() -> None:
            begun.wait(PATIENCE)
            client.complete("hi", **options)

        waiting = [pool.submit(outcome, each) for each in (*[read] * 4, *[ask] * 2)]
        begun.wait(PATIENCE)
        client.close()
        found = [each.result(PATIENCE) for each in waiting]
    # A thread that had not come to its call yet finds the client closed.
    assert all(isinstance(error, CallFailed | ValueError) for error in found), found
    assert {error.code for error in found if isinstance(error, CallFailed)} <= {grpc.StatusCode.CANCELLED}
    assert not asyncio.run(settled(server))[0].live and threads() == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("beside", [False, True], ids=["the last client", "beside another"])
def test_nothing_is_done_with_a_client_that_is_closed(
    server: ServerProcess, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with SyncSlipstreamClient(server.target) if beside else nullcontext():
        client = SyncSlipstreamClient(server.target)
        half, begun = client.generate("hi", max_tokens=LONG, ignore_eos=True), client.generate("hi")
        next(half)
        client.close()
        late: list[Callable[[], object]] = [lambda: client.tokenize("a"), lambda: list(client.generate("a"))]
        for ask in (*late, client.__enter__, partial(next, begun)):
            with pytest.raises(ValueError, match="the client is closed"):
                ask()
        assert not asyncio.run(settled(server))[0].live
        del half, begun
        gc.collect()
    assert ignored == []


def test_a_client_that_could_not_be_closed_is_closed_later(server: ServerProcess) -> None:
    client = SyncSlipstreamClient(server.target)
    said: list[BaseException | None] = []
    stream = client.generate("hi", max_tokens=2, on_started=lambda _: said.append(outcome(client.close)))
    assert outcome(lambda: list(stream)) is None
    assert isinstance(said[0], RuntimeError) and outcome(lambda: client.tokenize("a")) is None
    client.close()
    assert threads() == []


def test_a_callback_cannot_wait_for_its_own_thread(client: SyncSlipstreamClient) -> None:
    said: list[str] = []

    def ask(_: str) -> None:
        with pytest.raises(RuntimeError) as refused:
            client.tokenize("a")
        said.append(str(refused.value))

    list(client.generate("hi", max_tokens=2, ignore_eos=True, on_started=ask))
    assert said == ["a blocking client cannot be used in its own callbacks, nor behind a fork"]


def test_what_it_is_made_of_is_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []

    class Recorded:
        def __init__(self, *args: object, **kwargs: object) -> None:
            given.append((args, kwargs))

        async def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(blocking, "SlipstreamClient", Recorded)
    options, tls = (("grpc.max_send_message_length", 5),), ClientTls(b"authorities")
    SyncSlipstreamClient("here:1", options, tls=tls, token="t", fleet=True).close()
    assert given == [(("here:1", options), {"tls": tls, "token": "t", "fleet": True})]


INSTALLED = """
import sys
from slipstream import Chunk, SyncSlipstreamClient
client = SyncSlipstreamClient(sys.argv[1])
words = [event.token_ids for event in client.generate("hi", max_tokens=4, ignore_eos=True) if isinstance(event, Chunk)]
from slipstream.v1 import inference_pb2
assert inference_pb2.__file__.startswith(sys.argv[2]), inference_pb2.__file__
assert inference_pb2.GenerateRequest(text="a").text == "a"
print(sum(map(len, words)), {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
"""


def test_installed_it_is_called_slipstream(server: ServerProcess, tmp_path: Path) -> None:
    """Without a word about torch, and beside code that was generated from our protos; the client is never closed."""
    made, site = tmp_path / "made", tmp_path / "site"
    made.mkdir(), site.mkdir()
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", f"--python_out={made}"]
    subprocess.run([*command, "slipstream/v1/inference.proto"], check=True)
    # As a wheel lays it out. Of a checkout that is installed as editable a folder on the path would come first.
    for name, folder in {"slipstream": "service/exported/slipstream", "service": "service", "core": "core"}.items():
        (site / name).symlink_to(ROOT / folder)
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, server.target, str(made)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{made}:{site}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 set()\n", "")
