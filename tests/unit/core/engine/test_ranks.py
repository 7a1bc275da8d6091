"""Ranks of an engine: what is refused before any is started, and how the loss of one is noticed."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.config import (
    DisaggConfig,
    EngineConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    NodesConfig,
    SpeculationConfig,
)
from core.engine import nodes, ranks
from core.engine.rank_settings import captures, sized_by
from core.engine.ranks import RankLost, Ranks, open_ranks, stop_all
from core.engine.watchdog import Watchdog
from core.errors import ConfigError, StartupError
from core.memory.kv_pool import KVPool
from core.memory.window.window_pages import NAME as WINDOW
from core.memory.window.window_pool import SlidingWindowPool

CPU = torch.device("cpu")
MADE = EngineConfig(model=ModelConfig("x", tensor_parallel=2))


def model(**changes: Any) -> EngineConfig:
    return dataclasses.replace(MADE, model=dataclasses.replace(MADE.model, **changes))


def piped(**changes: Any) -> EngineConfig:
    return dataclasses.replace(model(tensor_parallel=1, pipeline_parallel=2), **changes)


REFUSED: dict[str, Callable[[], EngineConfig]] = {
    "speculative": lambda: piped(speculation=SpeculationConfig("ngram")),
    "a model that drafts": lambda: dataclasses.replace(MADE, speculation=SpeculationConfig("mtp")),
    "lora": lambda: piped(lora=LoraConfig(directory="x")),
    "deterministic": lambda: model(deterministic=True),
    "disk_cache": lambda: dataclasses.replace(MADE, memory=MemoryConfig(disk_cache="x")),
    "role": lambda: dataclasses.replace(MADE, disagg=DisaggConfig(role="prefill")),
    "weights_dir": lambda: model(weights_dir="x"),
    "kv_cache_dtype": lambda: model(kv_cache_dtype="int8"),
    "quantization": lambda: model(quantization="int8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_ranks_cannot_have_are_refused_before_any_is_started(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.World, "join", lambda *_: pytest.fail("nothing is started"))
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Process", lambda **_: pytest.fail("nothing is started"))
    made = REFUSED[name]()
    with pytest.raises(ConfigError, match=f"^{made.model.shared_by} is not possible with {name} yet$"):
        open_ranks(made, CPU)


def test_one_rank_is_no_ranks() -> None:
    assert open_ranks(model(tensor_parallel=1), CPU) is None


def test_devices_that_there_are_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel 2 needs 2 devices here: there are 1"):
        open_ranks(MADE, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nodes.socket, "create_server", lambda *_: pytest.exit("there are enough"))
    with pytest.raises(pytest.exit.Exception, match="there are enough"):
        open_ranks(MADE, torch.device("cuda"))


class Process:
    """Alive until a test says otherwise."""

    name, pid = "slipstream-rank-1", 77
    exitcode: int | None = None

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        self.log.append("join")

    def kill(self) -> None:
        self.log.append("kill")
        self.exitcode = -9


class Group:
    """What was sent to the others; `broken`: a peer is gone, and `lost`: which."""

    pulse: Any = None
    lost: str | None = None

    def __init__(self, *, broken: bool = False) -> None:
        self.log: list[Any] = []
        self._broken = broken

    def send(self, data: bytes) -> None:
        if self._broken:
            raise RuntimeError("Connection closed by peer\nand more")
        self.log.append(data)

    def wait_for_ended(self, ranks: Sequence[int], seconds: float) -> None:
        self.log += [f"waited for {rank}" for rank in ranks]

    def named(self, error: str) -> str | None:
        return self.lost

    def leave(self) -> None:
        self.log.append("left")


def made(process: Process, group: Group) -> Ranks:
    return Ranks(group, [process])  # type: ignore[arg-type, list-item]  # stand-ins


def test_the_watchdog_tells_of_a_rank_that_is_gone() -> None:
    process = Process()
    watchdog = Watchdog(10.0, 0.0, made(process, Group()))
    assert not watchdog.hangs(1.0, 1, 0)
    process.exitcode = -9
    with pytest.raises(RankLost, match=r"slipstream-rank-1 \(process 77\) was ended by SIGKILL"):
        watchdog.hangs(2.0, 1, 0)


def test_an_engine_that_died_of_a_lost_rank_says_which(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what the library says of the connection, which is at a loss itself."""
    monkeypatch.setattr(ranks, "SEEN_SECONDS", 0.1)
    process, cause = Process(), RuntimeError("Connection closed by peer GLHF")
    watchdog = Watchdog(10.0, 0.0, made(process, Group()))
    assert watchdog.told(cause) is cause
    process.exitcode = -9
    error = ValueError("something else")
    assert watchdog.told(error) is error
    assert str(watchdog.told(cause)) == "slipstream-rank-1 (process 77) was ended by SIGKILL"
    assert [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"] == [
        "the engine died: RuntimeError: Connection closed by peer GLHF",
        "the engine died: ValueError: something else",
        "the engine died: RankLost: slipstream-rank-1 (process 77) was ended by SIGKILL",
    ]


def test_ranks_end_by_themselves_and_those_that_do_not_are_ended() -> None:
    process, group = Process(), Group()
    others = made(process, group)
    others.close()
    assert group.log == [b"", "left"] and process.log == ["join", "kill", "join"]
    others.close()
    others.check()
    assert process.log == ["join", "kill", "join"] and group.log == [b"", "left", "left"], "nothing is told twice"


def test_ranks_of_other_machines_have_heard_it_before_this_one_leaves() -> None:
    """What is on its way when a process exits is lost."""
    group: Any = Group()
    Ranks(group, [], elsewhere=(1, 2)).close()
    assert group.log == [b"", "waited for 1", "waited for 2", "left"]


def test_a_rank_of_another_machine_is_lost_by_its_silence_or_by_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SEEN_SECONDS", 0.01)
    group: Any = Group()
    others, cause = Ranks(group, [], elsewhere=(1,)), RuntimeError("Connection closed by peer [10.0.0.2]:7")
    others.check()
    assert others.blamed(cause) is cause
    group.lost = "rank 1 at 10.0.0.2"
    assert str(others.blamed(cause)) == "rank 1 at 10.0.0.2 is gone"
    group.pulse = SimpleNamespace(silent=lambda now: "rank 1 at 10.0.0.2")
    with pytest.raises(RankLost, match=r"^rank 1 at 10\.0\.0\.2 has given no sign of life for 30 s$"):
        others.check()
    group.pulse = SimpleNamespace(silent=lambda now: None)
    others.check()


def test_a_machine_that_is_silent_while_weights_are_loaded_ends_this_one() -> None:
    """Nothing else would: all ranks load together, and wait for each other without end."""
    group, log = Group(), list[Any]()
    pulse = SimpleNamespace(end_when_silent=lambda end: log.append(end) or (lambda: log.append("over")), silent=print)
    group.beat = lambda: pulse  # type: ignore[attr-defined]
    others = made(Process(), group)
    others.beat()
    assert log == [ranks.end_now]
    others.check()
    assert log == [ranks.end_now, "over"], "the engine is there, and looks itself"


def test_a_further_machine_looks_whether_its_other_ranks_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for all to meet."""
    process, config = Process(), EngineConfig(MADE.model, nodes=NodesConfig(2, 1, "127.0.0.1"))
    asked = list[bool]()

    def be(*told: Any) -> bool:
        *_, check = told
        check()
        process.exitcode = 3
        with pytest.raises(RankLost, match="ended with exit code 3"):
            check()
        asked.append(True)
        return True

    monkeypatch.setattr(ranks, "check_parts", lambda _: None)
    monkeypatch.setattr(ranks, "settled", lambda made, _: made)
    monkeypatch.setattr(ranks, "meeting_of", lambda *_, leads: None)
    monkeypatch.setattr(ranks, "start_ranks", lambda *_: [process])
    monkeypatch.setattr(ranks, "be_rank", be)
    assert ranks.follow_leader(config, lambda: None) and asked and process.log == ["join", "kill", "join"]


def test_nothing_is_told_where_one_is_gone() -> None:
    """It would wait for the one that is."""
    gone, there, group = Process(), Process(), Group()
    gone.exitcode = 1
    Ranks(group, [gone, there]).close()  # type: ignore[arg-type, list-item]  # stand-ins
    assert group.log == ["left"] and there.log == ["join", "kill", "join"]


@pytest.mark.parametrize("windows", [0, 5])
def test_followers_have_pools_of_the_leaders_sizes(windows: int) -> None:
    """That of windows too, which they would size by a number of tokens where the leader sized it by memory."""
    group = Group()
    window = SlidingWindowPool(KVPool((), windows, 4, torch.float32, CPU), 9) if windows else None
    memory = SimpleNamespace(page_size=4, allocator=SimpleNamespace(num_pages=9))
    pools: Any = SimpleNamespace(memory=memory, companions={WINDOW: window} if window else {})
    made(Process(), group).sized(pools)
    found = sized_by(memoryview(group.log[0]), MemoryConfig(page_size=4))
    assert (found.max_total_tokens, found.max_window_tokens) == (36, 4 * windows or None)


@pytest.mark.parametrize("error", [StartupError("nobody came"), KeyboardInterrupt()])
def test_ranks_that_were_started_in_vain_are_ended(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    started, registered = list[Process](), list[Any]()

    def start(**_: Any) -> Process:
        started.append(Process())
        return started[-1]

    def join(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda _: SimpleNamespace(Process=start))
    monkeypatch.setattr(ranks.World, "join", join)
    monkeypatch.setattr(ranks.atexit, "register", lambda *what: registered.append(what))
    with pytest.raises(type(error)):
        open_ranks(model(tensor_parallel=3), CPU)
    assert [each.log for each in started] == [["start", "kill", "join"]] * 2
    assert registered == [(ranks._kill, started)], "and at the end of the process, which would wait for them"


def test_a_rank_that_was_gone_is_no_error_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    process, group = Process(), Group(broken=True)
    made(process, group).close()
    assert group.log == ["left"] and "a rank was gone already: Connection closed by peer" in caplog.text


@pytest.mark.parametrize("dead", [True, False])
def test_a_dead_engine_waits_for_nothing(dead: bool) -> None:
    process, group, stopped = Process(), Group(), list[str]()
    executor: Any = SimpleNamespace(stop=lambda: stopped.append("executor"))
    disagg: Any = SimpleNamespace(close=lambda: stopped.append("transfers"))
    disk: Any = SimpleNamespace(close=lambda: stopped.append("files"))
    once = ["transfers", "files"] if dead else ["transfers", "executor", "files"]
    stop_all(executor, made(process, group), disagg, disk, dead=dead)
    assert group.log == (["left"] if dead else [b"", "left"]) and stopped == once
    stop_all(executor, None, disagg, disk, dead=dead)
    assert stopped == once * 2


def test_what_cannot_go_on_ends_all_at_once() -> None:
    process, group = Process(), Group()
    made(process, group).kill()
    assert group.log == ["left"] and process.log == ["kill", "join"]


def test_every_refusal_is_tried() -> None:
    assert {name for name, _ in ranks.REFUSED} == set(REFUSED)


def test_pipelines_and_engines_that_share_experts_are_not_captured() -> None:
    captured = dataclasses.replace(MADE, executor=dataclasses.replace(MADE.executor, cuda_graphs=True))
    assert captures(captured)
    assert not captures(dataclasses.replace(piped(), executor=captured.executor))


def test_why_an_engine_did_not_start_is_what_the_other_rank_said() -> None:
    group: Any = Group()
    group.failure = lambda seconds: "rank 1: its weights are corrupt"
    others = made(Process(), group)
    assert str(others.why(StartupError("Connection closed by peer"))) == "rank 1: its weights are corrupt"
    own = StartupError("no room here")
    assert others.why(own) is own
    group.failure = lambda seconds: None
    closed = StartupError("Connection closed by peer")
    assert others.why(closed) is closed
