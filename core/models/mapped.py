"""Weights that lie in a mapped file become memory of this process.

`safetensors` maps files, and what needs no other type stays where it is. Then another program that writes the file in
place changes what is served, and one that cuts it off ends the process (SIGBUS). A training loop writes over files.
What compiled code packs was copied with that, so a large matrix that it will pack is left where it is until then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")
SMALL = 1 << 20
"""Elements of what is copied however a model will be computed: norms, biases, tables."""
PLAIN = (torch.Tensor, torch.nn.Parameter)


def own(module: torch.nn.Module, directory: Path, most: int | None = None) -> int:
    """Copy the tensors of `module` that lie in mapped files of `directory`; returns the bytes of the copies.

    Of `most` elements at most, if that is given. Call it while nothing computes with `module`.
    """
    ranges = sorted(_ranges(directory))
    if not ranges:
        return 0
    begins, copied = [begin for begin, _ in ranges], 0
    for tensor in chain(module.parameters(), module.buffers()):
        if type(tensor) not in PLAIN or tensor.device.type != "cpu" or (most is not None and tensor.numel() > most):
            continue
        at = bisect_right(begins, tensor.data_ptr()) - 1
        if at >= 0 and tensor.data_ptr() < ranges[at][1]:
            tensor.data = tensor.data.clone()
            copied += tensor.nbytes
    return copied


def _ranges(directory: Path) -> Iterator[tuple[int, int]]:
    """(first address, address behind the last) of each mapping of a file of weights; none where no system tells."""
    files = {str(file.resolve()) for file in directory.glob("*.safetensors")}
    if not MAPS.exists():
        return
    for line in MAPS.read_text().splitlines():
        addresses, _, rest = line.partition(" ")
        path = rest.split(maxsplit=4)[4] if len(rest.split(maxsplit=4)) == 5 else ""
        if path in files:
            begin, _, end = addresses.partition("-")
            yield int(begin, 16), int(end, 16)
