"""How `slipstream classify` and `slipstream score` get their answers, from a server or an engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from service.cli.cli_options import setting_options
from service.cli.commands.asking import WITHOUT, Where
from service.cli.commands.generate import ENGINE_GROUPS
from service.cli.commands.waiting import wait_option
from service.cli.server_access import access_options, server_option

if TYPE_CHECKING:
    from core.types.io import EmbedRequest, EmbedResult, ModelInfo
    from core.types.labels import Labels

Command = TypeVar("Command", bound=Callable[..., Any])


truncate_option = click.option(
    "--truncate", is_flag=True, help="Leave out the end of a text that is too long, instead of refusing it."
)


def judging_options(command: Command) -> Command:
    """Add the options that both commands have."""
    for option in reversed(
        (
            server_option("Ask this server instead of loading a model here."),
            wait_option,
            access_options,
            click.option("--adapter", metavar="NAME", help="With --server: use this LoRA adapter of the server."),
            truncate_option,
            click.option("--raw-scores", is_flag=True, help="Print the model's numbers as they are, not as scores."),
            click.option("--json", "whole", is_flag=True, help="Print one object with the token counts instead."),
            setting_options(ENGINE_GROUPS, without=WITHOUT),
        )
    ):
        command = option(command)
    return command


async def of_engine(
    where: Where,
    message: Any,
    read: Callable[[Any, ModelInfo, int, float | None], EmbedRequest],
    respond: Callable[[EmbedResult, Any, Labels], Any],
) -> Any:
    """The response to `message` of an engine in this process, by the server's own ways to read and to respond.

    Raises StartupError, and what the engine raises.
    """
    from service.cli.commands.local import local_engine
    from service.wire.served_calls import labels_of

    config = where.config()
    async with local_engine(config) as engine:
        info = engine.model_info
        asked = read(message, info, config.engine.scheduler.max_queued_requests, None)
        async with aclosing(await engine.embed(asked)) as call:
            return respond(await call.result(), message, labels_of(info))
