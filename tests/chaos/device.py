"""An emulated device whose next token hangs on everything it reads through the page tables, and that breaks on demand.

It writes each token into the KV pool and hashes what the row's slots hold, so a wrong page, a page that was freed too
early, or a step that a retraction forgot changes a token that `expected` predicts from the prompt alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from core.batch.forward_batch import ForwardBatch
from service.bench.emulated import EmulatedModel, Timeline

FAULTS_ENV = "CHAOS_FAULTS"
ROWS = 64
"""Of a batch that are hashed together."""
MULTIPLIER, INCREMENT = 0x5851F42D4C957F2D, 0x14057B7EF767814F
MASK = 2**64 - 1
MAX_CONTEXT = 8192
"""Content of a slot is token * MAX_CONTEXT + position, which float32 holds exactly for vocabularies below 2048."""


@dataclass(frozen=True)
class Faults:
    """What the device does wrong, and when. Steps count from 1; 0 means never."""

    step_seconds: float = 0.002
    context: int = MAX_CONTEXT
    raise_at: int = 0
    hang_at: int = 0
    exit_at: int = 0
    """The forward thread ends without a word, as if killed."""
    deadly_token: int = 0
    """A step with it in its input is the last one."""
    death: str = "raise"
    """How the step with the deadly token ends: by `raise`, or by `kill`, which takes the whole process."""
    nan_at_position: int = 0
    """Logits of the row that reaches this position become NaN."""
    forget_at_length: int = 0
    """The relayed token of a row of this length is taken away: a planted violation of `relay_unwritten_read`."""

    def as_env(self) -> dict[str, str]:
        """The variable from which the server reads them."""
        return {FAULTS_ENV: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Faults:
        """What `as_env` said; no faults without the variable."""
        return cls(**json.loads(environment.get(FAULTS_ENV, "{}")))


class ChaosModel(EmulatedModel):
    """Answers from the KV pool, with `faults`."""

    def __init__(self, faults: Faults, vocab_size: int) -> None:
        super().__init__(Timeline(faults.step_seconds), vocab_size, faults.context)
        assert vocab_size * MAX_CONTEXT < 2**24, "contents must be exact in float32"
        self.spec = dataclasses.replace(self.spec, hidden_size=2)
        self.faults = faults
        self.step = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.step += 1
        self._break()
        if self.faults.deadly_token and bool((batch.input_ids == self.faults.deadly_token).any()):
            self._die()
        self.timeline.occupy()
        held = (batch.input_ids * MAX_CONTEXT + batch.positions).to(torch.float32)[:, None, None]
        batch.kv_pool.write(0, batch.out_cache_loc, held, held)
        if batch.wants_hidden:
            written = batch.kv_pool.k(0)[batch.out_cache_loc, 0, 0].long()
            batch.hidden = torch.stack([written // MAX_CONTEXT, written % MAX_CONTEXT], 1).float()
        chosen = self._hash(batch) % self.spec.vocab_size
        logits = torch.zeros(len(chosen), self.spec.vocab_size).scatter_(1, chosen[:, None], 1.0)
        if self.faults.nan_at_position:
            logits[batch.positions[batch.last_indices] == self.faults.nan_at_position] = float("nan")
        return logits

    def _hash(self, batch: ForwardBatch) -> torch.Tensor:
        """int64[S]: a hash of all that each row holds up to the place that is sampled behind, by slot and place."""
        sampled = batch.rows.repeat_interleave(torch.from_numpy(batch.extend_lens_host))[batch.last_indices]
        ends = batch.positions[batch.last_indices] + 1
        # A part at a time: tests count the memory of this process as the server's, and arrays of a thousand rows and
        # all of their places are more than the server needs for them.
        parts = zip(sampled.split(ROWS), ends.split(ROWS), strict=True)
        totals = [self._total(batch, rows, lens) for rows, lens in parts]
        return (torch.cat(totals) * MULTIPLIER >> 33) & 0x3FFFFFFF if totals else torch.empty(0, dtype=torch.int64)

    def _total(self, batch: ForwardBatch, rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """int64[n]: the sum over what each row holds."""
        places = torch.arange(int(lens.max()) if len(lens) else 0)
        slots = batch.req_to_token[rows, : len(places)].long()
        contents = batch.kv_pool.k(0)[slots, 0, 0].long()
        links = (contents * MULTIPLIER + places * INCREMENT + 1) * MULTIPLIER
        return links.masked_fill(places >= lens[:, None], 0).sum(1)

    def _break(self) -> None:
        if self.step == self.faults.raise_at:
            raise RuntimeError("device-side assert at 0x7f00deadbeef in /secret/kernel.cu")
        if self.step == self.faults.exit_at:
            raise SystemExit
        if self.step == self.faults.hang_at:
            threading.Event().wait()

    def _die(self) -> None:
        if self.faults.death == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("device-side assert at 0x7f00deadbeef in /secret/kernel.cu")


def expected(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The output a correct server streams for `prompt`."""
    ids, total = list(prompt), 0
    for position, token in enumerate(prompt):
        total += _link(token, position)
    for _ in range(count):
        ids.append((((total * MULTIPLIER) & MASK) >> 33 & 0x3FFFFFFF) % vocab_size)
        total += _link(ids[-1], len(ids) - 1)
    return ids[len(prompt) :]


def vector_of(prompt: list[int], pooling: str) -> tuple[float, float]:
    """The vector of `prompt`, not normalised: a token's hidden state is its id and its position."""
    if pooling == "mean":
        sums = (sum(prompt), sum(range(len(prompt))))
        return tuple((torch.tensor(sums, dtype=torch.float32) / len(prompt)).tolist())  # type: ignore[return-value]
    place = 0 if pooling == "cls" else len(prompt) - 1
    return float(prompt[place]), float(place)


def _link(token: int, position: int) -> int:
    content = token * MAX_CONTEXT + position
    return ((content * MULTIPLIER + position * INCREMENT + 1) * MULTIPLIER) & MASK
