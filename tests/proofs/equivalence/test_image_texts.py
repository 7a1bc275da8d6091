"""Text between the rows or tiles of an image is text: it is cached, computed and limited as any other."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from core.engine.build import build_engine
from core.errors import InvalidRequest
from tests.proofs.equivalence.image_oracle import ImageOracle, Seen, prompts
from tests.proofs.equivalence.test_images import OUTPUT, answer, config
from tests.support.engines import started
from tests.support.vision_checkpoints import make_vision_checkpoint, picture

KINDS = ("mistral3", "idefics3")


@pytest.fixture(scope="module", params=KINDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageOracle:
    return ImageOracle(make_vision_checkpoint(request.param, tmp_path_factory.mktemp("texts") / request.param))


def between(oracle: ImageOracle, seen: Seen) -> list[int]:
    """Places of tokens between the first and the last piece of an image that are none."""
    pieces = [place for place, token in enumerate(seen.ids) if token == oracle.token]
    return [place for place in range(pieces[0], pieces[-1]) if seen.ids[place] != oracle.token]


async def test_another_text_there_is_another_prompt(oracle: ImageOracle, seed: int) -> None:
    """A client that writes something else between the rows of an image leaves nothing for the others."""
    asked = oracle.prompt(random.Random(seed), 5, picture(1, 160, 120), 9)
    places = between(oracle, asked)
    assert len(places) >= 2
    others = [Seen((*asked.ids[:place], 7, *asked.ids[place + 1 :]), asked.images) for place in (places[0], places[-1])]
    directory = Path(oracle.model.config._name_or_path)
    async with started(build_engine(config(directory, 400, 512))) as engine:
        for each in (*others, asked, *others):
            want = oracle.greedy(each, OUTPUT)
            found, _ = await answer(engine, each)
            assert want and found[: len(want)] == want
        assert engine.stats.images == 5 and engine.stats.image_tokens == 5 * asked.ids.count(oracle.token)
    assert len({oracle.greedy(each, OUTPUT) for each in (asked, *others)}) > 1, "it makes no difference"


@pytest.mark.parametrize("chunk", [512, 16])
async def test_images_of_many_tiles(chunk: int, tmp_path: Path, seed: int) -> None:
    """Tall, wide and small ones, alone and together, in any chunks, twice."""
    directory = make_vision_checkpoint("idefics3", tmp_path / "tiles")
    oracle, rng = ImageOracle(directory), random.Random(seed)
    sizes = ((168, 168), (30, 200), (300, 40), (10, 10), (57, 57), (640, 480))
    shown = [picture(place, *size) for place, size in enumerate(sizes)]
    asked = [oracle.prompt(rng, place, each, 3) for place, each in enumerate(shown)]
    asked += [oracle.prompt(rng, 2, *shown[:3], 4), *prompts(oracle, seed)[:4]]
    assert len({len(each.ids) for each in asked[:6]}) >= 3, "they are cut in different ways"
    wanted = [oracle.greedy(each, OUTPUT) for each in asked]
    assert sum(map(len, wanted)) >= len(asked) * OUTPUT / 2, "the oracle is undecided"
    async with started(build_engine(config(directory, 400, chunk))) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(answer(engine, each) for each in asked))
            for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
                assert got[0][: len(want)] == want, place


async def test_tiles_at_other_distances_are_refused(tmp_path: Path, seed: int) -> None:
    directory = make_vision_checkpoint("idefics3", tmp_path / "tiles")
    oracle = ImageOracle(directory)
    asked = oracle.prompt(random.Random(seed), 5, picture(1, 160, 120), 9)
    place = between(oracle, asked)[0]
    async with started(build_engine(config(directory, 400, 512))) as engine:
        for ids in (
            (*asked.ids[:place], *asked.ids[place + 1 :]),
            (*asked.ids[:place], 5, *asked.ids[place:]),
            (*asked.ids, oracle.token),
        ):
            with pytest.raises(InvalidRequest, match="take runs of"):
                await answer(engine, Seen(ids, asked.images))
