"""Reads the YAML files of operators within bounds of size, depth and work; what is wrong with one is one line.

libyaml's parser reads a few megabytes a second, PyYAML's own a hundredth of that. Either recurses for each level of
nesting, the one in C without a bound, so the events of a file are counted before its values are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError

MAX_YAML_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 65_536
"""Keys, values and collections, an alias counted as what it stands for: merged aliases can double with each line."""
MAX_PLAIN_CHARS = 3_500
"""What has no quotes may be a number, and Python writes none of more than 4,300 digits into a message."""
MAX_REASON_CHARS = 120

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(content: bytes, path: str | Path) -> Any:
    """The one document that `content` holds, None if it is empty. ConfigError names `path` and the reason."""
    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_YAML_BYTES} bytes")
    try:
        text = content.decode("utf-8")
        _check_shape(yaml.parse(text, Loader=_Loader), path)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{path}{_place(error.problem_mark)}: not valid YAML: {_line(error.problem or error)}"
        ) from None
    except Exception as error:
        # Dates and numbers that are none raise what Python's own types raise.
        raise ConfigError(f"{path}: not valid YAML: {_line(error)}") from None


def _check_shape(events: Iterable[yaml.Event], path: str | Path) -> None:
    sizes: list[int] = [0]
    anchors: list[str | None] = [None]
    anchored: dict[str | None, int] = {}
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            anchors.append(event.anchor)
            if len(sizes) > MAX_DEPTH:
                raise ConfigError(f"{path}{_place(event.start_mark)}: more than {MAX_DEPTH} levels deep")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            size, anchor = sizes.pop(), anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            size, anchor = anchored.get(event.anchor, 1), None
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_PLAIN_CHARS and (event.implicit[0] or event.tag is not None):
                where = f"{path}{_place(event.start_mark)}"
                raise ConfigError(f"{where}: more than {MAX_PLAIN_CHARS} characters without quotes")
            size, anchor = 1, event.anchor
        else:
            continue
        if anchor is not None:
            anchored[anchor] = size
        sizes[-1] += size
        if sizes[-1] > MAX_NODES:
            raise ConfigError(f"{path}: holds more than {MAX_NODES} keys and values")


def _place(mark: Any) -> str:
    return "" if mark is None else f", line {mark.line + 1}"


def _line(error: object) -> str:
    """The first line of what `error` says, in ASCII: what a file holds can be quoted in it."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return said[:MAX_REASON_CHARS].encode("ascii", "backslashreplace").decode()
