"""Lets a mixer that runs token after token multiply by its large matrices once for all tokens.

Most weights of a mixer are in the matrix that its input goes through first, and in the one that its output comes from.
Neither looks at another token, so nothing but their weights' way from memory is repeated where the recurrence between
them takes one token at a time. Which layers these are is found by watching a call, so a mixer that has none, or changes
its input before, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Projections:
    """The linear layers at both ends of one mixer."""

    entrances: tuple[torch.nn.Linear, ...] = ()
    """Those that get the mixer's input as it is, and run once in a call."""
    exit: torch.nn.Linear | None = None
    """The one whose output the mixer returns as it is; None if there is none."""

    @classmethod
    def of(cls, mixer: torch.nn.Module, call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Projections:
        """Those of `mixer`; `call` runs it once, and returns its input and its output."""
        seen: list[tuple[torch.nn.Linear, Any, Any]] = []

        def watch(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            assert isinstance(module, torch.nn.Linear), type(module)
            seen.append((module, args[0], output))

        linears = [module for module in mixer.modules() if isinstance(module, torch.nn.Linear)]
        hooks = [linear.register_forward_hook(watch) for linear in linears]
        try:
            hidden, output = call()
        finally:
            for hook in hooks:
                hook.remove()
        once = [entry for entry in seen if sum(module is entry[0] for module, *_ in seen) == 1]
        exits = [module for module, _, result in once if result is output]
        entrances = [module for module, given, _ in once if given is hidden and module not in exits]
        return cls(tuple(entrances), exits[0] if exits else None)

    @contextmanager
    def shared(self, hidden: torch.Tensor, sizes: Sequence[int]) -> Iterator[Forward]:
        """Inside the `with` block the mixer may be called for one part of `hidden`, [T, 1, C], after the other.

        `sizes`: tokens of each call; they add up to T. The value turns what the calls returned, put together, into
        outputs.
        """
        before = {layer: vars(layer).get("forward") for layer in (*self.entrances, self.exit) if layer is not None}
        leave: Forward = _as_it_is if self.exit is None else self.exit.forward
        try:
            for layer in self.entrances:
                vars(layer)["forward"] = _Parts(layer.forward(hidden).split(list(sizes)))
            if self.exit is not None:
                vars(self.exit)["forward"] = _as_it_is
            yield leave
        finally:
            for layer, own in before.items():
                vars(layer).pop("forward", None)
                if own is not None:
                    vars(layer)["forward"] = own


class _Parts:
    """Stands in for `forward` of a layer whose outputs are there already."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = iter(parts)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        part = next(self._parts)
        assert part.shape[:-1] == given.shape[:-1], (part.shape, given.shape)
        return part


def _as_it_is(given: torch.Tensor) -> torch.Tensor:
    return given
