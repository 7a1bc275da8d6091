"""Finds the modules whose matrices nothing reads but the module's own `forward`: only those may be kept in other form.

Some code multiplies by a layer's weight without calling the layer (a mixer's fused projection, latents of attention).
A run of the model is watched operation by operation, so what is read elsewhere shows whatever the code looks like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKUP = torch.ops.aten.embedding.default
"""Rows of an embedding: its module has the matrix for itself, also where an output matrix is the same."""


def alone_with_weights(
    owners: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]], run: Callable[[], object]
) -> set[str]:
    """Names of `owners` (module and its matrices by name) that alone read them while `run` runs the model.

    A module that was not called (an expert that no token chose) counts as siblings do, whose names differ in numbers.
    """
    watch = _Watch(owners)
    before = {name: vars(module).get("forward") for name, (module, _) in owners.items()}
    for name, (module, _) in owners.items():
        vars(module)["forward"] = _Entered(watch, name, module.forward)
    try:
        with watch:
            run()
    finally:
        for name, (module, _) in owners.items():
            del vars(module)["forward"]
            if before[name] is not None:
                vars(module)["forward"] = before[name]
    called, shared = _kinds(watch.called), _kinds(watch.read_elsewhere)
    return {name for name in owners if _kind(name) in called and _kind(name) not in shared}


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _kinds(names: Iterable[str]) -> set[str]:
    return {_kind(name) for name in names}


class _Watch(TorchDispatchMode):
    """Notes operations on the matrices outside the `forward` of the modules that have them."""

    def __init__(self, owners: Mapping[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: set[str] = set()
        self.read_elsewhere: set[str] = set()
        self.running: list[str] = []
        self._names: dict[int, set[str]] = {}
        for name, (_, matrices) in owners.items():
            for matrix in matrices:
                self._names.setdefault(matrix.data_ptr(), set()).add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not LOOKUP:
            for each in tree_leaves((args, kwargs)):
                if type(each) in (torch.Tensor, nn.Parameter):
                    self._saw(each)
        return func(*args, **(kwargs or {}))

    def _saw(self, tensor: torch.Tensor) -> None:
        names = self._names.get(tensor.data_ptr())
        if names is not None and names.isdisjoint(self.running):
            self.read_elsewhere |= names


class _Entered:
    """A module's `forward`, during which its matrices may be read."""

    def __init__(self, watch: _Watch, name: str, forward: Callable[..., Any]) -> None:
        self._watch = watch
        self._name = name
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._watch.called.add(self._name)
        self._watch.running.append(self._name)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._watch.running.pop()
