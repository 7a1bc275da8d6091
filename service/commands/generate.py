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
from service.server_access import ServerAccess, access_options
from service.settings import load

ENGINE_GROUPS = ("Model", "Device", "Memory", "Scheduling")


@click.command(cls=GroupedCommand)
@click.argument("text")
@click.option("--server", metavar="HOST:PORT", help="Ask this server instead of loading a model here.")
@access_options
@click.option(
    "--adapter",
    metavar="NAME[=DIR]",
    help="Generate with this LoRA adapter: the server's own name for it, or without --server one in DIR.",
)
@click.option("--chat", is_flag=True, help="Send the text as a user's message through the chat template.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: the model's]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]")
@click.option("--top-p", type=float, help="Nucleus sampling.  [default: the model's]")
@click.option("--top-k", type=int, help="0 is off.  [default: the model's]")
@click.option("--seed", type=int, help="Makes sampling reproducible, 0 or more.")
@click.option("--stop", multiple=True, help="Stop at this string; may be repeated.")
@setting_options(ENGINE_GROUPS, without=("seed", "adapter", "lora_dir"))
def generate(
    text: str,
    server: str | None,
    adapter: str | None,
    chat: bool,
    stop: tuple[str, ...],
    config_file: str | None,
    **options: Any,
) -> None:
    """Stream a completion of TEXT to the terminal, token by token.

    \b
    slipstream generate "27+45="
    slipstream generate --server 127.0.0.1:50051 --max-tokens 64 "A story about Mia the fox:"
    slipstream generate --model DIR --adapter french=ADAPTER_DIR "Bonjour"
    """
    sampling = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    given = {name: value for name, value in sampling.items() if value is not None}
    access = ServerAccess.taken_from(options)
    if stop:
        given["stop"] = stop
    name, is_local, _ = (adapter or "").partition("=")
    if adapter and bool(server) == bool(is_local):
        raise click.UsageError("--adapter takes a NAME with --server, and NAME=DIR without")
    if server:
        pieces = _remote(server, access, text, chat, name, given)
    else:
        # What the environment or the file lists stays unloaded: one request needs one.
        config = load(ServerConfig, options, os.environ, config_file)
        adapters = load(ServerConfig, {"adapter": (adapter,) if adapter else None}, {}).adapter
        pieces = _local(dataclasses.replace(config, adapter=adapters, lora_dir=None), text, chat, name, given)
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
    server: str, access: ServerAccess, text: str, chat: bool, adapter: str, sampling: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """Text pieces from a server. Raises StartupError for a token or TLS file that cannot be used."""
    from service.client import CallFailed, Chunk

    prompt: Any = [{"role": "user", "content": text}] if chat else text
    async with access.client(server) as client:
        try:
            async for event in client.generate(prompt, adapter=adapter, **sampling):
                if isinstance(event, Chunk):
                    yield event.text
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None


async def _local(
    config: ServerConfig, text: str, chat: bool, adapter: str, sampling: dict[str, Any]
) -> AsyncGenerator[str, None]:
    """Text pieces from an engine that lives as long as this call."""
    from core.types.io import ChatMessage, Delta, GenerateRequest
    from service.builder import build_core_engine, in_daemon_thread
    from service.preflight import check_adapters, check_model, model_path
    from service.progress import TerminalProgress

    path = model_path(config)
    check_model(path)
    check_adapters(config)
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
            adapter=adapter,
            sampling=dataclasses.replace(engine.model_info.default_sampling, **sampling),
        )
        async with aclosing(await engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    yield event.text
    finally:
        await engine.stop()
