"""One adapter's matrices side by side in one buffer: read once, copied to the device once, freed at once.

Adapters differ in rank and in the layers that they change, so a table of slots x the highest rank would mostly hold
zeros. Here an adapter takes only the memory of its own matrices, so a limit in bytes is a limit on memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64
"""Each matrix begins at a multiple of this: matrix products are slow, or refused, on operands that straddle."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One module's low-rank update: y += (x @ a.T) @ b.T, with the scaling already in `b`."""

    a: torch.Tensor
    """[r, in]."""
    b: torch.Tensor
    """[out, r]."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module's two matrices begin in the buffer, in elements, and their measures."""

    a: int
    b: int
    rank: int
    inputs: int
    outputs: int

    def view(self, buffer: torch.Tensor) -> Delta:
        """The matrices, as views of `buffer`."""
        return Delta(
            buffer[self.a : self.a + self.rank * self.inputs].view(self.rank, self.inputs),
            buffer[self.b : self.b + self.outputs * self.rank].view(self.outputs, self.rank),
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter on the host, in the base's dtype. Immutable: steps that are still to run may refer to it."""

    buffer: torch.Tensor
    """[n] elements, pinned where the device copies from pinned memory."""
    places: Mapping[str, Place]
    """By module name."""
    digest: str = ""
    """Of all of it: tells it from every other adapter, on every machine."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device, the gaps between matrices included."""
        return self.buffer.nbytes

    @property
    def rank(self) -> int:
        """The highest rank of any module."""
        return max(place.rank for place in self.places.values())

    def deltas(self, device: torch.device) -> Mapping[str, Delta]:
        """Matrices by module name in one new allocation on `device`, by one copy on the current stream.

        On the CPU they are views of `buffer`, which is never written again.
        """
        buffer = self.buffer.to(device, non_blocking=True)
        return {name: place.view(buffer) for name, place in self.places.items()}


def pack(deltas: Mapping[str, Delta], *, pin: bool) -> Adapter:
    """Copy `deltas`, at least one and all of one dtype, into one buffer."""
    dtype = next(iter(deltas.values())).a.dtype
    step = ALIGN_BYTES // dtype.itemsize
    places: dict[str, Place] = {}
    end = 0
    for name, delta in deltas.items():
        (rank, inputs), outputs = delta.a.shape, delta.b.shape[0]
        a, b = end, end + _rounded(rank * inputs, step)
        places[name] = Place(a, b, rank, inputs, outputs)
        end = b + _rounded(outputs * rank, step)
    buffer = torch.zeros(end, dtype=dtype, pin_memory=pin)
    for name, delta in deltas.items():
        view = places[name].view(buffer)
        view.a.copy_(delta.a)
        view.b.copy_(delta.b)
    digest = hashlib.sha256(repr(sorted(places.items())).encode())
    digest.update(buffer.view(torch.uint8).numpy().data)
    return Adapter(buffer, places, digest.hexdigest())


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
