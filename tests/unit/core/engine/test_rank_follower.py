"""What a further rank does with signals, with the machine that started it, and with a rank that is lost meanwhile."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from core.config import EngineConfig, ModelConfig, NodesConfig
from core.distributed.meeting import Meeting
from core.engine import rank_follower
from core.engine.rank_follower import be_rank, be_started
from core.errors import ModelLoadError, StartupError

MADE = EngineConfig(model=ModelConfig("x", tensor_parallel=4))


@pytest.mark.parametrize("node", [0, 1])
def test_ranks_of_a_later_machine_end_with_what_started_them(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first one a thread starts them that has ended long before."""
    config = EngineConfig(model=MADE.model, nodes=NodesConfig(2, node))
    done, ignored = list[str](), list[int]()
    monkeypatch.setattr(rank_follower, "end_with_parent", lambda: done.append("with its parent"))
    monkeypatch.setattr(rank_follower, "be_rank", lambda *_: done.append("rank"))
    monkeypatch.setattr(signal, "signal", lambda number, how: ignored.append(number))
    be_started(config, 1, Meeting(1))
    assert done == (["with its parent", "rank"] if node else ["rank"])
    assert ignored == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("model type 'llama' is not supported: Connection reset by peer", "another rank was lost while this one"),
        ("its weights are corrupt", "its weights are corrupt"),
    ],
)
def test_a_rank_that_cannot_be_loaded_says_why(why: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what a library makes of a connection that is gone."""
    said = list[str]()
    world = SimpleNamespace(fail=said.append, leave=lambda: said.append("left"))

    def load(*_: Any) -> None:
        raise ModelLoadError(why)

    monkeypatch.setattr(rank_follower, "use_threads", lambda _: None)
    monkeypatch.setattr(rank_follower.World, "join", lambda *_: world)
    monkeypatch.setattr(rank_follower, "_following", load)
    with pytest.raises(StartupError, match=told):
        be_rank(MADE, 1, Meeting(1))
    assert said[0].startswith(told) and said[1] == "left"
