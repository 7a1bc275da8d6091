"""Outputs with an EAGLE-3 head are those without it, by native code bit for bit, whatever the engine does meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.batch.result import StepResult
from core.batch.spec_plan import NO_DRAFTS, Aim
from core.config import EngineConfig, MemoryConfig, ModelConfig, SpeculationConfig
from core.memory.draft_pool import DraftPool
from core.models.base import Model
from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.bundled.eagle.texts import held_out_prompts
from core.models.loader import load_model
from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from core.speculation.calibration import Calibration
from core.speculation.voice import Voice
from core.types.arrays import Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import DraftStats
from tests.proofs.equivalence.test_speculation import OPTIONS, Player, Seen, Setting, assert_same, tokenizer
from tests.support.fakes.fixed_depth import FixedDepth

MOST, PROMISED, CPU = 4, 0.92, torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Headed(Setting):
    """An engine with drafts by `method`, and a prefix cache unless it has none."""

    method: str = "off"
    tokens: int = 2048
    cache: str = "radix"
    context: int = 256

    def config(self) -> EngineConfig:
        config = Setting.config(self)
        return replace(
            config,
            model=ModelConfig(str(bundled_model_dir()), context_length=self.context),
            memory=MemoryConfig(self.page_size, self.rows, self.tokens, prefix_cache=self.cache),
            speculation=SpeculationConfig(self.method, MOST),
        )


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay is another question, which depends on the machine."""
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(most))


@pytest.fixture
def _compiler() -> None:
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))


def model(native: str = "wait") -> Callable[[], Model]:
    return lambda: load_model(ModelConfig(str(bundled_model_dir()), native=native), CPU)


@cache
def prompts() -> list[np.ndarray]:
    return [np.array(tokenizer().encode(text, True)) for text in held_out_prompts()]


def requests(seed: int, names: Sequence[str] = tuple(OPTIONS)) -> list[Req]:
    """Stories and parts of stories, by all kinds of option, in a random order."""
    rng = np.random.default_rng(seed)
    made = []
    for name in rng.permutation([*names, *names]).tolist():
        options = {"temperature": 0.0, "ignore_eos": True, **OPTIONS[name]}
        prompt = np.tile(prompts()[int(rng.integers(len(prompts())))], int(rng.integers(1, 5)))
        made.append(Req(name, 0, prompt, SamplingParams(**options), int(rng.integers(2**40)), int(rng.integers(1, 40))))
    return made


def both_ways(
    setting: Headed, made: Callable[[], Model], reqs: Callable[[], list[Req]]
) -> tuple[list[Seen], list[Seen], int]:
    """(outputs without speculation, with it, drafts that were right)."""
    plain = Player(replace(setting, method="off"), made(), None).play(reqs())
    player = Counting(replace(setting, method="eagle"), made(), None)
    return plain, player.play(reqs()), player.accepted


class Counting(Player):
    """A player that tells of its drafts."""

    @property
    def accepted(self) -> int:
        return self._drafts.accepted

    @property
    def drafted(self) -> int:
        return self._drafts.tokens

    @property
    def _drafts(self) -> DraftStats:
        found = self._scheduler.stats.drafts
        assert found is not None, "speculation is on"
        return found


class Pausing:
    """Drafts in four steps of sixteen."""

    def __init__(self) -> None:
        self._steps = 0

    def aim(self, rows: int) -> Aim:
        """By turns."""
        self._steps += 1
        return Aim(MOST) if self._steps % 16 < 4 else NO_DRAFTS

    def observe(self, result: StepResult) -> None:
        """Changes nothing."""


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 16), (16, 512)])
def test_native_code_is_equal_bit_for_bit(page_size: int, chunk: int, overlap: bool, seed: int) -> None:
    """With hits in the prefix cache: many requests begin alike."""
    setting = Headed(page_size, chunk, overlap)
    plain, drafted, accepted = both_ways(setting, model(), lambda: requests(seed))
    assert_same(plain, drafted, requests(seed))
    assert accepted > 0


@pytest.mark.usefixtures("_compiler")
def test_rows_that_give_way_go_on_where_they_were(seed: int) -> None:
    setting = Headed(tokens=320, rows=6)
    plain, drafted, accepted = both_ways(setting, model(), lambda: requests(seed + 1))
    assert_same(plain, drafted, requests(seed + 1))
    assert accepted > 0


def test_a_model_by_transformers_says_the_same_tokens(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In float64: sums in another order then move a draw by 1e-16."""
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    reqs = lambda: requests(seed + 2, ("greedy", "temperature", "filters", "penalties"))  # noqa: E731
    plain, drafted, accepted = both_ways(Headed(cache="none"), model("off"), reqs)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason)
    assert accepted > 0


@pytest.mark.usefixtures("_compiler")
def test_nothing_of_a_former_owner_stands_in_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages once had numbers that any probability would show; places that the head has not run over are read."""
    made, say, finite = DraftPool.__init__, Voice.say, list[bool]()

    def filled(pool: DraftPool, *given: Any) -> None:
        made(pool, *given)
        for side in (pool.kv.k(0), pool.kv.v(0)):
            side.fill_(torch.nan)

    def checking(voice: Voice, logits: torch.Tensor, at: Ints, lens: Ints) -> tuple[Ints, Any]:
        finite.append(bool(logits.isfinite().all()))
        return say(voice, logits, at, lens)

    monkeypatch.setattr(DraftPool, "__init__", filled)
    monkeypatch.setattr(Voice, "say", checking)
    # Nothing waits, so that steps without drafts leave gaps.
    monkeypatch.setattr("core.speculation.eagle_places.MOST_WAITING", 0)
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: Pausing())
    Player(Headed(rows=1, method="eagle"), model()(), None).play(story_reqs())
    assert len(finite) > 20 and all(finite)


def story_reqs() -> list[Req]:
    return [Req("story", 0, prompt, SamplingParams(temperature=0.0), 1, 120) for prompt in prompts()[:6]]


@pytest.mark.usefixtures("_compiler")
def test_the_engine_accepts_what_the_marks_promise() -> None:
    """Nearly all drafts of stories are right, so a mistake in places or features would show."""
    player = Counting(Headed(rows=1, chunk=4, method="eagle", cache="none"), model()(), None)
    player.play(story_reqs())
    assert player.accepted > PROMISED * player.drafted


@pytest.mark.usefixtures("_compiler")
def test_drafting_that_pauses_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps without drafts the head has run over their tokens too, so that drafts are as good as before."""
    accepted = {}
    for name, depth in (("always", FixedDepth(MOST)), ("pausing", Pausing())):
        monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times, depth=depth: depth)
        player = Counting(Headed(rows=1, method="eagle", cache="none"), model()(), None)
        player.play(story_reqs())
        accepted[name] = player.accepted / player.drafted
    assert accepted["pausing"] > accepted["always"] - 0.1


@pytest.mark.usefixtures("_compiler")
def test_a_head_of_a_reduced_vocabulary_drafts_tokens_of_the_target(tmp_path: Path, seed: int) -> None:
    """Two of three tokens have a draft id; the others are never drafted."""
    weights = load_file(bundled_head_dir() / "model.safetensors")
    ids = torch.tensor([token for token in range(704) if token % 3])
    weights["lm_head.weight"] = weights["lm_head.weight"][ids].contiguous()
    save_file({**weights, "d2t": ids - torch.arange(len(ids))}, tmp_path / "model.safetensors")
    config = json.loads((bundled_head_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "draft_vocab_size": len(ids)}))
    plain = Player(Headed(), model()(), None).play(requests(seed + 3))
    player = Counting(Headed(method=f"eagle:{tmp_path}"), model()(), None)
    assert_same(plain, player.play(requests(seed + 3)), requests(seed + 3))
    assert player.accepted > 0.1 * player.drafted


@pytest.mark.parametrize("native", ["wait", "off"])
def test_drafts_may_stand_behind_the_end_of_the_context(native: str, request: pytest.FixtureRequest) -> None:
    """Its last token has the last position of all; what is drafted behind it has positions that no token ever has."""
    if native == "wait":
        request.getfixturevalue("_compiler")
    (prompt, *_), context = prompts(), 64

    def reqs() -> list[Req]:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        return [Req("long", 0, prompt, params, 1, context - len(prompt))]

    setting = Headed(page_size=1, context=context)
    plain, drafted, accepted = both_ways(setting, model(native), reqs)
    assert [seen.tokens for seen in plain] == [seen.tokens for seen in drafted]
    assert len(plain[0].tokens) == context - len(prompt) and accepted > 0


@pytest.mark.usefixtures("_compiler")
def test_a_guess_is_judged_by_the_tokens_of_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has two tokens: the second judges the guess behind the first, and none judges that behind itself."""
    judged, judge = list[int](), Calibration.judge

    def counting(self: Calibration, *given: Any) -> None:
        judged.append(1)
        judge(self, *given)

    monkeypatch.setattr(Calibration, "judge", counting)
    reqs = [Req("r", 0, prompt, SamplingParams(temperature=0.0), 1, 2) for prompt in prompts()[:5]]
    Player(Headed(rows=1, overlap=False, method="eagle"), model()(), None).play(reqs)
    assert len(judged) == len(reqs)
