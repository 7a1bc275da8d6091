"""`slipstream generate`: one completion, streamed to the terminal, from a server or an engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import click

from core.errors import InvalidRequest, SlipstreamError, StartupError
from service.cli_options import GroupedCommand, setting_options
from service.config import ServerConfig
from service.settings import load

ENGINE_GROUPS = ("Model", "Device", "Memory", "Scheduling")


@click.command(cls=GroupedCommand)
@click.argument("text")
@click.option("--server", metavar="HOST:PORT", help="Ask this server instead of loading a model here.")
@click.option("--token-file", metavar="FILE", help="With --server: present the first token of this file.")
@click.option("--tls-ca", metavar="FILE", help="With --server: use TLS, and trust these authorities.")
@click.option("--tls-cert", metavar="FILE", help="With --tls-ca: the client's own certificate.")
@click.option("--tls-key", metavar="FILE", help="With --tls-cert: its private key.")
@click.option("--chat", is_flag=True, help="Send the text as a user's message through the chat template.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: the model's]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]")
@click.option("--top-p", type=float, help="Nucleus sampling.  [default: the model's]")
@click.option("--top-k", type=int, help="0 is off.  [default: the model's]")
@click.option("--seed", type=int, help="Makes sampling reproducible, 0 or more.")
@click.option("--stop", multiple=True, help="Stop at this string; may be repeated.")
@setting_options(ENGINE_GROUPS, without=("seed", "adapter", "max_lora_rank"))
def generate(
    text: str,
    server: str | None,
    chat: bool,
    stop: tuple[str, ...],
    config_file: str | None,
    **options: Any,
) -> None:
    """Stream a completion of TEXT to the terminal, token by token.

    \b
    slipstream generate "27+45="
    slipstream generate --server 127.0.0.1:50051 --max-tokens 64 "A story about Mia the fox:"
    """
    sampling = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    given = {name: value for name, value in sampling.items() if value is not None}
    access = {name: options.pop(name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")}
    if stop:
        given["stop"] = stop
    if server:
        pieces = _remote(server, access, text, chat, given)
    else:
        pieces = _local(load(ServerConfig, options, os.environ, config_file), text, chat, given)
    try:
        asyncio.run(_print(pieces))
    except StartupError:
        raise
    except SlipstreamError as error:
        raise click.ClickException(error.message) from None
    except KeyboardInterrupt:
        sys.exit(130)


async def _print(pieces: AsyncGenerator[str, None]) -> None:
    async with aclosing(pieces) as stream:
        async for piece in stream:
            click.echo(piece, nl=False)
    click.echo()


async def _remote(
    server: str, access: dict[str, str | None], text: str, chat: bool, sampling: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """Text pieces from a server. Raises StartupError for a token or TLS file that cannot be used."""
    from service.auth_tokens import first_token
    from service.client import CallFailed, Chunk, SlipstreamClient
    from service.tls_credentials import ClientTls

    files = (access["tls_ca"], access["tls_cert"], access["tls_key"])
    tls = ClientTls.read(*files) if any(files) else None
    token = None if access["token_file"] is None else first_token(access["token_file"])
    prompt: Any = [{"role": "user", "content": text}] if chat else text
    async with SlipstreamClient(server, tls=tls, token=token) as client:
        try:
            async for event in client.generate(prompt, **sampling):
                if isinstance(event, Chunk):
                    yield event.text
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None


async def _local(config: ServerConfig, text: str, chat: bool, sampling: dict[str, Any]) -> AsyncGenerator[str, None]:
    """Text pieces from an engine that lives as long as this call."""
    from core.types.io import ChatMessage, Delta, GenerateRequest
    from service.builder import build_core_engine, in_daemon_thread
    from service.preflight import check_model, model_path
    from service.progress import TerminalProgress

    path = model_path(config)
    check_model(path)
    progress = TerminalProgress()
    engine = await in_daemon_thread(lambda: build_core_engine(config.engine_config(str(path)), progress))
    progress.close()
    await engine.start()
    try:
        if chat and not engine.model_info.has_chat_template:
            raise InvalidRequest.of("chat", "the model has no chat template")
        request = GenerateRequest(
            request_id="terminal",
            text=None if chat else text,
            chat=(ChatMessage("user", text),) if chat else None,
            sampling=dataclasses.replace(engine.model_info.default_sampling, **sampling),
        )
        async with aclosing(await engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    yield event.text
    finally:
        await engine.stop()
