"""The name under which transformers hands a cache on: one of three, by its version and by the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names for it: since 5.24 one for all modules. Before, `past_key_values`, and `cache_params` of some recurrent ones.

5.24 still understands the old names, with a FutureWarning at each call, but a `forward` with an old name that is called
by a module with the new one is not known to it: the newest name that a signature has is the right one.
"""


def takes_cache(forward: Callable[..., Any]) -> bool:
    """Whether `forward` can be given a cache."""
    return not inspect.signature(forward).parameters.keys().isdisjoint(CACHE_ARGUMENTS)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name under which `forward` takes its cache. Raises TypeError if it takes none."""
    names = inspect.signature(forward).parameters
    found = next((name for name in CACHE_ARGUMENTS if name in names), None)
    if found is None:
        raise TypeError(f"{forward.__qualname__} takes no cache, but {', '.join(names)}")
    return found
