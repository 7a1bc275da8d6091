"""Turns the settings of a dataclass into click options, and shows them in `--help` by group."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from service.config.server_config import ServerConfig
from service.config.sources import Setting, settings_of

CONFIG_ENV = "SLIPSTREAM_CONFIG"

Command = TypeVar("Command", bound=Callable[..., Any])


class SettingOption(click.Option):
    """An option made from a setting. `service.config.sources.load` applies its default, so None means "not given"."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists options under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section per group, in the order of first appearance."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                group = getattr(param, "group", "Options")
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)


def setting_options(
    groups: Collection[str] | None = None, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Add `--config` and an option for each setting of ServerConfig, of `groups` only if given, except `without`."""
    settings = [
        each
        for each in settings_of(ServerConfig).values()
        if (groups is None or each.group in groups) and each.name not in without
    ]

    def decorate(command: Command) -> Command:
        for each in reversed(settings):
            command = _option(each)(command)
        return click.option(
            "--config",
            "config_file",
            envvar=CONFIG_ENV,
            metavar="FILE",
            help=f"YAML file with any of these settings, dashes or underscores.  [env: {CONFIG_ENV}]",
        )(command)

    return decorate


def _option(setting: Setting) -> Callable[[Command], Command]:
    declaration = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.kind is bool else setting.flag
    # click converts the text of the command line; `service.config.sources.load` checks ranges for all sources alike.
    kind: Any = click.Choice(setting.choices) if setting.choices else setting.kind
    many = setting.kind is tuple
    return click.option(
        declaration,
        setting.name,
        cls=SettingOption,
        group=setting.group,
        type=None if setting.kind is bool else str if many else kind,
        multiple=many,
        callback=_unless_empty if many else None,
        default=None,
        metavar=setting.metavar or None,
        help=f"{setting.help}{_default_note(setting)}  [env: {setting.env}]",
    )


def _unless_empty(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...] | None:
    """None for an option that was not given, as click has it for options that take one value."""
    return value or None


def _default_note(setting: Setting) -> str:
    if setting.optional:
        return ""
    shown = {True: "on", False: "off"}[setting.default] if setting.kind is bool else setting.default
    return f"  [default: {shown}]"
