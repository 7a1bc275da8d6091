"""`slipstream generate`: one completion, streamed to the terminal, from a server or an engine in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import IO, Any

import click

from core.config import LoraConfig
from core.errors import InvalidRequest, SlipstreamError, StartupError
from core.types.constraint import Constraint, ConstraintKind
from service.cli.cli_options import GroupedCommand, setting_options
from service.cli.commands.answers import AskedAnswer, ShownParts, answer_options
from service.cli.commands.waiting import wait_option, wait_until_loaded
from service.cli.server_access import ServerAccess, access_options, server_option
from service.config.server_config import ServerConfig
from service.config.sources import load

Told = tuple[int, float, Sequence[tuple[int, float]]]
"""Of a prompt token: id, log probability, and what was likelier or as likely there."""
ENGINE_GROUPS = ("Model", "Device", "Memory", "Scheduling", "Constraints")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options ask for. `adapter`: its name; empty for the base model. `images`: encoded."""

    text: str
    chat: bool
    adapter: str
    constraint: Constraint | None
    speculative: bool
    answer: AskedAnswer
    images: tuple[bytes, ...]
    sampling: dict[str, Any]


@click.command(cls=GroupedCommand)
@click.argument("text")
@server_option("Ask this server instead of loading a model here.")
@wait_option
@access_options
@click.option(
    "--adapter",
    metavar="NAME[=DIR]",
    help="Generate with this LoRA adapter: the server's own name for it, or without --server one in DIR.",
)
@click.option("--chat", is_flag=True, help="Send the text as a user's message through the chat template.")
@click.option(
    "--image",
    "images",
    type=click.File("rb"),
    multiple=True,
    help="Show the model this file; may be repeated. With --chat they come before the text, else where it names them.",
)
@answer_options
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: the model's]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: the model's]")
@click.option("--top-p", type=float, help="Nucleus sampling.  [default: the model's]")
@click.option("--top-k", type=int, help="0 is off.  [default: the model's]")
@click.option("--seed", type=int, help="Makes sampling reproducible, 0 or more.")
@click.option(
    "--token-logprob",
    "logprob_token_ids",
    type=int,
    multiple=True,
    metavar="ID",
    help="Print behind the text, for each place, the log probabilities of this token id; may be repeated.",
)
@click.option("--prompt-logprobs", is_flag=True, help="Print behind the text the log probability of each prompt token.")
@click.option(
    "--prompt-top", type=int, metavar="N", help="The same, with the N tokens that were most likely there, 20 at most."
)
@click.option("--no-speculative", is_flag=True, help="Guess no tokens ahead of the model, whatever the server does.")
@click.option("--stop", multiple=True, help="Stop at this string; may be repeated.")
@click.option(
    "--json-schema", "json_schema", type=click.File(encoding="utf-8"), help="Generate JSON for the schema in this file."
)
@click.option("--regex", help="Generate text that matches this regular expression.")
@click.option("--choice", multiple=True, help="Generate one of these; may be repeated.")
@setting_options(ENGINE_GROUPS, without=("seed", "adapter", "lora_dir"))
def generate(
    text: str,
    server: str | None,
    wait: float,
    adapter: str | None,
    chat: bool,
    no_speculative: bool,
    stop: tuple[str, ...],
    logprob_token_ids: tuple[int, ...],
    prompt_logprobs: bool,
    prompt_top: int | None,
    images: tuple[IO[bytes], ...],
    config_file: str | None,
    **options: Any,
) -> None:
    """Stream a completion of TEXT to the terminal, token by token.

    \b
    slipstream generate "27+45="
    slipstream generate --server 127.0.0.1:50051 --max-tokens 64 "A story about Mia the fox:"
    slipstream generate --model DIR --adapter french=ADAPTER_DIR "Bonjour"
    slipstream generate --model DIR --chat --tools tools.json --tool-choice required --parse-answer "Where is Ann?"
    """
    sampling = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    given = {name: value for name, value in sampling.items() if value is not None}
    access = ServerAccess.taken_from(options)
    if stop:
        given["stop"] = stop
    if logprob_token_ids:
        given |= {"logprobs": True, "logprob_token_ids": logprob_token_ids}
    if prompt_logprobs or prompt_top is not None:
        given["prompt_logprobs"] = prompt_top or 0
    constraint = _constraint(options.pop("json_schema"), options.pop("regex"), options.pop("choice"))
    name, is_local, _ = (adapter or "").partition("=")
    if adapter and bool(server) == bool(is_local):
        raise click.UsageError("--adapter takes a NAME with --server, and NAME=DIR without")
    answer = AskedAnswer.taken_from(options, chat)
    asked = Asked(
        text, chat, name, constraint, not no_speculative, answer, tuple(each.read() for each in images), given
    )
    if server:
        pieces = _remote(server, wait, access, asked)
    else:
        # Adapters that the environment or the file lists are not loaded: the one request uses one at most.
        config = load(ServerConfig, options, os.environ, config_file)
        listed = load(LoraConfig, {"adapter": (adapter,) if adapter else None}, {}).adapters
        lora = replace(config.engine.lora, adapters=listed, directory=None)
        config = replace(config, engine=replace(config.engine, lora=lora))
        pieces = _local(config, asked)
    try:
        asyncio.run(_print(pieces))
    except StartupError:
        raise
    except SlipstreamError as error:
        raise click.ClickException(error.message) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _constraint(schema: IO[str] | None, regex: str | None, choices: tuple[str, ...]) -> Constraint | None:
    """The constraint that the options ask for; at most one of the options may be given."""
    asked = [
        *([Constraint(ConstraintKind.JSON_SCHEMA, schema.read())] if schema is not None else ()),
        *([Constraint(ConstraintKind.REGEX, regex)] if regex is not None else ()),
        *([Constraint.choice(list(choices))] if choices else ()),
    ]
    if len(asked) > 1:
        raise click.UsageError("--json-schema, --regex and --choice exclude each other")
    return asked[0] if asked else None


async def _print(pieces: AsyncGenerator[str, None]) -> None:
    async with aclosing(pieces) as stream:
        async for piece in stream:
            click.echo(piece, nl=False)
    click.echo()


async def _remote(server: str, wait: float, access: ServerAccess, asked: Asked) -> AsyncGenerator[str, None]:
    """The pieces of text, from a server. Raises StartupError for a token or TLS file that cannot be used."""
    from service.client import CallFailed, Chunk, PromptChunk

    shown_first = [{"type": "image", "data": data} for data in asked.images]
    content = [*shown_first, {"type": "text", "text": asked.text}] if asked.images else asked.text
    prompt: Any = [{"role": "user", "content": content}] if asked.chat else asked.text
    told, of_prompt = list[tuple[float, ...]](), list[Told]()
    wanted, constraint = None, asked.constraint
    if constraint is not None:
        is_choice = constraint.kind is ConstraintKind.CHOICE
        wanted = {constraint.kind.value: json.loads(constraint.source) if is_choice else constraint.source}
    async with access.client(server) as client:
        await wait_until_loaded(client, server, wait)
        try:
            options = {"adapter": asked.adapter, "speculative": asked.speculative, **asked.sampling}
            options |= {"tools": list(map(json.loads, asked.answer.tools)), "tool_choice": asked.answer.choice}
            options |= {"images": () if asked.chat else asked.images}
            shown = ShownParts()
            async for event in client.generate(prompt, constraint=wanted, parse_answer=asked.answer.parsed, **options):
                if isinstance(event, Chunk):
                    told += event.chosen_logprobs
                    yield event.text + shown.text((part.kind, part.text, part.call) for part in event.parts)
                elif isinstance(event, PromptChunk):
                    of_prompt += event.logprobs
        except CallFailed as failure:
            raise click.ClickException(str(failure)) from None
    yield _table(asked, told, of_prompt)


async def _local(config: ServerConfig, asked: Asked) -> AsyncGenerator[str, None]:
    """The pieces of text, from an engine in this process that lives as long as this call."""
    from core.types.chat import ChatMessage
    from core.types.io import Delta, GenerateRequest
    from service.cli.commands.local import local_engine

    async with local_engine(config) as engine:
        if asked.chat and not engine.model_info.has_chat_template:
            raise InvalidRequest.of("chat", "the model has no chat template")
        content = {"content": "", "parts": (*asked.images, asked.text)} if asked.images else {"content": asked.text}
        request = GenerateRequest(
            request_id="terminal",
            text=None if asked.chat else asked.text,
            chat=(ChatMessage("user", **content),) if asked.chat else None,
            images=() if asked.chat else asked.images,
            adapter=asked.adapter,
            constraint=asked.constraint,
            sampling=replace(engine.model_info.default_sampling, **asked.sampling),
            speculative=asked.speculative,
            chat_tools=asked.answer.tools,
            tool_mode=asked.answer.mode,
            tool_name=asked.answer.name,
            parse_answer=asked.answer.parsed,
        )
        shown = ShownParts()
        told, of_prompt = list[tuple[float, ...]](), list[Told]()
        async with aclosing(await engine.generate(request)) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.position < 0:
                    of_prompt += ((entry.token_id, entry.logprob, entry.top) for entry in event.logprobs)
                elif isinstance(event, Delta):
                    told += (entry.chosen for entry in event.logprobs)
                    yield event.text + shown.text((part.kind.value, part.text, part.call) for part in event.parts)
        yield _table(asked, told, of_prompt)


def _table(asked: Asked, told: Sequence[tuple[float, ...]], of_prompt: Sequence[Told]) -> str:
    """A line for each prompt token behind the first, with what was likelier there, then one for each place with those
    of the chosen ids.

    Empty where neither was asked for.
    """
    ids = asked.sampling.get("logprob_token_ids", ())
    prompt = "".join(
        f"\nprompt {place}: {token}:{value:.4f}" + "".join(f" ({other}:{that:.4f})" for other, that in top)
        for place, (token, value, top) in enumerate(of_prompt, 1)
    )
    lines = (" ".join(f"{token}:{value:.4f}" for token, value in zip(ids, values, strict=True)) for values in told)
    return prompt + ("".join(f"\n{place}: {line}" for place, line in enumerate(lines)) if ids else "")
