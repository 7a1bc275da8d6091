"""What the chart says twice: `python -m helm.generate` renews the copies, a test compares.

The table of values in `docs/reference/chart.md` comes from the comments of `values.yaml`, and what `settings` may
hold, in `values.schema.json`, from the settings of the server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from service.config.server_config import ServerConfig
from service.config.sources import Setting, settings_of

HELM = Path(__file__).resolve().parent
PAGE = HELM.parent / "docs" / "reference" / "chart.md"
VALUES = HELM / "slipstream" / "values.yaml"
SCHEMA = HELM / "slipstream" / "values.schema.json"

DECIDED_ELSEWHERE = frozenset(
    "host port metrics_host metrics_port health_port device model served_model_name drain_linger drain_grace "
    "auth_token_file admins tenants_file tls_cert tls_key tls_client_ca tls_client_names "
    "role transfer_host transfer_port transfer_advertise transfer_peers transfer_secret_file "
    "nnodes node_rank master_addr master_port rank_secret_file join_timeout disk_cache disk_cache_bytes".split()
)
"""Settings that other values of the chart decide; given in `settings` they would contradict them."""

_MARK = "# -- "
_KEY = re.compile(r"^( *)([A-Za-z]\w*):")
_KINDS: dict[type, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string", "minLength": 1},
    tuple: {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.+$"}},
}


def documented(text: str) -> dict[str, str]:
    """Dotted path of every value that has a comment of the form `# -- …` above it -> the comment."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        stripped = line.strip()
        key = _KEY.match(line)
        if stripped.startswith(_MARK):
            comment = stripped.removeprefix(_MARK)
        elif key is not None:
            indent = len(key[1])
            path = [*((depth, name) for depth, name in path if depth < indent), (indent, key[2])]
            if comment:
                found[".".join(name for _, name in path)] = comment
            comment = ""
    return found


def values_table(text: str) -> str:
    """A row per documented value: path, default, meaning."""
    values = yaml.safe_load(text)
    rows = ["| value | default |  |", "| --- | --- | --- |"]
    for path, meaning in documented(text).items():
        default: Any = values
        for name in path.split("."):
            default = default[name]
        escaped = meaning.replace("|", "\\|")
        rows.append(f"| `{path}` | `{json.dumps(default, ensure_ascii=False)}` | {escaped} |")
    return "\n".join(rows) + "\n"


def settings_schema() -> dict[str, Any]:
    """JSON schema of `settings`: every setting of the server that no other value decides."""
    allowed = {name: each for name, each in settings_of(ServerConfig).items() if name not in DECIDED_ELSEWHERE}
    properties = {name: _schema_of(each) for name, each in allowed.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema_of(setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {"description": setting.help, **_KINDS[setting.kind]}
    if setting.choices:
        found["enum"] = list(setting.choices)
    if setting.low is not None:
        found["minimum"] = setting.low
    if setting.optional:
        found["type"] = [found["type"], "null"]
    return found


def renewed_page(text: str) -> str:
    """`text` with its table of values as it should be now."""
    table = values_table(VALUES.read_text())
    pattern = re.compile(r"(<!-- values -->\n).*?(<!-- end of values -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{table}{found[2]}", text)


def renewed_schema(text: str) -> str:
    """`text` with what `settings` may hold as it should be now."""
    schema = json.loads(text)
    schema["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(renewed_page(PAGE.read_text()))
    SCHEMA.write_text(renewed_schema(SCHEMA.read_text()))
