"""Outputs with adapters are the same with drafts: how many tokens a row has is known when its step begins.

The drafter knows nothing of adapters, and takes the text of one for that of another; what is verified has the adapter
of its row, base rows and several adapters side by side (SGLang #34337 and #28395 took the lengths of a verify step from
where there were none). In float64: sums in another order then move a draw by 1e-16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from core.config import EngineConfig, LoraConfig, ModelConfig
from core.device.streams import DeviceStreams
from core.engine import build
from core.engine.speculation import GRID, Speculation
from core.models.base import Model
from core.models.loader import load_model
from core.models.lora import slots
from core.models.lora.checkpoint import AdapterLimits, read_adapter
from core.scheduler.outputs import Ending
from core.types.request import Req
from tests.proofs.equivalence.test_speculation import (
    CONTEXT,
    CPU,
    MOST,
    Player,
    Seen,
    Setting,
    both_ways,
    requests,
    same_but_for_rounding,
)
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.adversaries import ADVERSARIES, Says, always_right, like_a_coin
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.late_drafter import LateDrafter
from tests.support.fakes.late_streams import LateStreams
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

AT_START = ("narrow", "all")
LATER = "regex"
CHOICES = ("", "narrow", "all")
LATE, ENDED = 8, 6
"""So many requests come with an adapter that is loaded once so many others have ended."""


@dataclass(frozen=True, slots=True)
class Adapted(Setting):
    """With adapters at start."""

    directory: Path = Path()

    def config(self) -> EngineConfig:
        found = tuple((name, str(self.directory / name)) for name in AT_START)
        return replace(Setting.config(self), lora=LoraConfig(found))


class AdapterPlayer(Player):
    """Requests have adapters by turns, or none. While they run one adapter is loaded, and one unloaded."""

    directory: ClassVar[Path]

    def __init__(
        self, setting: Setting, model: Model, speculation: Speculation | None, streams: DeviceStreams | None = None
    ) -> None:
        super().__init__(setting, model, speculation, streams)
        assert isinstance(setting, Adapted)
        self._model: Any = model
        self._directory = setting.directory
        self._table = self.built.adapters.table
        self._late: Sequence[Req] = ()
        self._ended = 0

    def play(self, reqs: Sequence[Req]) -> list[Seen]:
        self._late, early = reqs[-LATE:], reqs[:-LATE]
        for place, req in enumerate(early):
            self._adapt(req, CHOICES[place % len(CHOICES)])
        found = super().play(early)
        assert [info.name for info in self._table.listed().adapters] == ["all", LATER], "the other has left"
        return found + [self._seen[req] for req in self._late]

    def _adapt(self, req: Req, name: str) -> None:
        req.adapter_slot = self._table.slot(name)
        req.salt = self._table.salt(req.adapter_slot, "")
        self._table.acquire(req.adapter_slot)

    def _end(self, ended: Ending) -> None:
        super()._end(ended)
        self._table.release(ended.req.adapter_slot)
        self._ended += 1
        if self._ended == ENDED:
            self._change()

    def _change(self) -> None:
        model = self._model
        adapter = read_adapter(self._directory / LATER, model.module, model.spec.dtype, AdapterLimits())
        self._table.load(LATER, adapter, pinned=False)
        assert self._table.unload("narrow") > 0, "requests still use it"
        for req in self._late:
            self._adapt(req, LATER)
        self.ask(self._late)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, and an adapter by each name."""
    root = tmp_path_factory.mktemp("adapted")
    base = make_checkpoint("qwen3", root / "base")
    for seed, name in enumerate((*AT_START, LATER)):
        make_adapter(base, root / name, seed, **ADAPTERS[name])
    return root


@pytest.fixture
def load(made: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Model]:
    """A base of its own for each engine: adapters hook its layers."""
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    config = ModelConfig(str(made / "base"), native="off", context_length=CONTEXT)
    return lambda: load_model(config, CPU)


def proved(setting: Adapted, load: Callable[[], Model], says: Says, seed: int) -> int:
    """How many drafts were right in a run that put out the same."""
    reqs = lambda: requests(VOCAB_SIZE, seed)  # noqa: E731
    plain, speculated, drafter = both_ways(setting, load, reqs, says, VOCAB_SIZE, AdapterPlayer)
    same_but_for_rounding(plain, speculated, reqs())
    return drafter.accepted


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says", ADVERSARIES[:3], ids=lambda each: each.__name__)
def test_no_draft_changes_what_an_adapter_says(
    says: Says, overlap: bool, made: Path, load: Callable[[], Model], seed: int
) -> None:
    accepted = proved(Adapted(overlap=overlap, directory=made), load, says, seed)
    assert (accepted > 0) == says.__name__.startswith(("always_right", "right_then"))


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 16), (16, 512)])
def test_whatever_pages_and_chunks_are(
    page_size: int, chunk: int, made: Path, load: Callable[[], Model], seed: int
) -> None:
    assert proved(Adapted(page_size, chunk, directory=made), load, like_a_coin(seed), seed + 1) > 0


def test_rows_that_give_way_keep_their_adapters(made: Path, load: Callable[[], Model], seed: int) -> None:
    assert proved(Adapted(tokens=112, rows=6, directory=made), load, like_a_coin(seed), seed + 2) > 0


def test_a_grid_has_the_adapter_of_its_row_at_every_place(
    made: Path, load: Callable[[], Model], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Eager beside captured steps: a replay runs no hooks."""
    monkeypatch.setattr(build, "build_attention", lambda *_: GridAttention())
    setting, reqs = Adapted(directory=made), lambda: requests(VOCAB_SIZE, seed + 4)
    plain = AdapterPlayer(setting, load(), None).play(asked := reqs())
    truth = [[*req.prompt.tolist(), *seen.tokens] for req, seen in zip(asked, plain, strict=True)]
    drafter = LateDrafter(truth, like_a_coin(seed), VOCAB_SIZE)
    speculation = Speculation(drafter, MOST, FixedDepth(MOST), GRID)
    speculated = AdapterPlayer(setting, load(), speculation, LateStreams()).play(reqs())
    same_but_for_rounding(plain, speculated, reqs())
    assert drafter.accepted > 0


def test_drafts_without_their_rows_adapter_are_missed(
    made: Path, load: Callable[[], Model], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The control: where the places of a step without drafts stand, its own do not."""
    monkeypatch.setattr(slots.AdapterSlots, "measured", lambda self, *_: None)
    with pytest.raises(Exception):  # noqa: B017  The layers may notice before the outputs do.
        proved(Adapted(directory=made), load, always_right, seed)


def test_adapters_of_recurrent_layers_see_drafts_in_the_order_of_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Their layers run for one token after the other, and count them."""
    base = make_checkpoint("bamba", tmp_path / "base")
    for place, name in enumerate((*AT_START, LATER)):
        make_adapter(base, tmp_path / name, place, **ADAPTERS["all"])
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    config = ModelConfig(str(base), native="off", context_length=CONTEXT)
    assert proved(Adapted(directory=tmp_path), lambda: load_model(config, CPU), like_a_coin(seed), seed + 3) > 0


@pytest.mark.parametrize("kind", ["gemma3_text", "mistral"])
def test_adapters_of_windowed_layers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    base = make_checkpoint(kind, tmp_path / "base")
    for place, name in enumerate((*AT_START, LATER)):
        make_adapter(base, tmp_path / name, place, **ADAPTERS[name])
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    config = ModelConfig(str(base), native="off", context_length=CONTEXT)
    assert proved(Adapted(directory=tmp_path), lambda: load_model(config, CPU), like_a_coin(seed), seed + 4) > 0


def test_a_draft_model_drafts_for_its_adapted_self(made: Path, load: Callable[[], Model], seed: int) -> None:
    """It has no adapter: it is right of base rows, and of the others now and then."""
    reqs = lambda: requests(VOCAB_SIZE, seed + 5)  # noqa: E731
    plain = AdapterPlayer(Adapted(directory=made), load(), None).play(reqs())
    player = AdapterPlayer(Adapted(directory=made, method=f"draft:{made / 'base'}"), load(), None)
    same_but_for_rounding(plain, player.play(reqs()), reqs())
    assert player.drafts.tokens > player.drafts.accepted > 0
