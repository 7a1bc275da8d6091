"""The twin of the FutureMap is the FutureMap: the same traffic leaves the same buffers, values and counters."""

from __future__ import annotations

import random

import pytest
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.streams import DeviceStreams
from core.memory.req_to_token_pool import ReqToTokenPool
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.speculation.drafter import draft_columns
from tests.proofs.sim.relay_twin import RelayTwin

CPU = torch.device("cpu")
ROWS = 7
MOST = 3


class Both:
    """Both maps, given the same calls."""

    def __init__(self) -> None:
        self.checks = DeviceChecks(AssertMode.COUNT, CPU)
        self.real = FutureMap(ReqToTokenPool(ROWS, 4, CPU), DeviceStreams(CPU), self.checks, draft_columns(MOST))
        self.twin = RelayTwin(ROWS + 1)

    def gather(self, rows: list[int], upper: list[int]) -> None:
        """Lengths and tokens, as a step asks for them."""
        lower = [length - length % 3 for length in upper]
        at, *bounds = (torch.tensor(each, dtype=torch.int64) for each in (rows, lower, upper))
        assert self.twin.lengths(rows, lower, upper) == self.real.lengths(at, *bounds).tolist()
        assert self.twin.gather(rows) == self.real.gather(at).tolist()

    def publish(self, rows: list[int], lens: list[int]) -> None:
        self.real.publish(torch.tensor(rows, dtype=torch.int64), torch.tensor(lens, dtype=torch.int64))
        self.twin.publish(rows, lens)

    def stash(self, rows: list[int], tokens: list[int]) -> None:
        """Each with drafts that follow from its token: none, or up to `MOST`."""
        drafts = [[token + place for place in range(token % (MOST + 1))] for token in tokens]
        ids = [[*each, *[-7] * (MOST - len(each))] for each in drafts]
        extras = {"drafts": torch.tensor(ids).view(-1, MOST), "draft_len": torch.tensor([*map(len, drafts)]).long()}
        payload = RelayPayload(torch.tensor(tokens, dtype=torch.int64), extras)
        self.real.stash(torch.tensor(rows, dtype=torch.int64), payload)
        self.twin.stash(rows, tokens, drafts)

    def forget(self, rows: list[int]) -> None:
        self.real.forget(torch.tensor(rows, dtype=torch.int64))
        self.twin.forget(rows)

    def compare(self) -> None:
        assert self.real.buffer("output_tokens_buf").tolist() == self.twin.tokens
        assert self.real.buffer("new_seq_lens_buf").tolist() == self.twin.lens
        assert self.checks.counters.tolist() == self.twin.counts
        columns = zip(self.real.buffer("drafts").tolist(), self.real.buffer("draft_len").tolist(), strict=True)
        assert [ids[:count] for ids, count in columns] == self.twin.drafts


@pytest.mark.parametrize("legal", [True, False], ids=["legal", "anything goes"])
def test_same_traffic_same_state(seed: int, legal: bool) -> None:
    """Whole steps (forget, gather, publish, stash) when `legal`, any call in any order otherwise."""
    rng, both = random.Random(seed), Both()
    written: dict[int, int] = {}
    for _ in range(400):
        rows = rng.sample(range(ROWS + 1) if not legal else range(1, ROWS + 1), rng.randint(0, 4))
        if legal:
            fresh = [row for row in rows if row not in written or rng.random() < 0.1]
            decoding = [row for row in rows if row not in fresh]
            both.forget(fresh)
            both.gather(decoding, [written[row] for row in decoding])
            written.update({row: rng.randrange(50) for row in rows})
            both.publish(rows, [written[row] for row in rows])
            both.stash(rows, [rng.randrange(1000) for _ in rows])
            assert both.twin.counts == [0, 0]
        else:
            values = [rng.randrange(1000) for _ in rows]
            rng.choice((both.gather, both.publish, both.stash, lambda r, _: both.forget(r)))(rows, values)
        both.compare()
