"""What the recorder is handed to and what the publish event covers: a fault planted there is reported by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.device.checks import AssertMode, DeviceChecks
from core.device.recorder import Places
from core.memory.req_to_token_pool import ReqToTokenPool
from core.memory.window.window_pool import TABLE
from core.models.loader import load_model
from core.relay.future_map import FutureMap
from core.relay.payload import NEW_SEQ_LENS
from tests.proofs.happens_before.clocks import VectorClocks
from tests.proofs.happens_before.harness import Ask, Scenario, play_lazily
from tests.proofs.happens_before.lazy_ops import forget_memory
from tests.proofs.happens_before.lazy_streams import LazyStreams
from tests.proofs.happens_before.test_step_kinds import prompt
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")


def test_what_companions_write_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner hands its recorder to the companions too: on a real device only their own hooks tell of their writes."""
    told: set[str] = set()
    wrote = VectorClocks.wrote

    def heard(self: VectorClocks, buffer: str, places: Places) -> None:
        told.add(buffer)
        wrote(self, buffer, places)

    monkeypatch.setattr(VectorClocks, "wrote", heard)
    checkpoint = make_checkpoint("cohere2", tmp_path / "cohere", seed=0, sliding_window=8)
    model = load_model(ModelConfig(str(checkpoint), native="off"), CPU, None)
    scenario = Scenario([Ask(prompt(25), tokens=2)], chunk=8, window_tokens=40)
    outcome = play_lazily(scenario, 0, model, eagerness=0.0)
    assert not outcome.races and outcome.failure is None, outcome.story
    assert TABLE in told, sorted(told)


@pytest.mark.parametrize("number", range(3))
def test_the_publish_event_stands_behind_the_lengths(number: int) -> None:
    """A reader on another stream that waits for the event sees the lengths of that very publication."""
    clocks = VectorClocks()
    streams = LazyStreams(number, clocks, eagerness=0.0)
    checks = DeviceChecks(AssertMode.OFF, CPU)
    with streams.on_forward():
        future_map = FutureMap(ReqToTokenPool(8, 4, CPU), streams, checks)
        rows = torch.tensor([3, 5])
        for lens in ([7, 9], [8, 10]):
            published = future_map.publish(rows, torch.tensor(lens))
            assert published is not None
            with streams.on_copy():
                published.wait(streams.copy)
                read = future_map.extra("new_seq_lens_buf", rows)
            done = streams.new_event()
            done.record(streams.copy)
            done.synchronize()
            assert not [race for race in clocks.races if race.buffer == NEW_SEQ_LENS.name], clocks.story()
            assert read.tolist() == lens
            # What is published next may not overtake this read.
            done.wait(streams.forward)
    assert not clocks.races, clocks.story()
    forget_memory()
