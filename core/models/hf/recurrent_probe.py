"""Finds the recurrent layers of a model and the shapes of their states, by watching what they put into a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from core.memory.recurrent.state_pool import StateLayerSpec, StateShape
from core.models.hf.cache_argument import cache_argument, takes_cache
from core.models.hf.packed_attention import KVFacade
from core.models.hf.projections import Projections
from core.models.hf.recurrent import PackedMixer, StateContext, StateView


@dataclass(slots=True)
class RecurrentLayer:
    """One mixer, and the states that it was seen to store."""

    mixer: torch.nn.Module
    width: int
    """Features of its input."""
    conv: StateShape
    recurrent: StateShape | None = None


class RecordingFacade(KVFacade):
    """A `KVFacade` that also acts as an empty cache of recurrent states, and notes which mixer stores which states."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent_layers: dict[int, RecurrentLayer] = {}
        self._calls: list[tuple[torch.nn.Module, int]] = []
        """Mixers being run, the innermost last, and the width of their input."""

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep track of the running mixer inside the `with` block, by hooks on all modules that take a cache."""
        hooks = []
        for module in model.modules():
            if takes_cache(module.forward) and hasattr(module, "layer_idx"):
                hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        self._calls.append((module, 0 if hidden is None else int(hidden.shape[-1])))

    def _leave(self, *_: Any) -> None:
        self._calls.pop()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing stored yet."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing stored yet."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Nothing stored yet."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never."""
        return False

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Note a convolution of `new` [1, channels, T] with a window of `conv_kernel_size`."""
        if state_idx != 0 or conv_kernel_size is None or new.dim() != 3 or layer_idx in self.recurrent_layers:
            raise AttributeError(f"it keeps recurrent state of an unknown kind in layer {layer_idx}")
        module, width = self._calls[-1]
        shape = StateShape((int(new.shape[1]), conv_kernel_size), new.dtype)
        self.recurrent_layers[layer_idx] = RecurrentLayer(module, width, shape)
        return new

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Note a temporal state `new` [1, ...]."""
        layer = self.recurrent_layers.get(layer_idx)
        if state_idx != 0 or layer is None:
            raise AttributeError(f"it keeps recurrent state of an unknown kind in layer {layer_idx}")
        layer.recurrent = StateShape(tuple(new.shape[1:]), new.dtype)
        return new

    def specs(self) -> tuple[StateLayerSpec, ...]:
        """What the pool must hold, in ascending order of layer."""
        found = sorted(self.recurrent_layers.items())
        return tuple(StateLayerSpec(layer_id, layer.conv, layer.recurrent) for layer_id, layer in found)


def wrap_mixers(layers: dict[int, RecurrentLayer]) -> StateContext:
    """Put a `PackedMixer` around every mixer; returns the context that they share."""
    context = StateContext()
    for layer_id, layer in layers.items():
        forward: Any = layer.mixer.forward
        layer.mixer.forward = PackedMixer(forward, layer_id, ignores_state(layer), context, projections_of(layer))
    return context


def unwrap_mixers(model: torch.nn.Module) -> None:
    """Give every mixer of `model` its own `forward` back, for another try: a probe must not watch through a wrapper."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), PackedMixer):
            del module.forward


@torch.inference_mode()
def projections_of(layer: RecurrentLayer) -> Projections:
    """The linear layers at both ends of a mixer, as one token shows them."""
    device = next(layer.mixer.parameters()).device

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.zeros(1, 1, layer.width, dtype=layer.conv.dtype, device=device)
        conv, past = (
            None if each is None else torch.zeros(1, *each.shape, dtype=each.dtype, device=device)
            for each in (layer.conv, layer.recurrent)
        )
        assert conv is not None
        view = StateView(conv, past)
        return hidden, layer.mixer.forward(hidden, **{cache_argument(layer.mixer.forward): view})

    return Projections.of(layer.mixer, call)


@torch.inference_mode()
def ignores_state(layer: RecurrentLayer) -> bool:
    """Whether two tokens at once give the same from any temporal state: then it is dropped, and nothing raises."""
    recurrent = layer.recurrent
    if recurrent is None:
        return False
    device = next(layer.mixer.parameters()).device
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, layer.width, generator=generator).to(device, layer.conv.dtype)
    past = torch.randn(1, *recurrent.shape, generator=generator).to(device, recurrent.dtype)
    ends = []
    for start in (past, torch.zeros_like(past)):
        view = StateView(torch.zeros(1, *layer.conv.shape, dtype=layer.conv.dtype, device=device), start.clone())
        layer.mixer.forward(hidden, **{cache_argument(layer.mixer.forward): view})
        assert view.recurrent is not None
        ends.append(view.recurrent)
    return torch.equal(ends[0], ends[1])
