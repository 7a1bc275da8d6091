"""Several heads for multi-token prediction: what they say is what `transformers` says with them, draft by draft.

Outputs would be the same with heads that read a wrong place or state. So the logits behind each draft are compared with
those of the same text computed from scratch, and heads that were built to be right must always be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from core.batch.schedule_batch import ScheduleBatch
from core.batch.spec_plan import Aim
from core.models.eagle.head import HeadStep
from core.models.hf.mtp import MtpHead
from core.speculation.drafter import Drafts, Ran
from core.speculation.eagle_drafter import EagleDrafter
from core.speculation.voice import Voice
from core.types.arrays import Floats, Ints
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.equivalence.test_model_drafts import FREE, ByTurns, Leaving
from tests.proofs.equivalence.test_mtp import FEW, KINDS, load, outside, with_plain_experts
from tests.proofs.equivalence.test_speculation import MOST, Player, Setting, requests
from tests.support.fakes.fixed_depth import FixedDepth
from tests.support.mtp_checkpoints import LAYERS, leave_heads_to_themselves, make_mtp_checkpoint, plain_model, teach

HEADS = 3


@pytest.fixture(autouse=True)
def _left_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        leave_heads_to_themselves(kind, monkeypatch)


def use(depth: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: depth)


def checkpoint(kind: str, path: Path, heads: int = HEADS, **taught: float) -> Path:
    """Heads that are right now and then, by token, state and all that they attend to, unless taught otherwise."""
    made = make_mtp_checkpoint(kind, path / f"{kind}-{heads}", heads, vocab_size=FEW)
    teach(made, **({"token": 0.5, "state": 0.5, "rest": 0.5} | taught))
    return made


class Listener:
    """Notes what heads say, and of which text."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.texts: dict[int, list[int]] = {}
        self.said: list[tuple[list[int], torch.Tensor]] = []
        """Of each row in each step with drafts: its text, and float32[K, V], the logits of its K drafts."""
        self._rows: list[list[torch.Tensor]] = []
        self._patch = patch
        for owner, name in ((EagleDrafter, "begin"), (EagleDrafter, "draft"), (EagleDrafter, "hear"), (Voice, "say")):
            self._follow(owner, name)

    def _follow(self, owner: type, name: str) -> None:
        usual, mine = getattr(owner, name), getattr(self, f"_{name}")
        self._patch.setattr(owner, name, lambda *given: mine(usual, *given))

    def _begin(self, usual: Callable[..., None], drafter: EagleDrafter, batch: ScheduleBatch) -> None:
        usual(drafter, batch)
        assert batch.spec is not None
        for row in batch.fresh_rows.tolist():
            self.texts.pop(row, None)
        for seed in batch.spec.seeds:
            self.texts[seed.row] = seed.ids.tolist()

    def _came(self, ran: Ran) -> None:
        ends = np.cumsum(ran.counts)
        for row, count, end in zip(ran.rows.tolist(), ran.counts.tolist(), ends.tolist(), strict=True):
            if row in self.texts:
                self.texts[row] += ran.tokens[end - count : end].tolist()

    def _hear(self, usual: Callable[..., None], drafter: EagleDrafter, ran: Ran) -> None:
        self._came(ran)
        usual(drafter, ran)

    def _draft(self, usual: Callable[..., Drafts], drafter: EagleDrafter, ran: Ran, aim: Aim) -> Drafts:
        self._came(ran)
        self._rows = [[] for _ in ran.rows]
        found = usual(drafter, ran, aim)
        for row, logits in zip(ran.rows.tolist(), self._rows, strict=True):
            if logits:
                self.said.append((list(self.texts[row]), torch.stack(logits)))
        return found

    def _say(self, usual: Any, voice: Voice, logits: torch.Tensor, at: Ints, lens: Ints) -> tuple[Ints, Floats]:
        for row, each in zip(at.tolist(), logits, strict=True):
            self._rows[row].append(each.clone())
        found: tuple[Ints, Floats] = usual(voice, logits, at, lens)
        return found


class FromScratch:
    """The heads as `transformers` runs them over a whole text, with nothing kept from before."""

    def __init__(self, path: Path) -> None:
        self._model = plain_model(path).eval()
        self._heads: Any = MtpModel.from_pretrained(self._model)

    @torch.inference_mode()
    def say(self, text: Sequence[int], most: int) -> torch.Tensor:
        """float32[most, V]: the logits of the greedy drafts behind `text`, its newest token included.

        Those of each head, in turn, and then what the last head says of its own output; `most` is at least one a head.
        """
        ids, cache = torch.tensor([text])[:, 1:], MtpCache(config=self._model.config.get_mtp_config())
        states = self._model.model(torch.tensor([text])[:, :-1]).last_hidden_state
        at, found = torch.arange(1, len(text))[None], list[torch.Tensor]()
        for number in range(most):
            head = min(number, len(self._heads.layers) - 1)
            if number > head:
                ids, at, states = ids[:, -1:], at[:, -1:], states[:, -1:]
            states = self._heads.forward_layer(head, states, at, cache, input_ids=ids)
            found.append(self._heads.shared_head(states[0, -1]))
            ids, at = torch.cat([ids[:, 1:], found[-1].argmax()[None, None]], 1), at + 1
        return torch.stack(found)


def check(said: list[tuple[list[int], torch.Tensor]], path: Path, heads: int = HEADS) -> None:
    scratch = FromScratch(path)
    for text, logits in said:
        assert len(logits) >= heads
        torch.testing.assert_close(logits, scratch.say(text, len(logits)), atol=1e-4, rtol=0)


def greedy(prompt: Ints, most: int) -> Req:
    return Req("r", 0, prompt, SamplingParams(temperature=0.0, ignore_eos=True), 1, most)


def prompt_of(length: int, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(3, FEW, length)


OFTEN: dict[str, dict[str, Any]] = {"overlap": {}, "pages of one": {"overlap": False, "page_size": 1, "chunk": 16}}
SMALL: dict[str, Any] = {"page_size": 1, "chunk": 2}
"""Chunks that are shorter than what some heads wait for. Few steps beside them verify drafts."""


@pytest.mark.parametrize("depth", [FixedDepth(MOST), FixedDepth(HEADS), ByTurns()], ids=["most", "heads", "by turns"])
@pytest.mark.parametrize("setting", [*OFTEN.values(), SMALL], ids=[*OFTEN, "small chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_draft_is_that_of_the_text_from_scratch(
    kind: str, setting: dict[str, Any], depth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of several rows at once, by chunks, behind drafts that were right and wrong, and after turns without drafts."""
    use(depth, monkeypatch)
    path, listener = checkpoint(kind, tmp_path), Listener(monkeypatch)
    player = Player(Setting(**setting, method="mtp"), load(path), None)
    # Each begins with a token of its own, so that none finds pages of another.
    lengths = enumerate((1, 2, 5, 23, 37), 3)
    player.play([greedy(np.array([first, *prompt_of(length - 1, seed + length)]), 20) for first, length in lengths])
    assert player.stats.cached_tokens == 0
    check(listener.said, path)
    assert len(listener.said) > 20 and player.drafts.accepted > 0


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_drafts_are_those_of_generate(
    kind: str, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With as many drafts as heads, `generate(use_mtp=True)` drafts behind the same tokens, and says the same."""
    use(FixedDepth(heads), monkeypatch)
    path, listener = checkpoint(kind, tmp_path, heads), Listener(monkeypatch)
    prompt = prompt_of(21, seed)
    player = Player(Setting(method="mtp", overlap=False), load(path), None)
    (seen,) = player.play([greedy(prompt, 40)])
    tokens, expected = by_generate(path, prompt, 40)
    assert seen.tokens == tokens
    said = {len(text): logits for text, logits in listener.said}
    assert list(expected) == [length for length in said if length in expected] and len(expected) > 8
    # Near the end there is no room to verify all, and the steps part.
    assert list(said)[: len(expected) - 1] == list(expected)[:-1]
    for length, logits in expected.items():
        torch.testing.assert_close(said[length], logits, atol=1e-4, rtol=0)


def by_generate(path: Path, prompt: Ints, most: int) -> tuple[list[int], dict[int, torch.Tensor]]:
    """(output of `generate`, by how many tokens were known the logits of its drafts)."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    drafts: dict[int, torch.Tensor] = {}
    get = MTPCandidateGenerator.get_candidates

    def noting(self: Any, input_ids: torch.Tensor, *given: Any, **named: Any) -> Any:
        found = get(self, input_ids, *given, **named)
        if found[1] is not None:
            drafts[input_ids.shape[1]] = found[1][0].clone()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", noting)
        out = plain_model(path).generate(
            torch.from_numpy(prompt)[None], use_mtp=True, max_new_tokens=most, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist(), drafts


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_found_again_hold_the_part_of_each_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The second text is the first one, which went on behind the end of what is found.

    It has more places of its own than a head waits for; before them no head computes anything, for drafts neither.
    """
    use(FixedDepth(MOST), monkeypatch)
    path, prompt = checkpoint(kind, tmp_path), prompt_of(33, seed)
    player = Player(Setting(method="mtp", overlap=False), load(path), None)
    (first,) = player.play([greedy(prompt, 30)], stop=False)
    listener = Listener(monkeypatch)
    player.play([greedy(np.array([*prompt, *first.tokens[:19]]), 20)])
    assert player.stats.cached_tokens == 48
    check(listener.said, path)
    assert listener.said


RIGHT = {**OFTEN, "long pages": {"page_size": 16, "chunk": 16}, "retractions": {"tokens": 112, "rows": 6}}


@pytest.mark.parametrize("depth", [FixedDepth(MOST), ByTurns()], ids=["always", "by turns"])
@pytest.mark.parametrize("setting", RIGHT.values(), ids=RIGHT.keys())
@pytest.mark.parametrize("by", ["token", "state"])
def test_heads_that_can_be_right_always_are(
    by: str, setting: dict[str, Any], depth: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By the token alone whatever is sampled; by the state alone where the text follows the rule."""
    use(depth, monkeypatch)
    path = checkpoint("glm4_moe", tmp_path, **({"token": 0, "state": 0, "rest": 0} | {by: 1}))
    reqs = lambda: requests(FEW, seed, FREE if by == "token" else ("greedy",) * 9)  # noqa: E731
    plain = Player(Setting(**setting), load(path), None).play(reqs())
    player = Player(Setting(**setting, method="mtp"), load(path), None)
    for one, other in zip(plain, player.play(reqs()), strict=True):
        assert one.tokens == other.tokens
    assert player.drafts.tokens == player.drafts.accepted > 20


def test_rows_that_leave_and_rows_without_drafts_beside_right_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    use(FixedDepth(MOST), monkeypatch)
    path = checkpoint("glm4_moe", tmp_path, token=1, state=0, rest=0)
    reqs = [*requests(FEW, seed, FREE), *requests(FEW, seed + 1, FREE)]
    for req in reqs[::4]:
        req.speculative = False
    player = Leaving(Setting(method="mtp"), load(path), None)
    player.play(reqs)
    assert player.drafts.tokens == player.drafts.accepted > 20


def test_rows_that_share_pages_while_heads_still_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """All begin alike, and each goes on in its own way; what one row makes again is read by the others."""
    use(FixedDepth(MOST), monkeypatch)
    path, common = checkpoint("glm4_moe", tmp_path, token=1, state=0, rest=0), prompt_of(30, seed)
    reqs = lambda: [  # noqa: E731
        Req("r", 0, np.array([*common, *prompt_of(1 + i % 4, seed + i)]), SamplingParams(temperature=0.9), i, 20)
        for i in range(12)
    ]
    plain = Player(Setting(chunk=16), load(path), None).play(reqs())
    player = Player(Setting(chunk=16, method="mtp"), load(path), None)
    assert [each.tokens for each in plain] == [each.tokens for each in player.play(reqs())]
    assert player.stats.cached_tokens > 100
    assert player.drafts.tokens == player.drafts.accepted > 10


def test_without_memory_for_a_head_the_next_step_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every fifth run of a head finds none, of prompts too; what was drafted before stays right."""
    use(FixedDepth(MOST), monkeypatch)
    usual, calls = MtpHead.run, itertools.count()

    def tight(head: MtpHead, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        if next(calls) % 5 == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return usual(head, step)

    monkeypatch.setattr(MtpHead, "run", tight)
    path = checkpoint("glm4_moe", tmp_path, token=0, state=1, rest=0)
    reqs = lambda: requests(FEW, seed, ("greedy",) * 9)  # noqa: E731
    plain = Player(Setting(), load(path), None).play(reqs())
    player = Player(Setting(method="mtp"), load(path), None)
    assert [each.tokens for each in plain] == [each.tokens for each in player.play(reqs())]
    assert player.drafts.tokens == player.drafts.accepted > 5


@pytest.mark.parametrize(
    "setting",
    [{}, {"overlap": False, "page_size": 1, "chunk": 16}, {"tokens": 112, "rows": 6}],
    ids=["overlap", "short", "retractions"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_draft_of_several_heads_changes_an_output(
    kind: str, setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Over the sampling matrix, in float64 as for other models by `transformers`."""
    use(FixedDepth(MOST), monkeypatch)
    path = checkpoint(kind, tmp_path)
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    monkeypatch.setattr("core.models.hf.backend.load_module", with_plain_experts)
    reqs = lambda: [req for req in requests(FEW, seed) if not outside(req)]  # noqa: E731
    plain = Player(Setting(**setting), load(path), None).play(reqs())
    player = Player(Setting(**setting, method="mtp"), load(path), None)
    for req, one, other in zip(reqs(), plain, player.play(reqs()), strict=True):
        assert one.tokens == other.tokens and one.reason == other.reason, req.request_id
    assert player.drafts.accepted > 0


def test_heads_beyond_the_most_drafts_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.models.hf.mtp import load_mtp

    model = load(checkpoint("glm4_moe", tmp_path))
    assert [layer.layer_id for layer in load_mtp(model, MOST).layers] == [0, 1, 2]
    assert [layer.layer_id for layer in load_mtp(model, 2).layers] == [0, 1]


def test_heads_are_found_behind_the_layers_whatever_numbers_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of `transformers` name the first head of published models alone."""
    from transformers import Glm4MoeForCausalLM

    from core.models.hf.mtp import load_mtp

    monkeypatch.setattr(
        Glm4MoeForCausalLM,
        "_keys_to_ignore_on_load_unexpected",
        [rf"model\.layers\.{LAYERS}.*", r"model\.layers\.46.*"],
    )
    model = load(checkpoint("glm4_moe", tmp_path))
    assert len(load_mtp(model, MOST).layers) == HEADS
