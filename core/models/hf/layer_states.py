"""What chosen layers of a transformers model read, taken by hooks: drafters run on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class LayerStates:
    """Of the decoder layers of one model. Hooks are put on a layer when its state is first asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = layers_of(model)
        self._hooked: set[int] = set()
        self._wanted: tuple[int, ...] = ()
        self._seen: dict[int, torch.Tensor] = {}

    def begin(self, wanted: tuple[int, ...]) -> None:
        """Call before the model runs. `wanted`: numbers as in `HiddenRequest.layers`."""
        self._wanted = wanted
        self._seen.clear()
        for number in wanted:
            if number not in self._hooked:
                self._hook(number)
                self._hooked.add(number)

    def take(self) -> torch.Tensor | None:
        """[T, len(wanted) * H]: what was asked for, side by side, after the model ran; None where nothing was."""
        if not self._wanted:
            return None
        states = torch.cat([self._seen[number] for number in self._wanted], -1)
        self._seen.clear()
        return states

    def _hook(self, number: int) -> None:
        count = len(self._layers)
        assert number <= count, f"layer {number} of {count}"

        def reads(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if number in self._wanted:
                self._seen[number] = (inputs[0] if inputs else named["hidden_states"])[0]

        def leaves(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if number in self._wanted:
                self._seen[number] = (output if isinstance(output, torch.Tensor) else output[0])[0]

        if number < count:
            self._layers[number].register_forward_pre_hook(reads, with_kwargs=True)
        else:
            self._layers[-1].register_forward_hook(leaves)


def layers_of(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The decoder layers of `model`, in the order in which they run; none where its parts have other names."""
    base: Any = getattr(model, "base_model", model)
    found = getattr(base, "layers", None)
    return list(found) if isinstance(found, torch.nn.ModuleList) else ()


def hidden_size_of(model: Any) -> int:
    """Width of the last hidden states; 0 for a model without a separate base model to read them from."""
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) and getattr(model, "base_model", model) is not model else 0
