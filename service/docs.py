"""The tables of the READMEs that come from elsewhere: `python -m service.docs` rewrites them, a test compares.

Settings and metrics come from the code, the support table from the tables of what was tried in `core/models/README.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from service.config.server_config import ServerConfig
from service.config.sources import Setting, settings_of
from service.metrics.names import ALL

ROOT = Path(__file__).resolve().parents[1]
READMES = (ROOT / "README.md", ROOT / "service" / "README.md")
TRIED = ROOT / "core" / "models" / "README.md"
SUPPORT = ("served, tokens equal to `transformers`", "checked by logits only", "refused by name")


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


def tried() -> dict[str, dict[str, list[str]]]:
    """Kind of architecture -> one of SUPPORT -> model types, as the tables of `core/models/README.md` have them."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in TRIED.read_text().split("\n## ")[1:]:
        kind, rows = section.partition("\n")[0], re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
        if rows and rows[0].startswith("model type |"):
            by_result = found.setdefault(kind, {name: [] for name in SUPPORT})
            for *names, checked, result in (row.split(" | ") for row in rows[1:]):
                by_result[_support(checked, result)] += re.findall(r"`[\w-]+`", names[0])
    return found


def support_table() -> str:
    """Which model types are served."""
    rows = [(kind, *(", ".join(types[name]) for name in SUPPORT)) for kind, types in tried().items()]
    return _table(("", *SUPPORT), rows)


def renewed(text: str) -> str:
    """`text` with those tables that it has as they should be now."""
    made = {"settings": settings_table, "metrics": metrics_table, "support": support_table}
    for name, table in ((name, make()) for name, make in made.items()):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
    return text


def _support(checked: str, result: str) -> str:
    if result.startswith("refused"):
        return SUPPORT[2]
    return SUPPORT[0] if "served" in checked and result.startswith("equal") else SUPPORT[1]


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
    for readme in READMES:
        readme.write_text(renewed(readme.read_text()))
