"""A model that drafts launches its kernels on padding: its first prompt compiles nothing while requests wait."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.config import ModelConfig
from core.engine import build, draft_model, mtp
from core.executor.speculator import Speculator
from core.memory.draft_pool import DraftLayers, DraftPool
from core.memory.kv_pool import KVLayerSpec
from core.memory.req_to_token_pool import ReqToTokenPool
from core.models.loader import load_model
from core.speculation.model_drafter import ModelDrafter
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_rehearsed_drafts import Launched
from tests.proofs.equivalence.test_speculation import CONTEXT, MOST, Player
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.mtp_checkpoints import leave_heads_to_themselves, make_mtp_checkpoint

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (slipstream[cuda])")

CPU = torch.device("cpu")
ROWS, MULTIPROCESSORS = 6, 4
HEADED = "deepseek_v3"


def use_our_kernels(patch: pytest.MonkeyPatch) -> None:
    """For the model that is served and for what drafts; a stand-in computes nothing that could be proved right."""
    from core.attention.triton.backend import TritonAttention
    from core.attention.triton.tiles import Tiles, rehearsed

    sizes = Tiles(MULTIPROCESSORS, block_m=128, block_n=64, split_least=128, packed=64)
    patch.setattr(Tiles, "of", lambda *_: sizes)
    patch.setattr(TritonAttention, "rehearsals", lambda self, rows, device: rehearsed(rows, MULTIPROCESSORS))
    for place in (build, draft_model, mtp):
        patch.setattr(place, "build_attention", lambda *_: TritonAttention())
    patch.setattr(build, "prove_attention", lambda *_: None)
    patch.setattr(build, "AdaptiveDepth", lambda most, times: FixedDepth(MOST))


def prompts(seed: int) -> list[Req]:
    """Of all lengths that packed tiles tell apart, in several chunks too; the first one comes alone."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    lengths = [1, 2, 3, 5, 9, 17, 33, 60, 70]
    return [Req(f"{n}", 0, rng.integers(3, VOCAB_SIZE, n), params, int(rng.integers(2**40)), 8) for n in lengths]


def served(method: str, path: Path, keeps: bool, patch: pytest.MonkeyPatch, seed: int) -> tuple[Counter[str], set[Any]]:
    """Kernels that were compiled while requests waited, by name, and all that were before the first."""
    from tests.support.fakes.compiled_kernels import compiling

    use_our_kernels(patch)
    model = load_model(ModelConfig(str(path), native="off", context_length=CONTEXT), CPU, keeps_modules=keeps)
    with compiling(patch) as kernels:
        player = Player(Launched(method=method, chunk=64, rows=ROWS, overlap=False), model, None)
        begun = kernels.all()
        first, *others = prompts(seed)
        player.play([first], stop=False)
        player.play(others)
    assert player.drafts.tokens > 20
    return Counter(name for name, _ in kernels.all() - begun), begun


@needs_triton
@pytest.mark.parametrize(("method", "own"), [("draft", "_extend_tile"), ("mtp", "_decode_split")])
def test_the_first_prompts_of_what_drafts_compile_nothing(
    method: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A draft model with other heads has other kernels; a table of another width is enough for heads of the model."""
    leave_heads_to_themselves(HEADED, monkeypatch)
    if method == "mtp":
        target, named = make_mtp_checkpoint(HEADED, tmp_path / "target", 2), "mtp"
    else:
        target = make_checkpoint("llama", tmp_path / "target", seed=0)
        named = f"draft:{make_checkpoint('mistral', tmp_path / 'draft', seed=1)}"
    found, begun = served(named, target, method == "mtp", monkeypatch, seed)
    assert not found
    with monkeypatch.context() as patch:
        patch.setattr(Speculator, "rehearse", lambda *_: None)
        missed, fewer = served(named, target, method == "mtp", patch, seed)
    assert missed[own] and fewer < begun, "it has kernels of its own"


@needs_triton
def test_keys_are_written_from_slots_at_any_place_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer packs the slots of a step behind what comes before them, at multiples of eight bytes."""
    from core.attention.triton.store import store_kv
    from tests.support.fakes.compiled_kernels import compiling

    pool, new, slots = torch.zeros(9, 1, 16), torch.ones(1, 2, 16), torch.zeros(4, dtype=torch.int64)
    with compiling(monkeypatch) as kernels:
        for first in range(2):
            store_kv(pool, pool.clone(), new, new, slots[first : first + 2], True, None, None)
    assert kernels.launches["_store"] == 2 and len(kernels.all()) == 1


@pytest.mark.parametrize(("tokens", "runs"), [(5, 1), (6, 0)])
def test_a_draft_model_rehearses_no_prompt_that_it_could_not_read(tokens: int, runs: int) -> None:
    """Its context may be shorter than that of the model it drafts for; learned positions end there."""
    seen: list[ForwardBatch] = []
    spec = SimpleNamespace(vocab_size=9, context_length=5)
    model: Any = SimpleNamespace(spec=spec, forward=seen.append)
    pool = DraftPool(DraftLayers((KVLayerSpec(0, 1, 4, 4),), torch.float32, 2), 4, 4, 2, CPU)
    drafter = ModelDrafter(model, pool, ReqToTokenPool(2, 16, CPU))
    lens, places = np.array([tokens]), torch.arange(tokens)
    given: dict[str, Any] = {"prefix_lens_host": 0 * lens, "extend_lens_host": lens, "num_extend": 1}
    given |= {"positions": places, "out_cache_loc": 0 * places, "req_to_token": None, "kv_pool": None}
    row = torch.zeros(1, dtype=torch.int64)
    relay: Any = None
    batch = ForwardBatch(ForwardMode.EXTEND, 0 * places, rows=row, seq_lens=row + tokens, last_indices=row, **given)
    drafter.rehearse(batch, relay)
    assert len(seen) == runs and all(each.kv_pool is pool.kv for each in seen)
