"""What an accelerator is asked to do between a step's logits and its history, counted on tensors without values.

Each operation counts as one launch, and so does a transfer: what neither computes nor copies (views, and memory that is
only allocated) does not. A kernel of ours is one operation.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.batch.grammar_batch import TokenMask
from core.batch.sampling_batch import SamplingBatch
from core.device.staging import Staging
from core.sampling.penalties import TokenHistory
from core.sampling.places import Places
from core.sampling.registry import build_sampler, default_sampler
from core.sampling.sampler import Sampler, Scored
from tests.unit.core.sampling.batches import CPU, batch_of
from tests.unit.core.sampling.test_no_sync import ELSEWHERE, OPTIONS, ROWS, VOCAB, elsewhere, some_rows

MOST = 12
"""Launches of any step, with its places, its transfers and its entry into the history."""
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "lift_fresh"}
EVERYTHING = {**OPTIONS["everything"], "frequency": 0.5, "presence": 0.5}

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")


class Launches(TorchDispatchMode):
    """Names of operations that launch something, and the most elements that any of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            sizes = [each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
            self.largest = max([self.largest, *sizes])
            name = func.__name__.partition(".")[0]
            if name not in FREE:
                self.names.append(name)
        return made


def triton_sampler() -> Sampler:
    from core.sampling.triton.sampler import TritonSampler

    return TritonSampler(VOCAB, ELSEWHERE)


def step(sampler: Sampler, batch: SamplingBatch, masked: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Launches]:
    """Launches and transfers of a step of `batch`, from its logits to the history; all of it as `SamplingStep` does."""
    with monkeypatch.context() as patch, elsewhere(patch) as transfers:
        history = TokenHistory(torch.empty(ROWS + 1, 16, dtype=torch.int32, device=ELSEWHERE))
        lens, logits = (
            torch.empty(ROWS, dtype=torch.int64, device=ELSEWHERE),
            torch.empty(ROWS, VOCAB, device=ELSEWHERE),
        )
        mask = TokenMask(np.arange(2), np.ones((2, 32), np.int32)) if masked else None
        with Launches() as launches:
            places = Places.of(batch, lens, Staging(ELSEWHERE))
            found = sampler.sample(logits, batch, places, history, mask)
            if batch.any_penalty:
                history.append(lens, lens, found.tokens)
    return len(launches.names) + len(transfers), launches


@needs_triton
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "free"])
@pytest.mark.parametrize("alternatives", [-1, 0, 4])
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
def test_any_mix_of_options_takes_a_dozen_launches(
    name: str, alternatives: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EVERYTHING if name == "all" else OPTIONS[name]
    for plain in (0, 2):
        batch = batch_of(some_rows(options, plain=plain), logprobs=alternatives >= 0, top_logprobs=max(alternatives, 0))
        # As where drafts are on: which of two numbers is a row's is told by its length.
        for uniforms in (batch.uniforms, batch.uniforms.repeat(2, 1)):
            count, launches = step(triton_sampler(), replace(batch, uniforms=uniforms), masked, monkeypatch)
            assert count <= MOST, (count, launches.names)
            assert launches.names.count("sample_rows") == 1
            assert launches.names.count("normalise") == (alternatives >= 0)
            assert launches.largest < ROWS * VOCAB, "no copy of the logits"


@needs_triton
def test_a_greedy_batch_is_one_launch_and_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(some_rows({"temperature": 0.0}, plain=0))
    count, launches = step(triton_sampler(), batch, False, monkeypatch)
    assert count == 1 and launches.names == ["sample_rows"], launches.names


@needs_triton
def test_options_that_were_sent_are_used_for_their_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a step, and rows whose history found no memory, are other batches than the one that was asked about."""
    sampler, batch = triton_sampler(), batch_of(some_rows(OPTIONS["filters"], plain=0))
    sent = sampler.carried(batch)
    other = replace(batch, top_ks=batch.top_ks + 1)
    uploads: list[list[Any]] = []
    with elsewhere(monkeypatch):
        lens = torch.empty(ROWS, dtype=torch.int64, device=ELSEWHERE)
        places, send = Places.of(batch, lens, Staging(ELSEWHERE)), Staging.upload
        monkeypatch.setattr(Staging, "upload", lambda self, arrays: (uploads.append(arrays), send(self, arrays))[1])
        for each in (batch, other):
            sampler.sample(torch.empty(ROWS, VOCAB, device=ELSEWHERE), each, places)
    assert all(mine is theirs for mine, theirs in zip(uploads[0], sent, strict=True))
    assert not any(mine is theirs for mine, theirs in zip(uploads[1], sent, strict=True))


@needs_triton
def test_a_mask_of_no_row_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a piece has it whose rows are all free, beside constrained ones."""
    batch = batch_of(some_rows({"temperature": 0.0}, plain=0))
    mask = TokenMask(np.arange(0), np.ones((0, 32), np.int32))
    with elsewhere(monkeypatch) as transfers, Launches() as launches:
        lens = torch.empty(ROWS, dtype=torch.int64, device=ELSEWHERE)
        places = Places.of(batch, lens, Staging(ELSEWHERE))
        triton_sampler().sample(torch.empty(ROWS, VOCAB, device=ELSEWHERE), batch, places, None, mask)
    assert not transfers and launches.names.count("sample_rows") == 1


@needs_triton
@pytest.mark.parametrize("masked", [[0, 2], [1, 2]], ids=["known", "other"])
def test_a_mask_of_other_rows_has_options_of_its_own(masked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which mask is whose is told with the options, which are made before there is any mask."""
    from core.sampling.triton.options import Whole
    from core.sampling.triton.sampler import TritonSampler

    batch = replace(batch_of(some_rows(OPTIONS["filters"], plain=0)), constrained=np.array([0, 2]))
    sampler = TritonSampler(VOCAB, CPU)
    sampler.carried(batch)
    told: list[Any] = []
    monkeypatch.setattr("core.sampling.triton.sampler.sample_rows", lambda *given, **_: told.append(given[4]))
    logits, lens = torch.zeros(ROWS, VOCAB), torch.zeros(ROWS, dtype=torch.int64)
    places = Places.of(batch, lens, Staging(CPU))
    sampler.pick(Scored(logits, places), batch, TokenMask(np.array(masked), np.ones((2, 32), np.int32)))
    assert told[0][Whole.MASK, masked].tolist() == [0, 1] and (told[0][Whole.MASK] >= 0).sum() == 2


def test_the_plain_way_takes_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the count sees them: 32 halvings by rank and 32 by weight."""
    count, launches = step(Sampler(VOCAB, ELSEWHERE), batch_of(some_rows({"top_k": 4})), True, monkeypatch)
    assert count > 600 and launches.largest >= ROWS * VOCAB


def test_cuda_devices_get_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec, name in ((object(), "triton"), (None, "torch")):
        monkeypatch.setattr("core.sampling.registry.find_spec", lambda _, spec=spec: spec)
        assert default_sampler(torch.device("cuda")) == name
        assert default_sampler(CPU) == "torch"
    assert type(build_sampler(9, CPU)) is Sampler


def test_a_sampler_is_warm_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has to compile is compiled then, and not while the first request waits."""
    warmed: list[Sampler] = []
    monkeypatch.setattr(Sampler, "warm", lambda self: warmed.append(self))
    assert [build_sampler(9, CPU)] == warmed
