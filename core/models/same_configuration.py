"""Whether a checkpoint is the model that is served with other numbers, by its configuration: asked before it is built.

A file may ask for more layers than any machine has, so nothing is made of it before its numbers were compared. A
trainer writes defaults that the first file left out, so what `transformers` makes of both is compared then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from core.errors import ModelLoadError
from core.models.config import read_json

NAME: Final = "config.json"
OF_FILES: Final = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Entries that say how a file was made, or what a server decides by itself."""
ENDS: Final = "eos_token_id"
"""Not read: generation stops by what `ModelSpec` says."""
PADDING: Final = "pad_token_id"
"""Read by what judges texts and by what counts positions from behind padding; trainers write one for all models."""
MAX_TOLD: Final = 300
"""Characters of a refusal that come out of a file."""


def configuration(directory: Path) -> Mapping[str, Any]:
    """What `transformers` makes of the configuration in `directory`; empty where there is none.

    Raises ModelLoadError for one that it cannot read.
    """
    if not (directory / NAME).is_file():
        return {}
    from transformers.models.auto.configuration_auto import AutoConfig

    try:
        # Never the code that `auto_map` in a configuration may point to.
        found = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        entries: Mapping[str, Any] = found.to_dict()
    except Exception as error:
        raise ModelLoadError(f"{NAME} is not usable: {error}"[:MAX_TOLD]) from error
    return entries


def why_not_same(served: Mapping[str, Any], directory: Path, *, reads_padding: bool = False) -> str | None:
    """The first entry in which the configuration in `directory` differs from `served`; None where there is none.

    None too where `served` is empty: what is emulated has no configuration. `reads_padding`: whether the token of
    padding counts. Raises ModelLoadError.
    """
    if not served:
        return None
    if not (directory / NAME).is_file():
        raise ModelLoadError(f"the directory has no {NAME}, so it holds no checkpoint")
    unread = OF_FILES | {ENDS} if reads_padding else OF_FILES | {ENDS, PADDING}
    for name, value in read_json(directory / NAME).items():
        counts = isinstance(value, int) and name in served.keys() - unread
        if counts and (told := _differs(name, served, value)) is not None:
            return told
    found = configuration(directory)
    names = sorted((served.keys() | found.keys()) - unread)
    return next((told for name in names if (told := _differs(name, served, found.get(name))) is not None), None)


def _differs(name: str, served: Mapping[str, Any], value: Any) -> str | None:
    """What differs of entry `name`, within it where both are configurations of parts."""
    own = served.get(name)
    if own == value:
        return None
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        parts = sorted((own.keys() | value.keys()) - OF_FILES)
        told = next((told for part in parts if (told := _differs(part, own, value.get(part))) is not None), None)
        return None if told is None else f"{name}.{told}"[:MAX_TOLD]
    return f"{name} {value!r}, that of the served one {served.get(name)!r}"[:MAX_TOLD]
