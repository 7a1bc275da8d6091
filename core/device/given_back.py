"""Gives the memory of tensors back to the device while nothing uses it, and takes it again under the same tensors.

On an accelerator a storage is resized to nothing and back (as FSDP frees its shards): whatever views it stays a tensor,
and finds the new memory, at another address. On the CPU the addresses stay, and Linux takes the pages behind them
(MADV_DONTNEED): they are zeros when they are touched again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch


class GivenBack:
    """The storages of some tensors, without memory until `restore`. Use none of the tensors meanwhile.

    `keep`: their contents wait in host memory; else they are zeros afterwards.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool = False) -> None:
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self.nbytes = 0
        """Bytes that the device has back."""
        for storage in storages.values():
            size = storage.nbytes()
            if storage.device.type != "cuda":
                # What is kept on the CPU has nowhere else to go; what compiled code has packed is nowhere (meta).
                self.nbytes += _forget(storage) if storage.device.type == "cpu" and not keep else 0
                continue
            copy = torch.UntypedStorage(size).pin_memory().copy_(storage) if keep else None
            self._held.append((storage, size, copy))
            storage.resize_(0)
            self.nbytes += size
        if self._held:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Give the tensors their memory again. Raises what the device raises where there is too little."""
        for storage, size, copy in self._held:
            storage.resize_(size)
            if copy is None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
            else:
                storage.copy_(copy)
        self._held.clear()


def _forget(storage: torch.UntypedStorage) -> int:
    """Have Linux take back the whole memory pages of `storage`, of the CPU; returns their bytes."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    failed = advise(begin, end - begin, mmap.MADV_DONTNEED)
    return 0 if failed else end - begin
