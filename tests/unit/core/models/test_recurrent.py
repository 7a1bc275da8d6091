"""Recurrent mixers inside a packed model: which of them drop their state, and a second try after a failed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.models.hf import backend
from core.models.hf.backend import TransformersModel
from core.models.hf.recurrent import PackedMixer
from core.models.hf.self_check import CheckResult
from tests.unit.core.models.reference import load


def mixers(model: TransformersModel) -> list[PackedMixer]:
    found = [vars(module).get("forward") for module in model.module.modules()]
    return [forward for forward in found if isinstance(forward, PackedMixer)]


@pytest.mark.parametrize(("kind", "stepwise"), [("bamba", False), ("jamba", True), ("lfm2", False)])
def test_only_mixers_that_drop_their_state_go_token_by_token(
    checkpoint: Callable[[str], Path], kind: str, stepwise: bool
) -> None:
    model = load(checkpoint(kind))
    found = mixers(model)
    assert len(found) == len(model.spec.state_layers) > 0
    assert {mixer._stepwise for mixer in found} == {stepwise}


def test_a_second_try_starts_from_unwrapped_mixers(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model taken for one with latents, which the self-check refutes, is probed and wrapped once more."""
    check, tried = backend.run_self_check, []

    def refuted_once(model: TransformersModel, reference: object) -> CheckResult:
        tried.append(model)
        return CheckResult(False, 1.0, 0.0) if len(tried) == 1 else check(model, reference)

    monkeypatch.setattr(backend, "absorb_latents", lambda model: True)
    monkeypatch.setattr(backend, "run_self_check", refuted_once)
    model = load(checkpoint("bamba"))
    assert len(tried) == 2 and model is tried[1]
    assert not any(isinstance(mixer._forward, PackedMixer) for mixer in mixers(model))
