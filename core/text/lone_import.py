"""Imports one module of a package without the rest of the package: for a process that needs nothing else of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def import_alone(name: str) -> ModuleType:
    """The module `name`, imported without running the `__init__` of the packages that it is in.

    Those are empty packages in this process from then on, which know where their modules are, and the version of the
    first of them. A module that does not come up that way is imported as usual. Raises ImportError as that does.
    """
    packages = [name[:at] for at, letter in enumerate(name) if letter == "."]
    if not packages or packages[0] in sys.modules:
        return importlib.import_module(name)
    before = set(sys.modules)
    try:
        _put_empty(packages)
        return importlib.import_module(name)
    except (ImportError, AttributeError):
        for each in [each for each in sys.modules if each.partition(".")[0] == packages[0] and each not in before]:
            del sys.modules[each]
        return importlib.import_module(name)


def _put_empty(packages: list[str]) -> None:
    spec = find_spec(packages[0])
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{packages[0]} is no package")
    (folder, *_) = map(Path, spec.submodule_search_locations)
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        package.__dict__["__version__"] = importlib.metadata.version(packages[0])
        sys.modules[name] = package
