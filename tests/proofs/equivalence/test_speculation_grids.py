"""Grids, the accelerator's way to verify drafts, on the stand-in for its streams and graphs.

Outputs are those of an engine without speculation, token for token, with captured steps and without, whether the host
hears of tokens in time or late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.engine import build
from core.engine.speculation import GRID, Speculation
from core.errors import StartupError
from core.executor.step import StepRunner
from core.models.base import Model
from core.models.loader import load_model
from core.types.request import Req
from tests.proofs.equivalence.test_speculation import (
    CONTEXT,
    CPU,
    MOST,
    OPTIONS,
    VOCAB,
    Player,
    Seen,
    Setting,
    assert_same,
    requests,
    same_but_for_rounding,
)
from tests.proofs.happens_before.hash_model import HashModel
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fakes.adversaries import (
    ADVERSARIES,
    Says,
    always_right,
    always_wrong,
    like_a_coin,
    nothing,
    right_then_wrong,
)
from tests.support.fakes.device_hash_model import DeviceHashModel
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.grid_attention import GridAttention
from tests.support.fakes.late_drafter import LateDrafter
from tests.support.fakes.late_streams import LateStreams
from tests.support.fakes.step_grammar import StepGrammar, follows
from tests.support.fakes.traced_graphs import GraphStreams

STREAMS: dict[str, tuple[Callable[[], DeviceStreams], bool]] = {
    "eager": (lambda: DeviceStreams(CPU), True),
    "captured": (GraphStreams, False),
    "captured and late": (LateStreams, True),
}
"""Streams, and whether planning overlaps with their work. Without that the host knows all when it guesses."""


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_attention", lambda *_: GridAttention())


def device_model() -> Model:
    return DeviceHashModel(VOCAB, CONTEXT)


class Both:
    """The same requests without speculation, and with grids."""

    def __init__(
        self,
        setting: Setting,
        reqs: Callable[[], list[Req]],
        says: Says,
        streams: DeviceStreams,
        model: Callable[[], Model] = device_model,
        plain: Callable[[], Model] = lambda: HashModel(VOCAB, CONTEXT),
        vocab: int = VOCAB,
        depth: int = MOST,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if plain is not model:
                patch.setattr(build, "build_attention", build_attention)
            self.plain = Player(setting, plain(), None).play(asked := reqs())
        truth = [[*req.prompt.tolist(), *seen.tokens] for req, seen in zip(asked, self.plain, strict=True)]
        self.drafter = LateDrafter(truth, says, vocab)
        player = Player(setting, model(), Speculation(self.drafter, MOST, FixedDepth(depth), GRID), streams)
        self.runner: StepRunner = player._executor._runner  # type: ignore[attr-defined]
        self.seen: list[Seen] = player.play(reqs())
        self.drafts = player.drafts
        self.retracted = player.stats.preemptions

    def replays(self) -> tuple[int, int]:
        """(of steps without drafts, of grids)."""
        graphs, grids = self.runner.graphs, self.runner.grids
        assert graphs is not None and grids is not None, "steps are captured"
        return graphs.replays, grids.replays


build_attention = build.build_attention


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("says", ADVERSARIES, ids=lambda each: each.__name__)
def test_no_draft_changes_an_output(says: Says, kind: str, seed: int) -> None:
    streams, overlap = STREAMS[kind]
    both = Both(Setting(overlap=overlap), lambda: requests(VOCAB, seed), says, streams())
    assert_same(both.plain, both.seen, requests(VOCAB, seed))
    if says is always_right:
        assert both.drafter.accepted > 0
    if says is always_wrong:
        assert both.drafter.accepted == 0
    if kind != "eager":
        plain, grids = both.replays()
        assert grids > 0 if says is always_right else plain > 0 if says is nothing else True
    pool = both.runner.state.pool
    assert not pool.table[0].any()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_whatever_pages_and_batches_are(page_size: int, seed: int) -> None:
    """Eight rows in batches of every size, so padded, growing and shrinking."""
    setting = Setting(page_size, 512, rows=8)
    both = Both(setting, lambda: requests(VOCAB, seed + 1), like_a_coin(seed), LateStreams())
    assert_same(both.plain, both.seen, requests(VOCAB, seed + 1))
    assert both.drafter.accepted > 0 and both.replays()[1] > 0


def test_rows_that_give_way_go_on_where_they_were(seed: int) -> None:
    reqs = lambda: requests(VOCAB, seed + 2, [*OPTIONS, *OPTIONS])  # noqa: E731
    both = Both(Setting(tokens=80, rows=6), reqs, like_a_coin(seed), LateStreams())
    assert_same(both.plain, both.seen, reqs())
    assert both.drafter.accepted > 0 and both.retracted > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_constrained_rows_try_nothing_beside_drafts(overlap: bool, seed: int) -> None:
    def reqs() -> list[Req]:
        made = requests(VOCAB, seed + 5)
        for req in made[::3]:
            req.grammar = StepGrammar()
        return made

    both = Both(Setting(overlap=overlap), reqs, always_right, LateStreams())
    assert_same(both.plain, both.seen, reqs())
    for req, seen in zip(reqs(), both.seen, strict=True):
        assert req.grammar is None or follows(seen.tokens)
    assert both.drafter.accepted > 0


def test_penalties_count_the_drafts_before_each_place(seed: int) -> None:
    """Of eleven tokens most come again and again."""
    reqs = lambda: requests(11, seed, [name for name in OPTIONS if "penalt" in name] * 3)  # noqa: E731
    both = Both(
        Setting(),
        reqs,
        always_right,
        GraphStreams(),
        lambda: DeviceHashModel(11, CONTEXT),
        lambda: HashModel(11, CONTEXT),
        11,
    )
    assert_same(both.plain, both.seen, reqs())
    assert both.drafter.accepted > 0


@pytest.mark.parametrize("depth", range(1, MOST + 1))
def test_a_step_takes_the_least_width_that_holds_its_drafts(depth: int, seed: int) -> None:
    both = Both(Setting(), lambda: requests(VOCAB, seed + 3), right_then_wrong, GraphStreams(), depth=depth)
    assert_same(both.plain, both.seen, requests(VOCAB, seed + 3))
    assert both.drafts.tokens > 0 and both.drafts.most <= depth


def test_a_captured_grid_takes_one_transfer_and_reads_what_stays(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """For greedy rows, which need nothing of the host but their places."""
    taken: list[str] = []
    pinned, upload, launch = Staging.pinned, Staging.upload, StepRunner.launch

    def noting(name: str, plain: Any) -> Any:
        return lambda self, arrays: (taken.append(name) if len(arrays) else None, plain(self, arrays))[1]

    def watched(runner: StepRunner, *args: Any) -> Any:
        before = 0 if runner.grids is None else runner.grids.replays
        taken.clear()
        launched = launch(runner, *args)
        if runner.grids is not None and runner.grids.replays > before:
            assert taken == ["pinned"]
        return launched

    monkeypatch.setattr(Staging, "pinned", noting("pinned", pinned))
    monkeypatch.setattr(Staging, "upload", noting("upload", upload))
    monkeypatch.setattr(StepRunner, "launch", watched)
    streams = GraphStreams()
    both = Both(Setting(overlap=False), lambda: requests(VOCAB, seed, ["greedy"] * 6), always_right, streams)
    assert_same(both.plain, both.seen, requests(VOCAB, seed, ["greedy"] * 6))
    state, graphs, grids = both.runner.state, both.runner.graphs, both.runner.grids
    assert grids is not None and graphs is not None and grids.replays > 0 and streams.graphs is not None
    static = [graphs.block.memory, graphs.logits, graphs.seq_lens, graphs._last, grids.block.memory]
    outputs = grids.outputs
    static += [outputs.before, outputs.tried, outputs.ids, outputs.logits, state.pool.table, state.checks.counters]
    static += [state.kv_pool.k(0), state.kv_pool.v(0), state.future_map.violated(1)]
    static += [state.future_map.buffer(name) for name in ("output_tokens_buf", "new_seq_lens_buf")]
    stays = {tensor.untyped_storage().data_ptr() for tensor in static}
    for graph in streams.graphs.made:
        strangers = [tensor for address, tensor in graph.borrowed.items() if address not in stays and tensor.numel()]
        assert not strangers, [(tuple(tensor.shape), tensor.dtype) for tensor in strangers]


def test_what_does_not_count_goes_to_slot_0(seed: int) -> None:
    """The newest token stands there again, so a write to its own slot would say the same, and in what order is open."""
    written: list[int] = []

    class Watched(DeviceHashModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            slots = batch.out_cache_loc.tolist()
            real = [slot for slot in slots if slot]
            assert len(set(real)) == len(real), "two tokens for one slot"
            if batch.grid_width:
                written.append(len(slots) - len(real))
                assert len(real) == int((batch.seq_lens - batch.prefix_lens).sum())
            return super().forward(batch)

    streams = DeviceStreams(CPU)
    both = Both(Setting(), lambda: requests(VOCAB, seed), like_a_coin(seed), streams, lambda: Watched(VOCAB, CONTEXT))
    assert_same(both.plain, both.seen, requests(VOCAB, seed))
    assert sum(written) > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_models_by_transformers_say_the_same_tokens(
    kind: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In float64: sums in another order then move a draw by 1e-16, and none of these lies that near another token."""
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    config = ModelConfig(str(checkpoint_of(kind)), native="off", context_length=CONTEXT)
    load: Any = lambda: load_model(config, CPU)  # noqa: E731
    reqs = lambda: requests(VOCAB_SIZE, seed + 4)  # noqa: E731
    both = Both(Setting(), reqs, always_right, LateStreams(), load, load, VOCAB_SIZE)
    same_but_for_rounding(both.plain, both.seen, reqs())
    assert both.drafter.accepted > 0


def test_what_was_said_before_is_guessed_a_step_late(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """`ngram` as an accelerator has it, with the real index, and always on: the second time all was said before."""
    monkeypatch.setattr("core.engine.speculation.WAYS", {})
    monkeypatch.setattr(build, "AdaptiveDepth", lambda most, times: FixedDepth(most))
    reqs = lambda: requests(VOCAB, seed + 6, ["greedy", "greedy logprobs"] * 4)  # noqa: E731
    plain = Player(Setting(), HashModel(VOCAB, CONTEXT), None).play(reqs())
    player = Player(Setting(method="ngram"), device_model(), None, LateStreams())
    for last in (False, True):
        assert_same(plain, player.play(reqs(), stop=last), reqs())
    assert player.drafts.accepted > 0
    runner: StepRunner = player._executor._runner  # type: ignore[attr-defined]
    assert runner.grids is not None and runner.grids.replays > 0


def test_what_needs_lengths_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ngram` by name; `auto` goes without."""
    monkeypatch.setattr("core.engine.speculation.WAYS", {})
    with pytest.raises(StartupError, match="ngram is not possible: the model does not promise"):
        Player(Setting(method="ngram"), HashModel(VOCAB, CONTEXT), None)
    monkeypatch.setattr(build, "build_attention", build_attention)
    with pytest.raises(StartupError, match="ngram is not possible: the attention backend plans on the host"):
        Player(Setting(method="ngram"), device_model(), None)
    assert Player(Setting(method="auto"), device_model(), None).stats.drafts is None


def test_numbers_that_are_not_finite_fail_a_row_only_where_they_count(seed: int) -> None:
    """Behind a wrong draft the model computes NaN; it never samples that token itself."""
    poison = VOCAB - 1

    class Poisoned(DeviceHashModel):
        def forward(self, batch: ForwardBatch) -> torch.Tensor:
            poisoned = batch.input_ids.index_select(0, batch.last_indices) == poison
            logits = super().forward(batch)
            logits[:, poison] = -1.0
            return logits.masked_fill_(poisoned[:, None], float("nan"))

    def poisonous(truth: list[int], most: int, vocab: int) -> list[int]:
        return [*truth[:1], *[poison] * (most - 1)]

    model: Any = lambda: Poisoned(VOCAB, CONTEXT)  # noqa: E731
    reqs = lambda: requests(poison, seed, ["greedy"] * 4)  # noqa: E731
    both = Both(Setting(overlap=False), reqs, poisonous, GraphStreams(), model, model)
    assert_same(both.plain, both.seen, reqs())
    assert both.drafter.accepted > 0 and both.replays()[1] > 0
