"""The benchmark of prefill and decode on two engines: what is timed is what it says, and keys that are lost fail it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from core.disagg.interface import Wanted
from core.types.handover import Handed, TakeOver
from service.bench import bench, key_rates, pd, plain_bytes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd, "ASKED", 2)
    monkeypatch.setattr(key_rates, "SENT", 2)
    shape = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(pd, "FAMILY_SHAPES", {"llama": shape | heads})
    # Of the whole process, and tests have one already.
    monkeypatch.setattr(pd, "shorten_switch_interval", lambda *, writes: None)


def run(*more: str) -> Result:
    options = ("--bytes", "2500000", "--prompt", "40", "--rounds", "1", "--threads", "1", "--json")
    return CliRunner().invoke(bench, ["pd", *options, *more])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("way", "plain"),
    [
        ("tcp", "plain sockets"),
        pytest.param(
            "nixl",
            "plain NIXL",
            marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (slipstream[nixl])"),
        ),
    ],
)
def test_all_figures_are_printed(way: str, plain: str) -> None:
    answer = run("--transfer-engine", way)
    assert answer.exit_code == 0, answer.output
    for line in (
        "keys of 2,500,000 bytes",
        plain,
        "giver to taker",
        "first token of a prompt of 40 tokens",
        "prefill, then decode",
        "decode alone",
        "keys that did not arrive: of 0 of 4 requests",
    ):
        assert line in answer.output
    found = json.loads(answer.output.splitlines()[-1])
    assert all(value > 0 for value in found["rates"].values())
    first = found["first"]
    assert first["one"] > 0 and first["both"] > first["decode"] > 0
    assert (first["asked"], first["lost"], first["reasons"]) == (4, 0, {})


@pytest.mark.usefixtures("small")
def test_keys_that_do_not_arrive_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that decodes is sent to a room that nobody knows: it answers all the same."""

    def elsewhere(host: str, port: int, _: str, engine_id: str) -> TakeOver:
        return TakeOver(host, port, "another room", engine_id)

    monkeypatch.setattr(pd, "TakeOver", elsewhere)
    monkeypatch.setattr(pd, "measure_rates", lambda *_: key_rates.Rates(1.0, 1.0, 1.0))
    answer = run()
    assert answer.exit_code == 1
    assert "4 of 4 requests did without the keys (4 gone)" in answer.output


def test_bytes_that_do_not_arrive_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process offers something else than what this one asks for."""
    monkeypatch.setattr(key_rates, "CLAIM", "another prompt")
    monkeypatch.setattr(pd, "shorten_switch_interval", lambda *, writes: None)
    answer = run()
    assert answer.exit_code == 1
    assert "keys did not arrive (gone)" in answer.output


async def test_each_way_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both legs are of one prompt, which no other request has; the time of both is from the first one's beginning."""
    asked: list[tuple[str, tuple[int, ...]]] = []
    now = 0.0

    async def first_token(engine: Any, prompt: tuple[int, ...], source: TakeOver | None = None) -> float:
        assert (source == TakeOver("host", 1, "room", "id")) == (engine == "decode")
        asked.append((engine, prompt))
        return 2.0

    async def prefilled(engine: Any, prompt: tuple[int, ...]) -> Handed:
        nonlocal now
        asked.append((engine, prompt))
        now += 5.0
        return Handed("room", "host", 1, "id", 16)

    monkeypatch.setattr(pd, "_first_token", first_token)
    monkeypatch.setattr(pd, "_prefilled", prefilled)
    monkeypatch.setattr(pd.time, "perf_counter", lambda: now)
    engines: Any = ("plain", "prefill", "decode")
    assert await pd._round(*engines, 40, random.Random(1)) == (2.0, 7.0, 2.0)
    assert [engine for engine, _ in asked] == [*engines] * pd.ASKED
    prompts = [prompt for _, prompt in asked]
    assert all(len(prompt) == 40 for prompt in prompts)
    assert prompts[1::3] == prompts[2::3] and len(set(prompts)) == 2 * pd.ASKED


def test_rates_are_medians_of_rounds_behind_one_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[str] = []
    # Two of each round: seconds of keys, and of plain sockets.
    keys, raw = iter((90.0, 90.0, 1.0, 3.0, 4.0, 4.0, 5.0, 5.0)), iter((9.0, 9.0, 1.0, 1.0, 4.0, 4.0, 10.0, 10.0))

    class Plain:
        def __init__(self, held: memoryview) -> None:
            assert len(held) == 1000

        def take(self, told: dict[str, Any]) -> float:
            assert told == {"port": 2}
            return next(raw)

    @contextmanager
    def process(
        nbytes: int, engine: str, core: int | None
    ) -> Iterator[tuple[Callable[[str], None], int, dict[str, Any]]]:
        assert engine == "tcp"
        yield rooms.append, 1, {"port": 2}

    async def taken(_: Any, port: int, wanted: Wanted, parts: Sequence[memoryview]) -> float:
        assert (port, wanted.room) == (1, rooms[-1]) and sum(map(len, parts)) == 1000
        return next(keys)

    monkeypatch.setattr(key_rates, "SENT", 2)
    monkeypatch.setattr(key_rates, "_giving_process", process)
    monkeypatch.setattr(key_rates, "_taken", taken)
    monkeypatch.setitem(key_rates.PLAIN, "tcp", plain_bytes.Plain("plain", plain_bytes.SocketGiven, Plain))  # type: ignore[arg-type]
    # Seconds of the rounds: 2, 4, 5 beside 1, 4, 10.
    assert key_rates.measure_rates(1000, 3) == key_rates.Rates(250.0, 250.0, 1.0)
    assert len(set(rooms)) == 8


def test_bytes_lie_as_in_an_arena_that_was_used() -> None:
    """Runs of one to four blocks in any order, the last one cut short: every byte once."""
    held = memoryview(b"".join(bytes([block]) * key_rates.BLOCK for block in range(20)) + b"rest")
    parts = key_rates._parts(held, 1)
    most = key_rates.RUN_BLOCKS * key_rates.BLOCK
    assert len(parts) >= 5 and max(map(len, parts)) <= most
    assert sorted(b"".join(parts)) == sorted(held) and b"".join(parts) != held
    assert sorted(len(part) % key_rates.BLOCK for part in parts)[-2:] == [0, 4]
    assert key_rates._parts(held, 2) != parts, "two engines have them in different places"


def test_processes_have_cores_apart_and_this_one_all_of_its_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {3, 5, 8}

    def allow(_: int, cores: list[int]) -> None:
        nonlocal allowed
        allowed = set(cores)

    monkeypatch.setattr(key_rates.os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(key_rates.os, "sched_setaffinity", allow)
    with key_rates._cores_apart() as other:
        assert (allowed, other) == ({3}, 8)
    assert allowed == {3, 5, 8}
    allowed = {5}
    with key_rates._cores_apart() as other:
        assert (allowed, other) == ({5}, None)


@pytest.mark.parametrize(
    "way",
    [
        "tcp",
        pytest.param(
            "nixl",
            marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed (slipstream[nixl])"),
        ),
    ],
)
def test_plain_bytes_are_those_of_the_other_side(way: str) -> None:
    given, taken = (memoryview(bytearray(each * 3_000_000)) for each in (b"g", b"t"))
    plain = plain_bytes.PLAIN[way]
    assert plain.taken(taken).take(plain.given(given).told()) > 0 and taken == given


def test_plain_bytes_that_end_early_are_told_of() -> None:
    short, whole = (memoryview(bytearray(size)) for size in (1000, 2000))
    with pytest.raises(click.ClickException, match="ended"):
        plain_bytes.SocketTaken(whole).take(plain_bytes.SocketGiven(short).told())
