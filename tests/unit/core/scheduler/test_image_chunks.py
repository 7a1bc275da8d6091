"""Prompts with images in the plans: an image is computed whole, once for each admission, and found again by its pixels.

The device is the hash executor, whose tokens depend on all ids before them: an image's are all the same, so what tells
two images apart is the cache alone.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.batch.schedule_batch import ScheduleBatch
from core.types.image import PlacedImage, PromptImages, ReadImage
from core.types.request import Req
from tests.unit.core.scheduler.harness import VOCAB, Harness
from tests.unit.core.scheduler.test_condemned import fail, until
from tests.unit.core.scheduler.test_preemption import busy, wait
from tests.unit.core.scheduler.test_preemption import harness as of_classes

TOKEN = VOCAB + 1
"""Stands for a piece of an image. No output is that."""


def image(length: int, value: float = 0.0) -> ReadImage:
    return ReadImage(np.full((length, 2), value, np.float32), None, length)


def shown(rng: random.Random, *parts: int | ReadImage) -> tuple[list[int], PromptImages]:
    """A prompt of random ids, as many as each number says, and images between them."""
    ids: list[int] = []
    placed: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(VOCAB) for _ in range(part)]
        else:
            placed.append(PlacedImage(len(ids), part))
            ids += [TOKEN] * part.length
    return ids, PromptImages(tuple(placed))


def look_at(harness: Harness, reqs: list[Req]) -> dict[ReadImage, int]:
    """How often each image was computed. Every chunk ends within no image, and a row has one in a step."""
    counts: dict[ReadImage, int] = {}
    for batch in harness.executor.batches:
        assert len(set(batch.rows.tolist())) == len(batch.rows)
        images = () if batch.vision is None else batch.vision.images
        assert _computed(batch) == [each for i in images for each in range(i.place, i.end)]
        for each in images:
            counts[each.image] = counts.get(each.image, 0) + 1
    return counts


def _computed(batch: ScheduleBatch) -> list[int]:
    """Places in T of image tokens among those of prompt chunks."""
    staged = batch.staging.prefill_ids_cpu
    return [] if staged is None else np.flatnonzero(staged.numpy() == TOKEN).tolist()


@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("pages", [400, 34])
def test_images_are_computed_whole(cache: str, pages: int, seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(cache=cache, pages=pages, max_len=128)
    reqs = []
    for value in range(12):
        parts = [rng.choice([rng.randint(1, 20), image(rng.choice([1, 3, 4, 16, 21]), value)]) for _ in range(4)]
        ids, images = shown(rng, 1, *parts, rng.randint(0, 3))
        reqs.append(harness.add(ids, max_tokens=10, images=images))
    harness.drain()
    counts = look_at(harness, reqs)
    for req in reqs:
        harness.expect(req)
        assert all(1 <= counts[each.image] <= 1 + req.retractions for each in req.images.placed)


def test_a_row_has_one_chunk_in_a_step(seed: int) -> None:
    """Also where its chunk ends before an image and there is room for more."""
    rng = random.Random(seed)
    harness = Harness(chunked_prefill_size=16)
    ids, images = shown(rng, 10, image(8), 3)
    req = harness.add(ids, images=images)
    other = harness.add([5] * 4)
    harness.drain()
    harness.expect(req)
    harness.expect(other)
    first = harness.executor.batches[0]
    assert first.extend_lens.tolist() == [10, 4] and look_at(harness, [req]) == {images.placed[0].image: 1}


def test_an_image_longer_than_a_chunk_is_a_longer_chunk(seed: int) -> None:
    harness = Harness(chunked_prefill_size=8)
    ids, images = shown(random.Random(seed), 3, image(30), 3)
    req = harness.add(ids, images=images)
    harness.drain()
    harness.expect(req)
    assert [each.extend_lens[0] for each in harness.executor.batches[:3]] == [3, 30, 3]


def test_the_same_image_is_found_again_and_another_is_not(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness()
    ids, _ = shown(rng, 6, image(9, 1.0), 5)
    cached = []
    for value in (1.0, 2.0, 1.0, 2.0):
        req = harness.add(ids, images=PromptImages((PlacedImage(6, image(9, value)),)))
        harness.drain()
        harness.expect(req)
        cached.append(req.cached_tokens)
    assert cached == [0, 4, 16, 16]
    half = harness.add(ids[:12], images=PromptImages((PlacedImage(6, image(6, 1.0)),)))
    harness.drain()
    assert half.cached_tokens == 4, "a part of an image is another one"


def test_what_went_wrong_behind_an_image_leaves_the_cache(seed: int) -> None:
    harness = Harness()
    ids, images = shown(random.Random(seed), 2, image(9, 1.0), 5)
    bad = harness.add(ids, max_tokens=40, images=images)
    until(harness, bad, 5)
    fail(harness, bad)
    harness.drain()
    again = harness.add(ids, images=images)
    harness.drain()
    assert again.cached_tokens == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_prompt_that_others_make_way_for_finds_its_image(whole: bool, seed: int) -> None:
    """Where it is cached to its end, and where the prompt ends in its middle."""
    world = of_classes()
    ids, images = shown(random.Random(seed), 6, image(9, 1.0), 5)
    world.add(ids, max_tokens=1, images=images)
    world.drain()
    busy(world)
    high = world.add(ids if whole else ids[:15], max_tokens=3, priority=-10, images=images)
    wait(world, high)
    assert high.cached_tokens == (16 if whole else 4)
    world.drain()
    world.expect(high)


def test_the_longest_cached_prefix_counts_images(seed: int) -> None:
    harness = Harness(policy="lpm", rows=1)
    ids, images = shown(random.Random(seed), 2, image(9, 1.0), 5)
    harness.add(ids, max_tokens=1, images=images)
    harness.drain()
    harness.add([1, 2], max_tokens=8)
    harness.step()
    cold, warm = harness.add([3] * 16, max_tokens=1), harness.add(ids, max_tokens=1, images=images)
    harness.drain()
    assert warm.scheduled_at is not None and cold.scheduled_at is not None and warm.scheduled_at < cold.scheduled_at
