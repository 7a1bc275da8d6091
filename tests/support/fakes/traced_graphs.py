"""CUDA graphs without CUDA: operations are recorded once and replayed on the memory they were recorded on.

Stricter than the real thing. A replay runs no Python of the captured work, so a value that the host read at capture
stays as it was; memory that the graph allocated is spoilt before and after every replay; and an operation whose result
depends on a look at the device, which breaks a capture on CUDA, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

from core.device.graphs import Graph
from core.device.streams import DeviceStreams

SPOIL = 0xFF
"""Every byte of it: NaN as a float, -1 as an integer."""

WAITING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal")
"""Operations whose result comes to the host, or has a shape that does."""


class CaptureError(RuntimeError):
    """What CUDA says when captured work waits for the device."""


@dataclass
class Call:
    """One recorded operation and the tensors it returned."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]


@dataclass
class TracedGraph:
    """Recorded work; see the module."""

    calls: list[Call] = field(default_factory=list)
    owned: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """By address, what was allocated while recording."""
    borrowed: dict[int, torch.Tensor] = field(default_factory=dict)
    """By address, a tensor on each storage that was there before: it must live, at this address, with the graph."""
    replays: int = 0

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the recorded operations again."""
        self._spoil()
        for call in self.calls:
            result = call.op(*call.args, **call.kwargs)
            again = _tensors(result)
            _wait_for_collective(call.op.namespace, result)
            for kept, made in zip(call.outputs, again, strict=True):
                if made.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr():
                    kept.copy_(made)
        self._spoil()
        self.replays += 1

    def _spoil(self) -> None:
        for storage in self.owned.values():
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(SPOIL)


class _Recording(TorchDispatchMode):
    def __init__(self, graph: TracedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(tensor) for tensor in _tensors((args, kwargs))):
            # Of tensors that ranks share each operation is done on what it wraps, and that is recorded.
            return NotImplemented
        forbid_waiting(func, args)
        graph = self._graph
        for tensor in _tensors((args, kwargs)):
            address = tensor.untyped_storage().data_ptr()
            if address not in graph.owned:
                graph.borrowed.setdefault(address, tensor)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if any(map(is_traceable_wrapper_subclass, outputs)):
            # It has wrapped what was there, and computed nothing.
            return result
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in graph.borrowed and storage.nbytes():
                graph.owned[storage.data_ptr()] = storage
        graph.calls.append(Call(func, args, kwargs, outputs))
        return result


def forbid_waiting(func: Any, args: Any) -> None:
    """CaptureError if the operation would make the host wait for an accelerator."""
    name = func.overloadpacket.__name__
    if name in WAITING or (name in ("index", "index_put", "index_put_", "_index_put_impl_") and _by_mask(args)):
        raise CaptureError(f"operation not permitted when stream is capturing: {func}")


def _by_mask(args: Any) -> bool:
    """Whether an indexing operation picks by a mask, whose number of hits the host would have to know.

    Not to write one number from the host, as an assignment in Python does: that is `masked_fill_`.
    """
    if len(args) > 2 and isinstance(args[2], torch.Tensor) and args[2].dim() == 0:
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


class TracedGraphs:
    """A `GraphMaker`. `made`: all its graphs in the order of their capture."""

    def __init__(self) -> None:
        self.made: list[TracedGraph] = []

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run once to warm up, then record."""
        work()
        graph = TracedGraph()
        with _Recording(graph):
            work()
        self.made.append(graph)
        return graph


class GraphStreams(DeviceStreams):
    """CPU streams whose forward stream can be captured. `graphs`: the maker that was asked for last."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.graphs: TracedGraphs | None = None

    def new_graphs(self) -> TracedGraphs:
        self.graphs = TracedGraphs()
        return self.graphs


def _wait_for_collective(namespace: str, result: Any) -> None:
    """What comes behind a collective on its stream waits for it; on the CPU the host has to."""
    if namespace == "_c10d_functional":
        for made in _tensors(result):
            torch.ops._c10d_functional.wait_tensor(made)
    elif namespace == "c10d":
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.ScriptObject):
                torch._C._distributed_c10d.Work.unbox(leaf).wait()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return list(_only_tensors(tree_flatten(tree)[0]))


def _only_tensors(leaves: list[Any]) -> Iterator[torch.Tensor]:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
