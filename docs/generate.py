"""What the documents take from elsewhere: `python -m docs.generate` rewrites it, a test compares.

Settings, metrics, errors and compiled model types come from the code, the API from the comments in `protos/`, and the
support table from the tables of what was tried, which follow it in `docs/reference/models.md`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from core import errors as core_errors
from core.errors import Overloaded, SlipstreamError, StartupError
from core.models.native.families import FAMILIES
from core.models.registry import ENCODER_TYPES
from docs import api_page
from service import errors as service_errors
from service.config.server_config import ServerConfig
from service.config.sources import Setting, settings_of
from service.metrics.names import ALL
from service.rpc.status import CODES

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = tuple(REFERENCE / f"{name}.md" for name in ("api", "errors", "metrics", "models", "settings"))
TRIED = REFERENCE / "models.md"
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
    """Kind of architecture -> one of SUPPORT -> model types, as the tables of what was tried have them."""
    found: dict[str, dict[str, list[str]]] = {}
    for section in TRIED.read_text().split("\n## ")[1:]:
        kind, rows = section.partition("\n")[0], re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
        if rows and rows[0].startswith("model type |"):
            by_result = found.setdefault(kind, {name: [] for name in SUPPORT})
            for *names, checked, result in (row.split(" | ") for row in rows[1:]):
                by_result[_support(checked, result)] += re.findall(r"`[\w-]+`", names[0])
    return found


def native_types() -> str:
    """Model types that compiled code computes on the CPU."""
    return _listed(FAMILIES)


def encoder_types() -> str:
    """Encoders, of which every one is tried."""
    return _listed(ENCODER_TYPES)


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)), 110, break_on_hyphens=False) + "\n"


def support_table() -> str:
    """Which model types are served."""
    rows = [(kind, *(", ".join(types[name]) for name in SUPPORT)) for kind, types in tried().items()]
    return _table(("", *SUPPORT), rows)


def errors_table() -> str:
    """Every error that a client can meet, with its code, in the order of the files."""
    rows = []
    for module in (core_errors, service_errors):
        for kind in vars(module).values():
            if _is_told(kind) and kind.__module__ == module.__name__:
                code = next(CODES[each] for each in kind.__mro__ if each in CODES)
                # Each use of this class gives its own.
                reason = "that of what is full" if kind is Overloaded else f"`{kind.reason}`"
                rows.append((f"`{kind.__name__}`", f"`{code.name}`", reason, _escaped(_told(kind))))
    return _table(("class", "code", "reason", ""), rows)


def renewed(text: str) -> str:
    """`text` with those parts that come from elsewhere as they should be now."""
    for name, make in MADE.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if pattern.search(text):
            made = make()
            text = pattern.sub(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)  # type: ignore[misc]
    return text


def _is_told(kind: object) -> bool:
    """Whether `kind` is an error with a status. Those of the start are for the operator alone."""
    if not isinstance(kind, type) or not issubclass(kind, SlipstreamError) or issubclass(kind, StartupError):
        return False
    return kind is not SlipstreamError


def _told(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


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
    return "" if setting.optional else str(setting.default)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = tuple(header)
    lines = [titles, ("---",) * len(titles), *map(tuple, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


MADE: dict[str, Callable[[], str]] = {
    "api": api_page.text,
    "encoders": encoder_types,
    "errors": errors_table,
    "metrics": metrics_table,
    "native": native_types,
    "settings": settings_table,
    "support": support_table,
}
"""Name of a part, as its marks in a page have it -> what makes it."""

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
