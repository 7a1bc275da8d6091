"""Requests that come, go and give way in any order: what a step wants travels in one copy, each to its reader.

Uploads are packed as for CUDA, static memory has hardly any room, and the stand-in for our sampling kernels knows of a
row what it finds on the device alone. Outputs are those of an engine with none of that.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.device.parcel import Parcel
from core.device.staging import Staging
from core.device.static_block import StaticBlock
from core.engine import build
from core.engine.speculation import GRID, Speculation
from core.executor import decode_graphs, grid_graphs, mixed_graphs
from core.executor.step import StepRunner
from core.scheduler.outputs import Ending
from core.types.io import FinishReason
from core.types.request import Req
from tests.proofs.equivalence.test_speculation import CONTEXT, MOST, VOCAB, Player, Seen, Setting, requests
from tests.proofs.happens_before.hash_model import HashModel
from tests.support.fakes import grid_attention
from tests.support.fakes.adversaries import like_a_coin
from tests.support.fakes.device_hash_model import DeviceHashModel
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.fakes.grid_attention import MixedAttention
from tests.support.fakes.late_drafter import LateDrafter
from tests.support.fakes.late_streams import LateStreams
from tests.support.fakes.step_grammar import StepGrammar, follows
from tests.support.fakes.traced_graphs import GraphStreams
from tests.unit.core.executor.test_nothing_compiled import upload_as_on_cuda

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")

Kind = tuple[str, bool, bool]
"""Of a step: what it is, whether it was replayed, and whether a row has a grammar."""


class Transfers:
    """Copies to the device by the thread that launches a step: the most that steps of each kind made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from tests.support.fakes import sampling_kernels

        self.most: Counter[Kind] = Counter()
        self.moved = 0
        """Steps whose inputs reached static memory by way of other memory."""
        self._launching = threading.local()
        packs, launch = Staging.pinned, StepRunner.launch

        def pinned(staging: Staging, ids: Any) -> Any:
            self._launching.count = getattr(self._launching, "count", 0) + (type(staging) is not Parcel)
            return packs(staging, ids)

        def launched(runner: StepRunner, batch: Any, *given: Any) -> Any:
            before, self._launching.count = self._replays(runner), 0
            done = launch(runner, batch, *given)
            verifies = runner._speculator is not None and runner._speculator._attempt is not None  # type: ignore[attr-defined]
            kind = "grid" if verifies else "mixed" if batch.num_extend else "decode"
            found = kind, self._replays(runner) > before, len(batch.sampling.constrained) > 0
            self.most[found] = max(self.most[found], self._launching.count)
            return done

        def apart(*given: Any, **named: Any) -> None:
            # What stands in for a kernel makes copies that the kernel does not.
            before = self._launching.count
            sampling_kernels.sample_rows(*given, **named)
            self._launching.count = before

        patch.setattr("core.sampling.triton.sampler.sample_rows", apart)
        # Which tokens are whose, our own backend is told by the step; this one only stands in for it.
        shared = SimpleNamespace(upload=lambda arrays: [torch.from_numpy(each) for each in arrays])
        patch.setattr(grid_attention, "Staging", lambda _: shared)
        through = StaticBlock._through

        def moved(block: StaticBlock, *given: Any) -> Any:
            self.moved += 1
            return through(block, *given)

        patch.setattr(StaticBlock, "_through", moved)
        patch.setattr(Staging, "pinned", pinned)
        patch.setattr(StepRunner, "launch", launched)

    @staticmethod
    def _replays(runner: StepRunner) -> int:
        return sum(each.replays for each in (runner.graphs, runner.mixed, runner.grids) if each is not None)


class Storm(Player):
    """Asks a few at a time, and gives some up on their way."""

    def weather(self, reqs: list[Req], draw: random.Random) -> list[Seen]:
        waiting, asked = list(reqs), list[Req]()
        while waiting or self._scheduler.has_work:
            while waiting and (draw.random() < 0.3 or not self._scheduler.has_work):
                asked.append(waiting.pop(0))
                self.ask(asked[-1:])
            live = [req for req in asked if self._seen[req].reason is None]
            if live and draw.random() < 0.06:
                self._scheduler.intake.end(Ending(draw.choice(live), FinishReason.CANCELLED))
            self._news.clear()
            if not self._scheduler.step(0.0) and self._executor.in_flight:
                assert self._news.wait(60.0), "no step ends"
        self._executor.stop()
        self._scheduler.memory.check_integrity()
        assert not any(self._scheduler.stats.assert_failures.values())
        return [self._seen[req] for req in reqs]


def asks(seed: int, count: int) -> list[Req]:
    """Requests of all kinds; some follow a grammar, some have more biases than there is room for."""
    draw, made = random.Random(seed), list[Req]()
    while len(made) < count:
        made += requests(VOCAB, seed + len(made))
    for req in made:
        if draw.random() < 0.25:
            req.grammar = StepGrammar()
        elif draw.random() < 0.25:
            biases = {draw.randrange(3, VOCAB): draw.uniform(-4, 4) for _ in range(draw.randrange(1, 60))}
            object.__setattr__(req.params, "logit_bias", biases)
    return made[:count]


@needs_triton
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("streams", [GraphStreams, LateStreams], ids=["inline", "late"])
@pytest.mark.parametrize("count", [10, 100])
def test_all_travels_together_and_arrives_at_its_reader(
    count: int, streams: type[GraphStreams], drafts: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    from core.sampling.triton.sampler import TritonSampler
    from tests.support.fakes import sampling_kernels

    print(f"seed {seed}")
    setting = Setting(overlap=streams is LateStreams, tokens=120, rows=6)
    plain = Player(Setting(rows=6), HashModel(VOCAB, CONTEXT), None).play(asked := asks(seed, count))
    truth = [[*req.prompt.tolist(), *seen.tokens] for req, seen in zip(asked, plain, strict=True)]
    speculation = Speculation(LateDrafter(truth, like_a_coin(seed), VOCAB), MOST, FixedDepth(MOST), GRID)
    upload_as_on_cuda(monkeypatch)
    monkeypatch.setattr("core.sampling.triton.sampler.normalise", sampling_kernels.normalise)
    for place in (decode_graphs, grid_graphs, mixed_graphs):
        monkeypatch.setattr(place, "LISTED", 0)
        monkeypatch.setattr(place, "CARRIED", 2)
    monkeypatch.setattr(mixed_graphs, "TOKENS", (8, 32))
    monkeypatch.setattr(build, "build_attention", lambda *_: MixedAttention())
    monkeypatch.setattr(build, "build_sampler", TritonSampler)
    transfers = Transfers(monkeypatch)
    storm = Storm(setting, DeviceHashModel(VOCAB, CONTEXT), speculation if drafts else None, streams())
    for req, one, other in zip(
        again := asks(seed, count), plain, storm.weather(again, random.Random(seed)), strict=True
    ):
        assert other.tokens == one.tokens[: len(other.tokens)], req.request_id
        assert other.reason in (one.reason, FinishReason.CANCELLED)
        assert req.grammar is None or follows(other.tokens)
    if count == 100:
        assert transfers.moved > 0 and storm.stats.preemptions > 0
        assert {kind for kind, *_ in transfers.most} == {"decode", "mixed"} | ({"grid"} if drafts else set())
    for (kind, replayed, constrained), most in transfers.most.items():
        assert most <= 1 + constrained, (kind, replayed, constrained, most)
