"""All mutants, and the sample that the ordinary suite tries. A new law, or a fixed bug, adds one to a table.

`tables/` has a table for each room of the product, `core.scheduler.toml` for what `core/scheduler` may break. An entry
is named by its header; its keys are the fields of `tests.mutants.mutant.Mutant`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.mutant import Mutant

TABLES = Path(__file__).with_name("tables")


def table_of(file: str) -> Path:
    """The table that an entry for this product file belongs in, as `service/rpc/status.py` in `service.rpc.toml`."""
    folders = file.split("/")[:-1]
    return TABLES / f"{'.'.join(folders[:2])}.toml"


def read(table: Path) -> list[Mutant]:
    """The mutants of a table, in its order. Raises ValueError where an entry lacks a field or has one too many."""
    mutants = []
    for name, fields in tomllib.loads(table.read_text()).items():
        try:
            mutants.append(Mutant(name, **fields))
        except TypeError as error:
            raise ValueError(f"{table.name}, [{name}]: {error}") from None
    return mutants


MUTANTS: tuple[Mutant, ...] = tuple(mutant for table in sorted(TABLES.glob("*.toml")) for mutant in read(table))

SAMPLE: tuple[str, ...] = (
    "skip-generation-check",
    "off-by-one-page-need",
    "terminal-twice",
    "read-does-not-consume",
    "results-overtake",
    "prefix-locked-beside-own-copy",
)
"""Tried inside the ordinary suite: quick, and one for each kind of breakage."""
