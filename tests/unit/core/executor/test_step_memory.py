"""What a launched step keeps: memory that its copies still read, and nothing of a row's former owner."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ScheduleBatch
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.relay.compiled import Entered
from core.relay.future_map import FutureMap
from core.relay.payload import RelayPayload
from core.sampling.penalties import TokenHistory
from core.scheduler.outputs import StepOutputs
from core.types.io import Pooling
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.happens_before.harness import CONTEXT, VOCAB, Ask, Scenario, play_plainly, tokenizer
from tests.proofs.happens_before.hash_model import HashModel, expected_tokens


class CopyEngine:
    """Copies to the host that read device memory by its address, later: they keep nothing alive that they read."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], torch.Tensor]] = []

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """What will hold the values of `source`, which it has kept aside."""
        host = torch.empty_like(source)
        self.pending.append((host, weakref.ref(source), source.clone()))
        return host

    @torch.inference_mode()
    def run(self) -> tuple[int, list[int]]:
        """Do all copies: how many, and the places of those whose source the step has let go of."""
        pending, self.pending = self.pending, []
        gc.collect()
        for host, _, values in pending:
            host.copy_(values)
        return len(pending), [place for place, (_, source, _) in enumerate(pending) if source() is None]


class LateStreams(DeviceStreams):
    """The production streams of the CPU, with copies that are still to be made when a step has been launched."""

    def __init__(self, engine: CopyEngine) -> None:
        super().__init__(torch.device("cpu"))
        self._engine = engine

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `CopyEngine.copy`."""
        return [self._engine.copy(each) for each in tensors]


class HiddenModel(HashModel):
    """A model that gives hidden states, for embeddings."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The logits; hidden states of ones where they are wanted."""
        if batch.wants_hidden:
            batch.hidden = torch.ones(len(batch.input_ids), 4)
        return super().forward(batch)


def ask(tokens: int = 4, pooling: Pooling | None = None, **sampling: Any) -> Req:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    return Req("r", 0, np.arange(1, 8, dtype=np.int64), params, 1, 0 if pooling else tokens, pooling=pooling)


REQUESTS: dict[str, Callable[[], Req]] = {
    "greedy": ask,
    "log probabilities": lambda: ask(logprobs=True, top_logprobs=2, temperature=1.0),
    "embedding": lambda: ask(pooling=Pooling.MEAN),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_launched_step_keeps_what_its_copies_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, memory that a step lets go of is given to the next one, while the copy stream reads it."""
    copies = CopyEngine()
    counts: list[int] = []
    early: list[int] = []
    launch = StepRunner.launch

    def launch_and_copy(self: StepRunner, batch: ScheduleBatch, *computing: Callable[[], None]) -> LaunchedStep:
        step = launch(self, batch, *computing)
        count, freed = copies.run()
        counts.append(count)
        early.extend(freed)
        return step

    monkeypatch.setattr(StepRunner, "launch", launch_and_copy)
    built = assemble(Scenario(()).config(), HiddenModel(VOCAB, CONTEXT), tokenizer(), LateStreams(copies))
    seen: list[StepOutputs] = []
    scheduler = built.new_scheduler(built.new_executor(lambda: None), lambda outputs, now: seen.append(outputs))
    req = REQUESTS[kind]()
    scheduler.intake.add(req)
    while scheduler.has_work:
        scheduler.step(0.0)
    (ended,) = [ended for outputs in seen for ended in outputs.ended]
    assert ended.error is None
    assert early == [], "copies that read what was free by then, by their places in a step"
    assert min(counts) >= 3 + (kind != "greedy"), "tokens, whether they are finite, counters, and what was asked for"
    if kind == "embedding":
        assert req.vector is not None and req.vector.tolist() == [1.0] * 4
    else:
        assert req.outputs.tolist() == expected_tokens(req.prompt.tolist(), 4, VOCAB) or kind != "greedy"


def test_outputs_enter_the_history_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside chunks in the middle of a prompt, whose rows come first in a step and sample nothing."""
    entered: list[int] = []
    append = TokenHistory.append

    def heard(self: TokenHistory, rows: torch.Tensor, lens: torch.Tensor, tokens: torch.Tensor) -> None:
        entered.extend(lens[rows == 1].tolist())
        append(self, rows, lens, tokens)

    monkeypatch.setattr(TokenHistory, "append", heard)
    config = Scenario(()).config()
    config = replace(config, scheduler=replace(config.scheduler, chunked_prefill_size=4))
    built = assemble(config, HashModel(VOCAB, CONTEXT), tokenizer(), DeviceStreams(torch.device("cpu")))
    modes: list[tuple[int, int]] = []
    executor = built.new_executor(lambda: None)
    submit = executor.submit
    monkeypatch.setattr(
        executor, "submit", lambda batch: (modes.append((batch.num_extend, len(batch.sampling))), submit(batch))
    )
    scheduler = built.new_scheduler(executor, lambda outputs, now: None)
    scheduler.intake.add(ask(12, presence_penalty=0.5))
    while not scheduler.running.known.max() > 9:
        scheduler.step(0.0)
    long = Req("long", 0, np.arange(1, 30, dtype=np.int64), SamplingParams(temperature=0.0), 1, 2)
    scheduler.intake.add(long)
    while scheduler.has_work:
        scheduler.step(0.0)
    assert modes.count((1, 1)) > 3, "chunks that sample nothing beside a decode row"
    assert entered == list(range(7, 7 + 12))


def test_a_new_owner_finds_nothing_of_the_former_one_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stash of the row's second owner is lost: that is seen, and the first owner's last token is not read.

    The last token of an output is never fed back, so it is still there, unread, when the row changes hands.
    """
    prompts = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    stash, calls = FutureMap.stash, iter(range(1, 100))

    def lossy(self: FutureMap, rows: torch.Tensor, payload: RelayPayload) -> None:
        if next(calls) != 4:
            stash(self, rows, payload)

    gathered: list[int] = []
    enter = FutureMap.enter

    def heard(self: FutureMap, *args: torch.Tensor) -> Entered:
        entered = enter(self, *args)
        gathered.extend(entered.ids.tolist())
        return entered

    monkeypatch.setattr(FutureMap, "stash", lossy)
    monkeypatch.setattr(FutureMap, "enter", heard)
    asks: Sequence[Ask] = [Ask(prompt, tokens=3) for prompt in prompts]
    with pytest.raises(AssertionError, match="newest token was lost"):
        play_plainly(Scenario(asks, rows=1, cache="none"))
    first = expected_tokens(prompts[0], 3, VOCAB)
    assert gathered[:2] == first[:2]
    assert gathered[2] != first[2], "a token of another request"
