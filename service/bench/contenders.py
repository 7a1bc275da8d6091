"""The engines of `slipstream bench cpu` that run in this interpreter, by the names in its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from service.bench.workloads import Contender


def _slipstream(directory: str, dtype: str, quantization: str, threads: int) -> Contender:
    from service.bench.peer import Peer

    return Peer(directory, threads, dtype=dtype, quantization=quantization)


def _transformers(directory: str, dtype: str, quantization: str, threads: int) -> Contender:
    from service.bench.transformers_peer import TransformersPeer

    torch.set_num_threads(threads)
    return TransformersPeer(directory, dtype, quantization)


CONTENDERS: Final[dict[str, Callable[[str, str, str, int], Contender]]] = {
    "slipstream": _slipstream,
    "transformers": _transformers,
}
"""(directory, dtype, quantization, threads) -> a started engine."""
