"""The list of product files that no mutant breaks yet, which may only shrink.

`python -m tests.mutants --bare` shows it by folder, without the files that have a mutant by now, which it takes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.logic import files_with_logic
from tests.mutants.mutant import Mutant

LIST = Path(__file__).with_name("bare.txt")


def without_mutant(mutants: Iterable[Mutant]) -> set[str]:
    """Product files with logic that none of `mutants` breaks."""
    return set(files_with_logic()) - {mutant.file for mutant in mutants}


def listed(path: Path = LIST) -> list[str]:
    """Files of the list, in its order."""
    return path.read_text().split()


def shrink(mutants: Iterable[Mutant], path: Path = LIST) -> list[str]:
    """Take files out of the list that have a mutant, or are gone; return what is left. Adds nothing."""
    left = sorted(set(listed(path)) & without_mutant(mutants))
    path.write_text("".join(f"{name}\n" for name in left))
    return left


def by_folder(names: Iterable[str]) -> str:
    """How many of `names` are in each folder, a line each."""
    counts = Counter(name.rpartition("/")[0] for name in names)
    return "\n".join(f"{count:5}  {folder}" for folder, count in sorted(counts.items()))
