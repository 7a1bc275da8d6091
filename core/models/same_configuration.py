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
ELSEWHERE: Final = frozenset({"eos_token_id", "pad_token_id"})
"""Entries that are not read here: generation stops by what `ModelSpec` says."""
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


def why_not_same(served: Mapping[str, Any], directory: Path) -> str | None:
    """The first entry in which the configuration in `directory` differs from `served`; None where there is none.

    None too where `served` is empty: what is emulated has no configuration. Raises ModelLoadError.
    """
    if not served:
        return None
    if not (directory / NAME).is_file():
        return "none"
    for name, value in read_json(directory / NAME).items():
        if isinstance(value, int) and name in served and (told := _differs(name, served, value)) is not None:
            return told
    found = configuration(directory)
    differences = (_differs(name, served, found.get(name)) for name in sorted(served.keys() | found.keys()))
    return next((told for told in differences if told is not None), None)


def _differs(name: str, served: Mapping[str, Any], value: Any) -> str | None:
    if name in OF_FILES | ELSEWHERE or served.get(name) == value:
        return None
    return f"{name} {value!r}, that of the served one {served.get(name)!r}"[:MAX_TOLD]
