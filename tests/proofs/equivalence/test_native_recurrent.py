"""Native recurrent models say bit for bit the same with drafts and behind cached prefixes as without, however prompts
are cut and whichever rows are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native.extension import load_extension
from core.models.native.family import UpgradingModel
from core.native.kept_library import ExtensionUnavailable
from core.types.request import Req
from tests.proofs.equivalence.test_speculation import CPU, Seen, assert_same
from tests.proofs.equivalence.test_speculation_recurrent import CONTEXT, Keeping, compare_model
from tests.support.fakes.adversaries import always_right, always_wrong, like_a_coin
from tests.support.tiles import same_bits

KINDS = ("lfm2", "mamba2", "bamba", "falcon_h1", "mamba", "falcon_mamba", "qwen3_next", "jamba", "nemotron_h")
SETTINGS = {
    "plenty": Keeping(slots=64),
    "page 1": Keeping(page_size=1, interval=1),
    "small chunks": Keeping(chunk=8, rows=8, overlap=False),
    "few slots and pages": Keeping(tokens=96, rows=6, slots=6),
}


@pytest.fixture(scope="module", autouse=True)
def _native_code() -> None:
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


def same(reqs: Sequence[Req], plain: Sequence[Seen], drafted: Sequence[Seen]) -> None:
    assert_same(list(plain), list(drafted), list(reqs))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_and_no_cached_prefix_changes_a_bit(
    kind: str, dtype: str, setting: str, checkpoint_of: Callable[[str], Path], seed: int
) -> None:
    path = str(checkpoint_of(kind))
    config = ModelConfig(path, dtype=dtype, native="wait", context_length=CONTEXT, **same_bits(dtype))
    model = load_model(config, CPU)
    assert isinstance(model, UpgradingModel) and model.native
    drafter, found = compare_model(model, SETTINGS[setting], like_a_coin(seed), seed, same)
    assert drafter.accepted > 0
    assert found > 0 or setting != "plenty", "the second turn resumes from states of the first"


@pytest.mark.parametrize("says", [always_right, always_wrong], ids=lambda each: each.__name__)
def test_whoever_drafts(says: Callable[..., object], checkpoint_of: Callable[[str], Path], seed: int) -> None:
    config = ModelConfig(str(checkpoint_of("mamba2")), dtype="float32", native="wait", context_length=CONTEXT)
    drafter, _ = compare_model(load_model(config, CPU), Keeping(), says, seed, same)
    assert (drafter.accepted > 0) == (says is always_right)
