"""Mixers that go token by token multiply by their large matrices once, and say what they say alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.models.hf.projections import Projections
from core.models.hf.recurrent import PackedMixer
from tests.unit.core.models.reference import load


class Mixer(torch.nn.Module):
    """`twice`: it runs its first layer twice. `scaled`: that layer gets something else than the mixer's input."""

    def __init__(self, twice: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = (torch.nn.Linear(4, 4) for _ in range(3))
        self._twice, self._scaled = twice, scaled
        self.widths: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.inner(hidden * 2 if self._scaled else hidden)
        if self._twice:
            found = found + self.inner(hidden)
        self.widths.append(len(hidden))
        return self.outer(self.middle(found).tanh())


def projections(mixer: Mixer) -> Projections:
    def call() -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.zeros(1, 1, 4)
        return hidden, mixer(hidden)

    return Projections.of(mixer, call)


def test_the_layers_at_both_ends_are_found() -> None:
    mixer = Mixer()
    assert projections(mixer) == Projections((mixer.inner,), mixer.outer)
    for other in (Mixer(twice=True), Mixer(scaled=True)):
        assert projections(other) == Projections((), other.outer)


@pytest.mark.parametrize("options", [{}, {"twice": True}, {"scaled": True}], ids=str)
@torch.inference_mode()
def test_parts_make_what_all_would(options: dict[str, bool]) -> None:
    mixer, hidden, sizes = Mixer(**options), torch.randn(6, 1, 4), [3, 2, 1]
    want, found = mixer(hidden), projections(mixer)
    mixer.widths.clear()
    with found.shared(hidden, sizes) as leave:
        got = leave(torch.cat([mixer(part) for part in hidden.split(sizes)]))
    torch.testing.assert_close(got, want)
    assert mixer.widths == sizes
    torch.testing.assert_close(mixer(hidden), want, msg="every layer is itself again")


@torch.inference_mode()
def test_matrices_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, read = Mixer(), list[tuple[str, int]]()
    found = projections(mixer)
    for name in ("inner", "middle", "outer"):
        layer = getattr(mixer, name)

        def forward(given: torch.Tensor, name: str = name, own: object = layer.forward) -> torch.Tensor:
            read.append((name, len(given)))
            return own(given)  # type: ignore[operator,no-any-return]

        monkeypatch.setattr(layer, "forward", forward)
    hidden = torch.randn(5, 1, 4)
    with found.shared(hidden, [3, 2]) as leave:
        leave(torch.cat([mixer(part) for part in hidden.split([3, 2])]))
    assert read == [("inner", 5), ("middle", 3), ("middle", 2), ("outer", 5)]


@torch.inference_mode()
def test_an_error_leaves_no_layer_replaced() -> None:
    mixer, hidden = Mixer(), torch.randn(2, 1, 4)
    want = mixer(hidden)
    with pytest.raises(ZeroDivisionError), projections(mixer).shared(hidden, [1, 1]):
        raise ZeroDivisionError
    assert not any("forward" in vars(layer) for layer in (mixer.inner, mixer.middle, mixer.outer))
    torch.testing.assert_close(mixer(hidden), want)


@pytest.mark.parametrize(("kind", "entrances"), [("qwen3_next", 2), ("mamba2", 1), ("falcon_h1", 0)])
def test_mixers_of_transformers_have_them(checkpoint: Callable[[str], Path], kind: str, entrances: int) -> None:
    forwards = [vars(module).get("forward") for module in load(checkpoint(kind)).module.modules()]  # type: ignore[attr-defined]
    found = [mixer._projections for mixer in forwards if isinstance(mixer, PackedMixer)]
    assert found and all(len(each.entrances) == entrances and each.exit is not None for each in found)
