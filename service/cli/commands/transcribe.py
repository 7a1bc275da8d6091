"""`slipstream transcribe`: what is said in a sound, streamed to the terminal, from a server or an engine here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import IO, Any

import click

from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.commands.asking import COUNT, WITHOUT, Where, answer
from service.cli.commands.generate import ENGINE_GROUPS
from service.cli.commands.waiting import wait_option, wait_until_loaded
from service.cli.server_access import access_options, server_option
from service.client.requests import Sound


@click.command(cls=GroupedCommand)
@click.argument("file", type=click.File("rb"))
@server_option("Ask this server instead of loading a model here.")
@wait_option
@access_options
@click.option("--language", default="", help="What is spoken, as en; of a model that knows one alone: leave it out.")
@click.option("--translate", is_flag=True, help="Into English.")
@click.option("--max-tokens", type=COUNT, help="Most tokens to generate.  [default: the model's]")
@setting_options(ENGINE_GROUPS, without=WITHOUT)
def transcribe(
    file: IO[bytes],
    server: str | None,
    wait: float,
    language: str,
    translate: bool,
    max_tokens: int | None,
    config_file: str | None,
    **options: Any,
) -> None:
    """Write down what is said in FILE, a WAV file as long as the model hears at once; - reads standard input.

    \b
    slipstream transcribe --model openai/whisper-small --language en speech.wav
    ffmpeg -i talk.mp3 -ar 16000 -ac 1 -t 30 -f wav - | slipstream transcribe --server 127.0.0.1:50051 --language de -
    """
    where = Where.told(server, wait, None, config_file, options)
    sound = Sound(file.read(), language, translate)
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    answer(_print(_remote(where, sound, sampling) if server else _local(where, sound, sampling)))


async def _print(pieces: AsyncGenerator[str, None]) -> None:
    async with aclosing(pieces) as stream:
        async for piece in stream:
            click.echo(piece, nl=False)
    click.echo()


async def _remote(where: Where, sound: Sound, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
    """The pieces of text, from a server. Raises StartupError for a token or TLS file that cannot be used."""
    from service.client import CallFailed, Chunk

    assert where.server, "the caller looks"
    async with where.access.client(where.server) as client:
        await wait_until_loaded(client, where.server, where.wait)
        try:
            async for event in client.generate(sound, **sampling):
                if isinstance(event, Chunk):
                    yield event.text
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None


async def _local(where: Where, sound: Sound, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
    """The pieces of text, from an engine in this process that lives as long as this call."""
    from core.types.audio import Audio, AudioTask
    from core.types.io import Delta, GenerateRequest
    from service.cli.commands.local import local_engine

    task = AudioTask.TRANSLATE if sound.translate else AudioTask.TRANSCRIBE
    async with local_engine(where.config()) as engine:
        request = GenerateRequest(
            request_id="terminal",
            audio=Audio(sound.data, sound.language, task),
            sampling=replace(engine.model_info.default_sampling, **sampling),
        )
        async with aclosing(await engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    yield event.text
