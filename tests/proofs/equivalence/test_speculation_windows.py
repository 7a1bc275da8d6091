"""Outputs of models with sliding windows are the same with drafts, whatever these are, and no row reads a lost page.

Pages that leave a window are poisoned at once, so one that is passed before it is known that its row has got beyond it
shows in the next token. In float64: sums in another order then move a draw by 1e-16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.memory.window.window_pages import WindowPages
from core.models.base import Model
from core.models.loader import load_model
from core.types.arrays import Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_speculation import (
    CONTEXT,
    CPU,
    MOST,
    OPTIONS,
    Setting,
    both_ways,
    same_but_for_rounding,
)
from tests.proofs.equivalence.test_speculation import requests as matrix
from tests.proofs.equivalence.test_window_pool import eager, poisoned
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fakes.adversaries import ADVERSARIES, Says, always_right, like_a_coin

__all__ = ["eager", "poisoned"]

KINDS = ("gemma3_text", "mistral", "gpt_oss", "gemma2")
"""Windows of 16 tokens: in some layers, in all of them, with sinks, with a soft cap. SGLang could start no engine with
drafts for some of these (#22679, #8186).
"""
SINGLE = ("gpt_oss",)
"""Its experts do not compute in float64."""
GREEDY = tuple(name for name, options in OPTIONS.items() if not options.get("temperature"))
"""What a difference of 1e-6 does not change."""


@dataclass(frozen=True, slots=True)
class Windows(Setting):
    """`window_tokens`: the size of the pool of windows; 0 for none."""

    window_tokens: int = 1024
    cache: str = "radix"

    def config(self) -> EngineConfig:
        config = Setting.config(self)
        kept: dict[str, Any] = {"prefix_cache": self.cache, "sliding_window_pool": self.window_tokens > 0}
        if self.window_tokens:
            kept["max_window_tokens"] = self.window_tokens
        return replace(config, memory=replace(config.memory, **kept))


@pytest.fixture(scope="module")
def model_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Model]:
    """The model of a kind, loaded once: an engine binds it to pools of its own."""
    loaded: dict[str, Model] = {}

    def load(kind: str) -> Model:
        if kind not in loaded:
            with pytest.MonkeyPatch.context() as patch:
                dtype = torch.float32 if kind in SINGLE else torch.float64
                patch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: dtype)
                config = ModelConfig(str(checkpoint_of(kind)), native="off", context_length=CONTEXT)
                loaded[kind] = load_model(config, CPU)
        return loaded[kind]

    return load


def shared(seed: int, names: tuple[str, ...] = tuple(OPTIONS)) -> list[Req]:
    """Requests of every kind of option, half of which begin alike and longer than a window."""
    head = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 33)
    made = matrix(VOCAB_SIZE, seed, names)
    for req in made[::2]:
        req.prompt = np.concatenate([head, req.prompt[:12]])
    return made


def proved(setting: Setting, model: Model, says: Says, reqs: Callable[[], list[Req]]) -> int:
    """How many drafts were right in a run that put out the same."""
    plain, speculated, drafter = both_ways(setting, lambda: model, reqs, says, VOCAB_SIZE)
    same_but_for_rounding(plain, speculated, reqs())
    return drafter.accepted


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", KINDS)
def test_windows_with_drafts(kind: str, model_of: Callable[[str], Model], poisoned: Counter[str], seed: int) -> None:
    names = GREEDY if kind in SINGLE else tuple(OPTIONS)
    assert proved(Windows(), model_of(kind), like_a_coin(seed), lambda: shared(seed, names)) > 0
    assert poisoned["pages"] > 50


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says", ADVERSARIES[:3], ids=lambda each: each.__name__)
def test_no_draft_changes_what_a_window_shows(
    says: Says, overlap: bool, model_of: Callable[[str], Model], poisoned: Counter[str], seed: int
) -> None:
    accepted = proved(Windows(overlap=overlap), model_of("gemma3_text"), says, lambda: shared(seed + 1))
    assert (accepted > 0) == says.__name__.startswith(("always_right", "right_then"))
    assert poisoned["pages"] > 100


@pytest.mark.usefixtures("eager", "poisoned")
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [16, 512])
def test_whatever_pages_and_chunks_are(page_size: int, chunk: int, model_of: Callable[[str], Model], seed: int) -> None:
    setting = Windows(page_size, chunk)
    assert proved(setting, model_of("mistral"), like_a_coin(seed), lambda: shared(seed + 2)) > 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cache", ["radix", "none"])
def test_rows_that_give_way_for_windows_go_on_where_they_were(
    cache: str, model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the windows of two rows, or less; other pages than those of windows are plenty. Not under every seed a
    window is short at the moment when a row grows.
    """
    seed = 1
    refused, can_grow = Counter[bool](), WindowPages.can_grow

    def counted(self: WindowPages, rows: Ints) -> bool:
        grows = can_grow(self, rows)
        refused[grows] += 1
        return grows

    monkeypatch.setattr(WindowPages, "can_grow", counted)
    setting = Windows(4, 16, overlap=False, rows=6, window_tokens=84, cache=cache)
    assert proved(setting, model_of("gemma3_text"), like_a_coin(seed), lambda: shared(seed + 3)) > 0
    assert refused[False] > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral"])
def test_windows_without_a_pool_of_their_own(kind: str, model_of: Callable[[str], Model], seed: int) -> None:
    setting = Windows(window_tokens=0)
    assert proved(setting, model_of(kind), always_right, lambda: shared(seed + 4)) > 0


def alone(seed: int) -> list[Req]:
    """One request that goes far beyond its window."""
    prompt = np.random.default_rng(seed).integers(3, VOCAB_SIZE, 9)
    return [Req("long", 0, prompt, SamplingParams(temperature=1.0, ignore_eos=True), seed, CONTEXT - 10)]


@pytest.mark.usefixtures("eager", "poisoned")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_least_pool_that_is_let_in_holds_all_drafts(
    overlap: bool, page_size: int, model_of: Callable[[str], Model], seed: int
) -> None:
    """Window, chunk, and the drafts of all steps in flight; a page less is refused at start."""
    doubt = MOST * (2 if overlap else 1)
    pages = (16 + doubt + page_size - 3) // page_size + 2 + 15 // page_size
    setting = Windows(page_size, 16, overlap, window_tokens=pages * page_size)
    with pytest.raises(ConfigError, match="drafts in flight"):
        proved(replace(setting, window_tokens=(pages - 1) * page_size), model_of("gemma3_text"), like_a_coin(0), list)
    assert proved(setting, model_of("gemma3_text"), always_right, lambda: alone(seed)) > 0
    assert proved(setting, model_of("gemma3_text"), ADVERSARIES[1], lambda: alone(seed)) == 0


@pytest.mark.usefixtures("eager", "poisoned")
def test_pages_passed_by_all_that_a_row_may_have_are_missed(
    model_of: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The control: a draft that proves wrong leaves the row where it still sees the page."""
    planned = WindowPages.planned

    def too_early(
        self: WindowPages, rows: Ints, prefix: Ints, extend: Ints, pages: Ints, ahead: Ints | None = None
    ) -> Any:
        if ahead is None:
            return planned(self, rows, prefix, extend, pages)
        return planned(self, rows, np.maximum(prefix, self._first[rows] * 4), extend + ahead, pages)

    monkeypatch.setattr(WindowPages, "planned", too_early)
    with pytest.raises(Exception):  # noqa: B017  What it is depends on which number is the first to be wrong.
        proved(Windows(), model_of("gemma3_text"), ADVERSARIES[1], lambda: shared(seed + 5))
