"""`slipstream trace` against real servers: the lanes show the overlap, and that there is none without it."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from core.lanes import PHASES, RESULTS, SUBMIT, Lane, LaneRecorder, Slice
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.cli.cli import cli
from service.client import SlipstreamClient
from service.metrics.chrome_trace import EVENTS_PER_PIECE, chrome_trace, overlap, shared_seconds
from service.metrics.trace import Refusal, TraceDoor
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.servers import serve_checkpoint

WORK = [phase for phase in PHASES if phase != PHASES[SUBMIT]]
SECONDS = "0.4"


async def decode(client: SlipstreamClient, stop: asyncio.Event) -> None:
    """Requests one after another until told to stop."""
    while not stop.is_set():
        await client.complete([5, 6, 7], max_tokens=40, temperature=0.0, ignore_eos=True)


async def traced(client: SlipstreamClient, address: str, out: Path) -> tuple[dict[str, Any], str]:
    """What the command wrote while eight clients decode, and what it said."""
    stop = asyncio.Event()
    load = [asyncio.create_task(decode(client, stop)) for _ in range(8)]
    arguments = ["trace", "--seconds", SECONDS, "--metrics", address, "--out", str(out)]
    try:
        ran = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    finally:
        stop.set()
        await asyncio.gather(*load)
    assert ran.exit_code == 0, ran.output
    return json.loads(out.read_text()), ran.output


def intervals(trace: dict[str, Any], lane: str, names: list[str] | None = None) -> list[tuple[float, float]]:
    found = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == lane]
    return [(each["ts"], each["ts"] + each["dur"]) for each in found if names is None or each["name"] in names]


@pytest.mark.alone
@pytest.mark.parametrize("overlapped", [True, False])
async def test_lanes_overlap_with_overlap_and_not_without(overlapped: bool, tmp_path: Path) -> None:
    settings = {"overlap": overlapped, "max_total_tokens": 4096, "max_running_requests": 8, "native": "off"}
    async with serve_checkpoint(bundled_model_dir(), **settings) as (server, client):
        address = f"http://127.0.0.1:{server.metrics_port}"
        await client.complete([5, 6, 7], max_tokens=4)
        assert server.engine.lanes is not None and server.engine.lanes.recording is None
        trace, said = await traced(client, address, tmp_path / "trace.json")
        assert server.engine.lanes.recording is None, "off again"
    steps, work = intervals(trace, "forward"), intervals(trace, "scheduler", WORK)
    assert len(steps) >= 10 and f"{len(steps)} steps" in said
    assert {each["name"] for each in trace["traceEvents"] if each.get("cat") == "scheduler"} == set(PHASES)
    # What is computed is launched, copied, and never at the same time as another step.
    assert all(before[1] <= after[0] + 0.2 for before, after in itertools.pairwise(steps))
    ids = Counter(each["args"]["step"] for each in trace["traceEvents"] if each.get("cat") == "forward")
    assert set(ids.values()) == {1} and len(intervals(trace, "copy")) == len(steps)
    shared, device = shared_seconds(work, steps), sum(end - begin for begin, end in steps)
    print(f"{shared / 1e3:.2f} ms of scheduler work beside {device / 1e3:.1f} ms of device work")
    if overlapped:
        assert trace["otherData"]["scheduler_seconds_beside_device"] > 0
        assert shared > 0.2 * sum(end - begin for begin, end in work)
    else:
        assert shared < 0.001 * device, "the scheduler's thread is the one that computes"
    assert trace["otherData"]["overlap"] is overlapped


@pytest.mark.alone
async def test_an_asynchronous_device_shows_its_own_time(tmp_path: Path) -> None:
    """On the emulated device a launch returns at once; its lane is the time that steps take there, not their launch."""
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    built = emulated_engine(tokenizer, step_seconds=0.004, rows=8, max_total_tokens=4096)
    async with serve_checkpoint(bundled_model_dir(), lambda *_: built) as (server, client):
        trace, _ = await traced(client, f"http://127.0.0.1:{server.metrics_port}", tmp_path / "trace.json")
    steps, launches = intervals(trace, "forward"), intervals(trace, "launch")
    assert len(steps) > 20
    # A step that finds the device idle begins with its launch, and a busy machine wakes late: it may take longer, but
    # none is shorter.
    assert 3.9 <= min(end - begin for begin, end in steps) / 1e3 < 8
    # As short as it is at its shortest: a busy machine makes launches wait too, now and then all of them, for 3.8 ms.
    assert min(end - begin for begin, end in launches) < min(end - begin for begin, end in steps)
    beside = trace["otherData"]["scheduler_seconds_beside_device"]
    assert beside > 0.1 * trace["otherData"]["scheduler_seconds"]


class DeviceMark:
    """A point in a time that the host does not know."""

    at = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_since(self, earlier: DeviceMark) -> float:
        return self.seconds - earlier.seconds


def test_device_times_become_the_hosts_by_the_quickest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from core.executor import step_lanes
    from core.lanes import Recording

    recording, clock = Recording(), [0.0]
    monkeypatch.setattr(step_lanes.time, "monotonic", lambda: clock[0])
    anchor = DeviceMark(1000.0)
    batch = type("Batch", (), {"step_id": 1, "num_tokens": 3})()
    for began, noticed_after in ((1000.0, 0.005), (1000.1, 0.0001), (1000.2, 0.003)):
        lanes = step_lanes.StepLanes(recording, anchor, batch, clock[0])  # type: ignore[arg-type]
        lanes.copying(DeviceMark(began + 0.05))
        lanes.copied(DeviceMark(began + 0.06))
        clock[0] = began - 1000.0 + 50.0 + 0.06 + noticed_after
        lanes.write(DeviceMark(began), DeviceMark(began + 0.05))
    begins = [round(each.begin, 6) for each in recording.lanes()["forward"]]
    assert begins == [50.0001, 50.1001, 50.2001], "the second was noticed a tenth of a millisecond late, none earlier"
    assert [round(each.end - each.begin, 6) for each in recording.lanes()["copy"]] == [0.01] * 3


def test_a_full_ring_keeps_the_newest() -> None:
    lane = Lane(4)
    for step in range(10):
        lane.add(step, step + 0.5, step, RESULTS, 2 * step)
    assert lane.slices(1.0) == [Slice(step + 1.0, step + 1.5, step, RESULTS, 2 * step) for step in range(6, 10)]
    assert Lane(4).slices() == []


def test_seconds_in_common() -> None:
    assert shared_seconds([(0, 1), (2, 5)], [(0.5, 3), (4, 6)]) == pytest.approx(0.5 + 1 + 1)
    assert shared_seconds([(0, 1)], [(1, 2)]) == 0.0
    assert shared_seconds([], [(1, 2)]) == shared_seconds([(1, 2)], []) == 0.0
    assert shared_seconds([(0, 10)], [(1, 2), (3, 4)]) == pytest.approx(2)


def test_a_trace_of_many_pieces_is_one_document() -> None:
    lanes = {lane: [Slice(n, n + 0.5, n, 0, 1) for n in range(EVENTS_PER_PIECE)] for lane in ("scheduler", "forward")}
    lanes |= {"launch": [], "copy": []}
    pieces = list(chrome_trace(lanes, 0.0, {"model": "m"}))
    assert len(pieces) > 3 and max(map(len, pieces)) < 200 * EVENTS_PER_PIECE
    trace = json.loads(b"".join(pieces))
    assert trace["otherData"] == {"model": "m", **overlap(lanes)}
    assert len(intervals(trace, "scheduler")) == EVENTS_PER_PIECE
    assert intervals(trace, "forward")[3] == (3e6, 3.5e6), "microseconds since the trace began"


def test_what_waits_for_the_device_is_no_work_beside_it() -> None:
    work, submit = Slice(0.0, 0.25, 1, RESULTS, 1), Slice(0.25, 1.0, 1, SUBMIT, 1)
    told = overlap({"scheduler": [work, submit], "forward": [Slice(0.0, 2.0, 1, 0, 1)]})
    expected = {"scheduler_seconds": 0.25, "scheduler_seconds_beside_device": 0.25, "device_seconds": 2.0}
    assert told == {"steps": 1} | expected


def asked(address: str, method: str = "POST") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_who_may_ask_and_for_what() -> None:
    async with serve_checkpoint(bundled_model_dir(), trace_endpoint="off", native="off") as (server, _):
        address = f"http://127.0.0.1:{server.metrics_port}"
        assert (await asyncio.to_thread(asked, f"{address}/trace?seconds=0.01"))[0] == 403
        assert (await asyncio.to_thread(asked, f"{address}/trace?seconds=0.01", "GET"))[0] == 404, (
            "a GET starts nothing"
        )
        assert (await asyncio.to_thread(asked, f"{address}/metrics"))[0] == 405, "it is there, for reading"
        ran = await asyncio.to_thread(CliRunner().invoke, cli, ["trace", "--metrics", address])
        assert ran.exit_code == 1 and "--trace-endpoint" in ran.output


@pytest.mark.parametrize(
    ("who", "peer", "allowed"),
    [
        ("local", "127.0.0.1", True),
        ("local", "::1", True),
        ("local", "::ffff:127.0.0.1", True),
        ("local", "::ffff:10.0.0.7", False),
        ("local", "10.0.0.7", False),
        ("local", "fe80::1%eth0", False),
        ("any", "10.0.0.7", True),
        ("off", "127.0.0.1", False),
    ],
)
def test_by_default_only_this_machine_is_given_a_trace(who: str, peer: str, allowed: bool) -> None:
    recorder = LaneRecorder()
    found = TraceDoor(who, lambda: recorder, dict).record(peer, "seconds=0.001")
    assert isinstance(found, Refusal) is not allowed
    assert recorder.recording is None


@pytest.mark.parametrize(
    "query", ["seconds=0", "seconds=-1", "seconds=61", "seconds=nan", "seconds=soon", "seconds=inf"]
)
def test_lengths_are_bounded(query: str) -> None:
    found = TraceDoor("local", LaneRecorder, dict).record("127.0.0.1", query)
    assert isinstance(found, Refusal) and found.status == 400


def test_one_trace_at_a_time_and_none_before_there_is_an_engine() -> None:
    door = TraceDoor("local", lambda: None, dict)
    assert isinstance(found := door.record("127.0.0.1", ""), Refusal) and found.status == 503
    recorder, inner = LaneRecorder(), []

    def lanes() -> LaneRecorder:
        if not inner:
            inner.append(None)
            door._busy.acquire()
        return recorder

    door = TraceDoor("local", lanes, dict)
    assert isinstance(found := door.record("127.0.0.1", "seconds=0.001"), Refusal) and found.status == 409
