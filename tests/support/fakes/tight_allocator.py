"""An allocator that has not enough: raises PyTorch's own errors where an operation makes new memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ON_CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB."
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
)
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: torch.OutOfMemoryError(ON_CUDA),
    lambda: RuntimeError(f"{ON_CPU} 2147483648 bytes. Error code 12 (Cannot allocate memory)"),
    lambda: MemoryError("Unable to allocate 2.00 GiB for an array with shape (4096, 131072)"),
)


class TightAllocator(TorchDispatchMode):
    """While entered, on the entering thread: `refuses(bytes)` is asked for every new storage; views have none."""

    def __init__(self, refuses: Callable[[int], bool], error: Callable[[], Exception] = ERRORS[0]) -> None:
        super().__init__()
        self._refuses = refuses
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {storage.data_ptr() for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage.data_ptr() not in known and self._refuses(storage.nbytes()):
                raise self._error()
        return out


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()
