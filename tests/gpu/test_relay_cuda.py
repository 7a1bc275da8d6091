"""FutureMap, checks, streams and marks on CUDA: the same answers as on the CPU, and the waits that only matter here."""

from __future__ import annotations

import random
import subprocess
import sys

import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from tests.gpu.cuda import ONLY_ON_CUDA, STALL_CYCLES
from tests.support.repository import ROOT

pytestmark = ONLY_ON_CUDA

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = 8


class Pair:
    """One FutureMap on each device, given the same commands."""

    def __init__(self) -> None:
        self._maps = []
        self.checks = []
        for device in (CPU, CUDA):
            checks = DeviceChecks(AssertMode.COUNT, device)
            self.checks.append(checks)
            self._maps.append(FutureMap(ReqToTokenPool(ROWS, 4, device), DeviceStreams(device), checks))
        torch.cuda.synchronize()

    def random_command(self, rng: random.Random) -> None:
        """Any command with any rows: also reads that no write came before."""
        rows = torch.tensor(rng.sample(range(1, ROWS + 1), rng.randrange(1, ROWS)))
        values = torch.tensor([rng.randrange(100) for _ in rows])
        command = rng.choice(("forget", "publish", "stash", "gather", "enter", "enter"))
        results = []
        for relay, device in zip(self._maps, (CPU, CUDA), strict=True):
            on_device, given = rows.to(device), values.to(device)
            if command == "stash":
                relay.stash(on_device, RelayPayload(given))
            elif command == "gather":
                lens = relay.lengths(on_device, given - 1, given)
                results.append(torch.stack([lens, relay.gather(on_device), relay.violated(len(rows))]).cpu())
            elif command == "enter":
                # By the kernel on CUDA, where `lengths` and `gather` are operations on tensors.
                got = relay.enter(on_device, given - 1, given)
                results.append(torch.stack([got.ids, got.lens, got.after, relay.violated(len(rows))]).cpu())
            else:
                getattr(relay, command)(*((on_device, given) if command == "publish" else (on_device,)))
        assert not results or torch.equal(*results)

    def same_state(self) -> bool:
        first, second = self._maps
        names = ("output_tokens_buf", "new_seq_lens_buf")
        return all(torch.equal(first.buffer(name), second.buffer(name).cpu()) for name in names)


def test_cuda_and_cpu_agree_on_values_and_violations(seed: int) -> None:
    pair, rng = Pair(), random.Random(seed)
    for _ in range(300):
        pair.random_command(rng)
        assert pair.same_state()
    on_cpu, on_cuda = (checks.counters.tolist() for checks in pair.checks)
    assert on_cpu == on_cuda and on_cpu[0] > 0 and on_cpu[1] > 0


def test_padded_rows_read_zero_as_often_as_they_like() -> None:
    checks = DeviceChecks(AssertMode.COUNT, CUDA)
    relay = FutureMap(ReqToTokenPool(ROWS, 4, CUDA), DeviceStreams(CUDA), checks)
    for _ in range(3):
        assert relay.gather(torch.zeros(4, dtype=torch.int64, device=CUDA)).tolist() == [0] * 4
    assert not checks.counters.any()


def test_trap_stops_the_device_with_a_message() -> None:
    """In a process of its own: a device-side assertion poisons the context."""
    program = (
        "import torch\n"
        "from core.device.checks import AssertMode, DeviceChecks\n"
        "checks = DeviceChecks(AssertMode.TRAP, torch.device('cuda'))\n"
        "buffer = torch.full((4,), -1, device='cuda')\n"
        "checks.consume(buffer, torch.tensor([2], device='cuda'), torch.zeros(1, dtype=torch.int64, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "relay_unwritten_read" in done.stdout + done.stderr


def test_streams_are_distinct_and_fetch_waits_for_its_event() -> None:
    streams = DeviceStreams(CUDA)
    handles = {streams.forward.cuda_stream, streams.copy.cuda_stream, torch.cuda.default_stream().cuda_stream}
    assert len(handles) == 3
    made, published, copied = torch.zeros(1000, device=CUDA), streams.new_event(), streams.new_event()
    streams.synchronize()
    with streams.on_forward():
        torch.cuda._sleep(STALL_CYCLES)
        made += 7
        published.record(streams.forward)
    with streams.on_copy():
        published.wait(streams.copy)
        host, ones = streams.fetch([made, torch.ones(3, dtype=torch.bool, device=CUDA)])
        copied.record(streams.copy)
    assert host.is_pinned() and not copied.query()
    copied.synchronize()
    assert (host == 7).all() and ones.tolist() == [True] * 3


def test_a_mark_may_be_asked_before_the_device_has_reached_it() -> None:
    streams = DeviceStreams(CUDA)
    with streams.on_forward():
        began = streams.mark()
        torch.cuda._sleep(STALL_CYCLES)
        ended = streams.mark()
    assert ended.seconds_since(began) > 0


def test_d33_pinned_memory_is_not_handed_out_under_a_running_copy() -> None:
    streams, staging = DeviceStreams(CUDA), Staging(CUDA)
    with streams.on_forward():
        torch.cuda._sleep(STALL_CYCLES)
        sent = [staging.pinned([torch.full((512,), n).numpy()]).to(CUDA, non_blocking=True) for n in range(50)]
    streams.synchronize()
    assert [int(tensor[0]) for tensor in sent] == list(range(50))
    assert all((tensor == tensor[0]).all() for tensor in sent)
