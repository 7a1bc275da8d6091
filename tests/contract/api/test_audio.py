"""Sounds over real sockets and in the terminal: what is written down, and what is refused by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from service.cli.cli import cli
from service.client import CallFailed, SlipstreamClient, Sound
from service.config.server_config import ServerConfig
from service.engine.builder import build_core_engine
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.server.server import Server
from tests.proofs.equivalence.test_speech import SPOKEN, SpeechOracle
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import Serve, loaded
from tests.support.speech_checkpoints import make_speech_checkpoint, samples, wav

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SpeechOracle:
    return SpeechOracle(make_speech_checkpoint(tmp_path_factory.mktemp("speech")))


@asynccontextmanager
async def served(oracle: SpeechOracle, config: Callable[..., ServerConfig]) -> AsyncIterator[SlipstreamClient]:
    server = Server(config(model=str(oracle.directory), device="cpu", cpu_threads=1), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        yield client


async def test_sounds_become_what_transformers_makes_of_them(
    oracle: SpeechOracle, config: Callable[..., ServerConfig]
) -> None:
    async with served(oracle, config) as client:
        info = await client.model_info()
        assert info.takes_audio and not info.takes_images
        for seed, seconds, language, task in SPOKEN[:3]:
            sound = Sound(wav(samples(seed, seconds)), language, translate=task == "translate")
            (done,) = await client.complete(sound, **GREEDY)
            want = oracle.greedy((seed, seconds, language, task))
            assert want is None or done.token_ids == want
            kept = {"request_id": f"k{seed}{language}", "resumable": True}
            for _ in range(2):
                assert (await client.complete(sound, **kept, **GREEDY))[0].token_ids == done.token_ids


@pytest.mark.parametrize(
    ("prompt", "field", "says"),
    [
        ("text", "text", "send audio"),
        ([5, 6], "token_ids", "send audio"),
        (Sound(b"", "en"), "audio.data", "no WAV file"),
        (Sound(wav(np.zeros(20_000, np.int16)), "en"), "audio.data", "cut it"),
        (Sound(wav(np.zeros(100, np.int16), 8_000), "en"), "audio.data", "resample it"),
        (Sound(wav(np.zeros(100, np.int16))), "audio.language", "one of de, en"),
    ],
    ids=["text", "ids", "nothing", "long", "rate", "no language"],
)
async def test_what_cannot_be_heard_is_refused_by_field(
    oracle: SpeechOracle, config: Callable[..., ServerConfig], prompt: Any, field: str, says: str
) -> None:
    async with served(oracle, config) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(prompt, **GREEDY)
        assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT and list(failed.value.fields) == [field]
        assert says in str(failed.value)
        told = pb.GenerateRequest(audio=pb.Audio(data=b"a", language="en", task=7))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError, match=r"audio\.task"):
            _ = [event async for event in client.stub.Generate(told)]
        (done,) = await client.complete(Sound(wav(samples(1, 0.2)), "en"), **GREEDY)
        assert len(done.token_ids) == 14, "and others are served"


async def test_a_model_that_hears_nothing_takes_no_sound(serve: Serve) -> None:
    async with serve(FakeEngine()) as serving:
        with pytest.raises(CallFailed, match="hears no audio") as failed:
            await serving.client.complete(Sound(b"a"))
        assert list(failed.value.fields) == ["audio"] and not serving.engine.streams
        with pytest.raises(ValueError, match="are for chats"):
            await serving.client.complete(Sound(b"a"), parse_answer=True)


def test_the_command_writes_down_a_file(oracle: SpeechOracle, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(wav(samples(1)))
    asked = ["transcribe", "--model", str(oracle.directory), "--language", "en", "--max-tokens", "14"]
    said = CliRunner().invoke(cli, [*asked, str(file)])
    assert said.exit_code == 0, said.output
    want = oracle.greedy(SPOKEN[0])
    tokenizer: Any = AutoTokenizer.from_pretrained(oracle.directory)
    if want is not None and 2 not in want:
        assert said.stdout == tokenizer.decode(want, skip_special_tokens=True) + "\n"
    piped = CliRunner().invoke(cli, [*asked, "-"], input=wav(samples(1)))
    assert piped.stdout == said.stdout
    bad = CliRunner().invoke(cli, [*asked, "-"], input=b"no sound")
    assert bad.exit_code == 1 and "audio.data" in bad.output


async def test_the_command_asks_a_server(oracle: SpeechOracle, config: Callable[..., ServerConfig]) -> None:
    server = Server(config(model=str(oracle.directory), device="cpu", cpu_threads=1), build_core_engine)
    async with loaded(server):

        async def said(*more: str) -> str:
            asked = ["transcribe", "--server", f"127.0.0.1:{server.port}", "--language", "de", *more, "-"]
            done = await asyncio.to_thread(CliRunner().invoke, cli, asked, input=wav(samples(2, 0.4)))
            assert done.exit_code == 0 and done.stdout.strip(), done.output
            return done.stdout

        words, english = await said(), await said("--translate")
        assert words != english and len(await said("--max-tokens", "2")) < len(words)
