"""The tables of `service/README.md` that come from code: `python -m service.docs` rewrites them, a test compares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from service.config import ServerConfig
from service.metrics.names import ALL
from service.settings import Setting, settings_of

README = Path(__file__).resolve().parent / "README.md"


def settings_table() -> str:
    """Every setting with its default and meaning, by group."""
    rows = [
        (each.group, _flag(each), _default(each), _escaped(each.help)) for each in settings_of(ServerConfig).values()
    ]
    return _table(("group", "flag", "default", ""), rows)


def metrics_table() -> str:
    """Every metric as scraped."""
    rows = [
        (f"`{each.exported}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), _escaped(each.help))
        for each in ALL
    ]
    return _table(("metric", "type", "labels", ""), rows)


def renewed(text: str) -> str:
    """`text` with both tables as the code has them now."""
    for name, table in (("settings", settings_table()), ("metrics", metrics_table())):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
    return text


def _flag(setting: Setting) -> str:
    if setting.kind is bool:
        return f"`{setting.flag}`, `--no-{setting.flag[2:]}`"
    return f"`{setting.flag}`" + (f" {', '.join(setting.choices)}" if setting.choices else "")


def _default(setting: Setting) -> str:
    if setting.kind is bool:
        return "on" if setting.default else "off"
    return "" if setting.default is None else str(setting.default)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(header)
    lines = [titles, ("---",) * len(titles), *map(tuple, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
