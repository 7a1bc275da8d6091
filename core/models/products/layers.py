"""Whole layers of encoders in one call of compiled code: attention and an MLP, each with its residual and its norm.

A layer of BERT is a dozen modules. Python takes 0.3 ms to go through them, which is longer than a short text takes in a
small one, and waits for the interpreter behind each while another thread is busy. A layer is known by what it has: six
matrices, two norms and an activation, and one call of attention over whole texts. Where its norms are, and which is the
first, is found by what it computes: what went into it and came out of it in a run of the model is compared with what
compiled code makes of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from core.models.hf.packed_attention import CONTEXT
from core.models.hf.products import Attend
from core.models.products.joined import NORMS, TOLERANCE
from core.models.products.packing import Forward, ForwardOf, activation_of

MATRICES: Final = 6
"""Of queries, keys, values and what attention found; into the MLP and out of it."""
ARRANGEMENTS: Final = ((False, (0, 1)), (False, (1, 0)), (True, (0, 1)), (True, (1, 0)))
"""(whether norms come before what they are for, which of a module's norms is the first)."""


class LayerForward(ForwardOf):
    """`forward` of a layer, over the texts of the step."""

    def __init__(self, module: Any, layer: Any, beside: int | None) -> None:
        """`beside`: how many times None the layer has behind its output, in a tuple; None where it has no tuple."""
        self._context, self._layer, self._beside = getattr(module, CONTEXT), layer, beside

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """[1, T, H] to [1, T, H]."""
        found: torch.Tensor = self._layer(hidden_states, self._context.texts)
        return found if self._beside is None else (found, *[None] * self._beside)

    def on(self, module: Any) -> LayerForward:
        """See `ForwardOf`: the texts."""
        return LayerForward(module, self._layer, self._beside)


@dataclass(slots=True)
class Attended:
    """One call of attention."""

    heads: int
    kv_heads: int
    scale: float
    distances: torch.Tensor | None = field(default=None, compare=False)
    """As of `Attend`: a buffer of the model, so that every step has the same."""


@dataclass(slots=True)
class Seen:
    """What went into a layer in one call, and came out of it."""

    given: torch.Tensor
    texts: Sequence[tuple[int, int]]
    found: torch.Tensor
    beside: int | None
    """As of `LayerForward`."""
    attended: list[Attended | None] = field(default_factory=list)
    """Its calls of attention; None for one that `EncoderLayer` does not have."""


@dataclass(slots=True)
class Parts:
    """What a layer has, in the order in which it names them."""

    matrices: list[str]
    norms: list[Any]
    activations: list[str]


@torch.inference_mode()
def layers_in(
    model: nn.Module, packed: Mapping[str, Forward], extension: Any, run: Callable[[], object]
) -> dict[str, Forward]:
    """By name, what stands for `forward` of the layers of `model` whose matrices are in `packed`.

    `run` runs the model, in which what is packed is in place, and attention of whole texts is compiled.
    """
    parts = {name: each for name, module in model.named_modules() if (each := _parts_of(name, module, packed))}
    found: dict[str, Forward] = {}
    for name, seen in _seen_in(model, list(parts), run).items():
        layer = _compiled(parts[name], seen, packed, extension)
        if layer is not None:
            found[name] = LayerForward(model.get_submodule(name), layer, seen[0].beside)
    return found


def _parts_of(name: str, module: nn.Module, packed: Mapping[str, Forward]) -> Parts | None:
    """None for what has other modules than a layer, or parameters beside those."""
    parts = Parts([], [], [])
    for child, each in module.named_modules(prefix=name):
        if child in packed and isinstance(each, nn.Linear):
            parts.matrices.append(child)
        elif type(each).__name__ in NORMS and getattr(each, "weight", None) is not None:
            parts.norms.append(each)
        elif (activation := activation_of(each)) is not None:
            parts.activations.append(activation)
        elif next(each.parameters(recurse=False), None) is not None:
            return None
    whole = len(parts.matrices) == MATRICES and len(parts.norms) == 2 and len(set(parts.activations)) == 1
    return parts if whole and _sees_whole_texts(module) and "forward" not in vars(module) else None


def _sees_whole_texts(module: nn.Module) -> bool:
    """Whether its texts are packed, and no attention in it has a window, which the short ones of a run do not show."""
    windows = getattr(getattr(module, CONTEXT, None), "windows", None)
    return windows is not None and not any(each in windows for each in module.modules())


def _seen_in(model: nn.Module, names: Sequence[str], run: Callable[[], object]) -> dict[str, list[Seen]]:
    """The calls of each of `names` that attends once, as `EncoderLayer` does; of ALBERT's one layer there are many."""
    watch = _Watch({each.data_ptr() for each in model.buffers()})
    modules = {name: model.get_submodule(name) for name in names}
    with watch.over(modules):
        run()
    return {
        name: calls
        for name, calls in watch.seen.items()
        if all(len(each.attended) == 1 and each.attended == calls[0].attended != [None] for each in calls)
    }


class _Watch:
    """Notes what goes into layers and comes out of them while the model runs."""

    def __init__(self, buffers: set[int]) -> None:
        """`buffers`: where those of the model are."""
        self.seen: dict[str, list[Seen]] = {}
        self._buffers = buffers
        self._attended: list[Attended | None] = []

    @contextmanager
    def over(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """While it watches `modules`, by name."""
        contexts = {id(each): each for each in (getattr(module, CONTEXT) for module in modules.values())}
        before = [(context, context.attend) for context in contexts.values()]
        for context, attend in before:
            context.attend = self._noting(attend)
        for name, module in modules.items():
            vars(module)["forward"] = self._entered(name, module, module.forward)
        try:
            yield
        finally:
            for module in modules.values():
                del vars(module)["forward"]
            for context, attend in before:
                context.attend = attend

    def _noting(self, attend: Attend) -> Attend:
        def noted(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            texts: Sequence[tuple[int, int]],
            scale: float,
            out: torch.Tensor,
            distances: torch.Tensor | None = None,
        ) -> None:
            lasts = distances is None or distances.data_ptr() in self._buffers
            self._attended.append(Attended(query.shape[1], key.shape[1], scale, distances) if lasts else None)
            attend(query, key, value, texts, scale, out, distances)

        return noted

    def _entered(self, name: str, module: nn.Module, forward: Forward) -> Forward:
        def entered(*given: Any, **named: Any) -> Any:
            self._attended = []
            answer = forward(*given, **named)
            found, beside = answer, None
            if isinstance(answer, tuple) and not any(each is not None for each in answer[1:]):
                found, beside = answer[0], len(answer) - 1
            rows = given[0] if given else named.get("hidden_states")
            if isinstance(rows, torch.Tensor) and isinstance(found, torch.Tensor) and rows.shape == found.shape:
                # A copy: what other modules attend to behind it is not this layer's.
                seen = Seen(rows, getattr(module, CONTEXT).texts, found, beside, [*self._attended])
                self.seen.setdefault(name, []).append(seen)
            return answer

        return entered


def _compiled(parts: Parts, seen: Sequence[Seen], packed: Mapping[str, Forward], extension: Any) -> Any:
    """The layer in the arrangement that gives what was seen; None where none does."""
    attended = seen[0].attended[0]
    assert attended is not None, "others were left out"
    products = [packed[name] for name in parts.matrices]
    for before, (first, second) in ARRANGEMENTS:
        norms = [_norm(parts.norms[place]) for place in (first, second)]
        shape = attended.heads, attended.kv_heads, attended.scale, attended.distances
        try:
            layer = extension.EncoderLayer(products, parts.activations[0], *norms, before, *shape)
            if all(_agree(layer(each.given, each.texts), each.found) for each in seen):
                return layer
        except (RuntimeError, TypeError, ValueError):  # matrices of other shapes, or in another order
            return None
    return None


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    largest = float(expected.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= TOLERANCE[found.dtype] * largest


def _norm(module: Any) -> tuple[Any, ...]:
    """`NormParts` of C++."""
    bias = None if module.bias is None else module.bias.detach()
    return (
        module.weight.detach(),
        bias,
        float(getattr(module, NORMS[type(module).__name__])),
        True,
        module.weight.numel(),
    )
