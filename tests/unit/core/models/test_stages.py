"""The layers of a model on several ranks: threads of this process, which hand states round through queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.attention.torch_native import TorchNativeAttention
from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.config import read_checkpoint_config
from core.models.hf.backend import TransformersModel
from core.models.hf.self_check import STEPS, _batch, small_pool
from core.models.loader import load_model
from core.models.stages.stage import Elsewhere, NoEmbedding, NoLogits, Stage, own_layers
from core.models.stages.staged_model import FirstStage, LaterStage, load_staged
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
CONFIG = ModelConfig("", dtype="float32", context_length=96, native="off")


class Hub:
    """What the ranks of one pipeline share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lines = [SimpleQueue[torch.Tensor]() for _ in range(size)]
        self.meeting = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size
        self._turn = threading.Lock()
        self._own = threading.local()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run while no other rank does: `transformers` sets things of its whole process while it loads."""
        with self._turn:
            self._own.turn = True
            yield
            self._own.turn = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The turn is another's meanwhile, if this thread has it."""
        own = getattr(self._own, "turn", False)
        if own:
            self._turn.release()
        try:
            yield
        finally:
            if own:
                self._turn.acquire()

    def met(self, rank: int, value: Any) -> list[Any]:
        """What all ranks have brought."""
        with self.waiting():
            self.meeting.wait()
            self.values[rank] = value
            self.meeting.wait()
            found = list(self.values)
            self.meeting.wait()
        return found


class Queued:
    """A `Ring` over queues."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub

    def send(self, tensor: torch.Tensor) -> None:
        self._hub.lines[(self.rank + 1) % self.size].put(tensor.clone())

    def expect(self, into: torch.Tensor) -> Any:
        ring = self

        class Coming:
            def wait(self) -> torch.Tensor:
                with ring._hub.waiting():
                    got = ring._hub.lines[ring.rank].get(timeout=60)
                assert (got.shape, got.dtype) == (into.shape, into.dtype)
                return into.copy_(got)

        return Coming()

    def agree(self, values: list[float]) -> list[float]:
        found: list[float] = self._hub.met(self.rank, values)[0]
        return found

    def all_equal(self, value: int) -> bool:
        return len(set(self._hub.met(self.rank, value))) == 1


def loaded(path: Path, size: int) -> list[Any]:
    """What each rank has of the model, or the error that it met."""
    checkpoint, hub = read_checkpoint_config(path), Hub(size)

    def one(rank: int) -> Any:
        with hub.turn():
            try:
                return load_staged(checkpoint, CONFIG, CPU, lambda *_: None, Queued(hub, rank))
            except ModelLoadError as error:
                return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("stages") / "llama", num_hidden_layers=5)


@pytest.fixture(scope="module")
def whole(path: Path) -> TransformersModel:
    found = load_model(
        ModelConfig(str(path), dtype="float32", context_length=96, native="off"), CPU, keeps_modules=True
    )
    assert isinstance(found, TransformersModel)
    return found


@pytest.fixture(scope="module")
def staged(path: Path) -> list[Any]:
    return loaded(path, 3)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (5, 3, [[0, 1], [2, 3], [4]]),
        (4, 2, [[0, 1], [2, 3]]),
        (3, 3, [[0], [1], [2]]),
        (7, 2, [[0, 1, 2, 3], [4, 5, 6]]),
    ],
)
def test_each_layer_has_one_rank_and_the_first_has_most(count: int, size: int, expected: list[list[int]]) -> None:
    assert [list(own_layers(count, rank, size)) for rank in range(size)] == expected


def test_each_rank_holds_its_own_layers_and_rank_0_the_ends(staged: list[Any], whole: TransformersModel) -> None:
    held = [{spec.layer_id for spec in each.spec.kv_layers} for each in staged]
    assert held == [{0, 1}, {2, 3}, {4}]
    assert [type(each) for each in staged] == [FirstStage, LaterStage, LaterStage]
    assert {each.spec.vocab_size for each in staged} == {whole.spec.vocab_size}
    first, second, third = (each.module for each in staged)
    assert isinstance(first.model.layers[4], Elsewhere) and not isinstance(first.model.layers[1], Elsewhere)
    assert isinstance(second.get_input_embeddings(), NoEmbedding) and isinstance(third.lm_head, NoLogits)
    count = [sum(each.numel() for each in module.parameters()) for module in (first, second, third)]
    norms = whole.module.model.norm.weight.numel()
    assert sum(count) == sum(each.numel() for each in whole.module.parameters()) + 2 * norms


class Followers:
    """The ranks behind the first, each on its thread: they compute the batches that it begins."""

    def __init__(self, staged: list[Any]) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in staged[1:]]
        self._later = staged[1:]
        self._pools = [small_pool(each.spec, CPU) for each in self._later]
        for model, pool in zip(self._later, self._pools, strict=True):
            model.bind(pool, TorchNativeAttention())

    def begin(self, parts: Any, num_extend: int, ids: Any, change: Callable[[Any], None]) -> list[Future[Any]]:
        found = []
        for thread, model, pool in zip(self._threads, self._later, self._pools, strict=True):
            # No rank but the first knows the tokens.
            batch = _batch(parts, num_extend, [torch.zeros_like(each) for each in ids], pool)
            change(batch)
            found.append(thread.submit(model.forward, batch))
        return found

    def close(self) -> None:
        for each in self._threads:
            each.shutdown()


@pytest.fixture
def followers(staged: list[Any]) -> Iterator[Followers]:
    made = Followers(staged)
    yield made
    made.close()


def only(places: list[int]) -> Callable[[Any], None]:
    """Changes a batch so that the logits of these tokens alone are wanted."""

    def change(batch: Any) -> None:
        batch.last_indices = torch.tensor(places, dtype=torch.int64)

    return change


def test_steps_that_begin_while_another_is_away_get_their_own_logits(
    staged: list[Any], whole: TransformersModel, followers: Followers
) -> None:
    """Two prompts begin one behind the other, of which the second ends last; then what follows on them."""
    assert whole.reference is not None
    ids, first = whole.reference.ids, staged[0]
    (own, plain) = (small_pool(each.spec, CPU) for each in (first, whole))
    first.bind(own, TorchNativeAttention())
    whole.bind(plain, TorchNativeAttention())
    one, other = (((1, 0, 5),), 1), (((2, 0, 3),), 1)
    changes = only([4]), only([0, 2])
    away = []
    for (parts, chunks), change in zip((one, other), changes, strict=True):
        batch = _batch(parts, chunks, ids, own)
        change(batch)
        followers.begin(parts, chunks, ids, change)
        away.append((batch, first.begin(batch)))
        assert first.stage.wanted is None
    for (parts, chunks), change, (batch, coming) in zip((one, other), changes, away, strict=True):
        expected = _batch(parts, chunks, ids, plain)
        change(expected)
        assert torch.allclose(first.end(batch, coming), whole.forward(expected), atol=1e-5)
    assert first.stage.coming is None, "nothing is kept"
    parts, chunks = STEPS[1]
    followers.begin(parts, chunks, ids, lambda _: None)
    found = first.forward(_batch(parts, chunks, ids, own))
    assert torch.allclose(found, whole.forward(_batch(parts, chunks, ids, plain)), atol=1e-5)


def test_where_no_logits_are_wanted_nothing_comes_back(staged: list[Any], followers: Followers) -> None:
    first, ids = staged[0], staged[0].reference.ids
    own = small_pool(first.spec, CPU)
    first.bind(own, TorchNativeAttention())
    batch = _batch(((1, 0, 5),), 1, ids, own)
    only([])(batch)
    (done, last) = followers.begin(((1, 0, 5),), 1, ids, only([]))
    coming = first.begin(batch)
    assert coming is None and first.end(batch, coming).shape == (0, first.spec.vocab_size)
    assert len(done.result(60)) == len(last.result(60)) == 0
    assert all(each.stage.wanted is None for each in staged)


def test_the_states_of_all_tokens_come_back_where_they_are_pooled(
    staged: list[Any], whole: TransformersModel, followers: Followers
) -> None:
    first, ids = staged[0], staged[0].reference.ids
    own, plain = (small_pool(each.spec, CPU) for each in (first, whole))
    first.bind(own, TorchNativeAttention())
    whole.bind(plain, TorchNativeAttention())

    def pooled(batch: Any) -> None:
        only([4])(batch)
        batch.wants_hidden = True

    batch, expected = _batch(((1, 0, 5),), 1, ids, own), _batch(((1, 0, 5),), 1, ids, plain)
    for each in (batch, expected):
        pooled(each)
    followers.begin(((1, 0, 5),), 1, ids, pooled)
    assert torch.allclose(first.forward(batch), whole.forward(expected), atol=1e-5)
    assert batch.hidden is not None and torch.allclose(batch.hidden, expected.hidden, atol=1e-5)


def test_a_model_with_too_few_layers_is_refused(path: Path) -> None:
    said = {str(each) for each in loaded(path, 6)}
    assert said == {"pipeline_parallel 6 is not possible with 'llama': it has 5 layers"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}),
        ("qwen3_next", {}),
        ("llama4_text", {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 2 + ["full_attention"] * 2}),
    ],
)
def test_ranks_with_layers_of_different_kinds_are_refused(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    said = {str(each) for each in loaded(make_checkpoint(kind, tmp_path, **changes), 2)}
    assert said == {
        f"pipeline_parallel 2 is not possible with '{kind}': its ranks would have layers of different kinds"
    }


def test_a_tied_matrix_is_held_by_the_first_rank_alone(tmp_path: Path) -> None:
    first, last = loaded(make_checkpoint("llama", tmp_path, tie_word_embeddings=True), 2)
    assert first.module.lm_head.weight is first.module.model.embed_tokens.weight
    assert isinstance(last.module.get_input_embeddings(), NoEmbedding) and isinstance(last.module.lm_head, NoLogits)
    assert not last.module.config.tie_word_embeddings


def test_layers_in_two_lists_of_one_length_are_refused() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(
                model_type="twofold", get_text_config=lambda: SimpleNamespace(num_hidden_layers=2)
            )
            for name in ("layers", "others"):
                self.add_module(name, torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2)))

    with pytest.raises(ModelLoadError, match="with 'twofold': its layers are not in one list"):
        Stage(Queued(Hub(2), 0)).cutting(Model)()


def test_windows_of_all_ranks_add_up(tmp_path: Path) -> None:
    """How far back a logit sees: a prefix must be kept for as long, whatever the first rank has of the layers."""
    path = make_checkpoint("mistral", tmp_path)
    whole = load_model(
        ModelConfig(str(path), dtype="float32", context_length=96, native="off"), CPU, keeps_modules=True
    )
    assert [each.spec.reach for each in loaded(path, 2)] == [whole.spec.reach] * 2 == [32, 32]


def test_layers_that_read_ids_are_found_out(tmp_path: Path) -> None:
    """Gemma 4's layers read embeddings of their own; ranks behind the first know no tokens while others decode."""
    changes = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2}
    said = [str(each) for each in loaded(make_checkpoint("gemma4_text", tmp_path, **changes), 2)]
    told = "model type 'gemma4_text' with pipeline_parallel 2 is not supported: packed and plain"
    assert all(each.startswith(told) for each in said), said
