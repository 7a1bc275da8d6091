"""The client for programs without asyncio, and a server in another process: same outputs, errors and ends of calls."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.access.tls_credentials import ClientTls
from service.client import CallFailed, Chunk, End, SyncSlipstreamClient, blocking
from service.client.loop_thread import LoopThread
from tests.chaos.process import PATIENCE, ServerProcess, settled
from tests.support.repository import ROOT

LONG = 3000
THREAD = "slipstream-client"


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


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that runs the tests beside it has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == THREAD]


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


def test_an_interrupt_leaves_nothing_running(
    server: ServerProcess, client: SyncSlipstreamClient, interruptible: None
) -> None:
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
    with pytest.raises(KeyboardInterrupt):
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


def test_a_callback_cannot_wait_for_its_own_thread(client: SyncSlipstreamClient) -> None:
    said: list[str] = []

    def ask(_: str) -> None:
        with pytest.raises(RuntimeError) as refused:
            client.tokenize("a")
        said.append(str(refused.value))

    list(client.generate("hi", max_tokens=2, ignore_eos=True, on_started=ask))
    assert said == ["a blocking client cannot be used in its own callbacks, nor behind a fork"]


def test_an_iterator_may_be_dropped_on_the_thread_itself() -> None:
    """As the garbage collector does, which runs on any thread."""
    closed = threading.Event()

    async def numbers():  # type: ignore[no-untyped-def]
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    async def drop() -> None:
        held.clear()

    thread = LoopThread.acquire()
    try:
        held = [thread.iterate(numbers())]
        assert next(held[0]) == 1
        thread.run(drop())
        assert closed.wait(PATIENCE)
    finally:
        thread.release()


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


def test_an_interrupted_call_is_cancelled(interruptible: None) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    main = threading.main_thread().ident
    assert main is not None
    thread = LoopThread.acquire()
    interrupt = threading.Thread(target=lambda: (begun.wait(PATIENCE), signal.pthread_kill(main, signal.SIGINT)))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.run(waits())
        assert ended.wait(PATIENCE)
    finally:
        interrupt.join()
        thread.release()


def test_an_interrupt_before_the_wait_for_an_event_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is on its way to the thread, and the caller does not yet wait for it."""
    closed = threading.Event()

    async def silent() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            closed.set()

    send = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", send)
        send(*args)
        raise KeyboardInterrupt

    def read() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(thread.iterate(silent()))

    thread = LoopThread.acquire()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE)
    assert not reader.is_alive() and closed.is_set()
    thread.release()


FORKED = """
import os
from service.client.loop_thread import LoopThread
async def five():
    return 5
before = LoopThread.acquire()
child = os.fork()
if not child:
    try:
        before.run(five())
    except RuntimeError:
        os._exit(LoopThread.acquire().run(five()))
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), before.run(five()))
"""


def test_a_child_of_a_fork_has_a_thread_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("5 5\n", "")


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
