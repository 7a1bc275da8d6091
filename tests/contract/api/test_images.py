"""Images over real sockets: in texts, in token ids and in chats; what is refused, and that nothing else notices."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from service.cli.cli import cli
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.engine.builder import build_core_engine
from service.server.server import Server
from tests.proofs.equivalence.image_oracle import ImageOracle, Seen
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import Serve, loaded
from tests.support.vision_checkpoints import make_vision_checkpoint, picture

A, B = picture(1), picture(2, 90, 40, "JPEG")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}

PLACES = {
    "gemma3": ("<start_of_image>", "<start_of_image>"),
    "gemma4": ("<|image|>", "<|image|>"),
    "mistral3": ("[IMG]", "[IMG]"),
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
}
"""What a template writes for an image, and what of it becomes a run of tokens."""


class World:
    """One model, its oracle and its tokenizer, and how its prompts name an image."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.path = make_vision_checkpoint(kind, directory)
        self.oracle = ImageOracle(self.path)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        self.place, self.written = PLACES[kind]

    def ids(self, text: str, images: tuple[bytes, ...]) -> Seen:
        """The prompt as the processors of transformers make it of a text."""
        around = "\n\n" if self.oracle.kind == "gemma3" else ""
        runs = [around + self.tokenizer.decode(self.oracle.run(image)) + around for image in images]
        parts = text.split(self.place)
        whole = "".join(part + run for part, run in zip(parts, [*runs, ""], strict=True))
        return Seen(tuple(self.tokenizer.encode(whole, add_special_tokens=False)), images)

    def chat(self, *parts: str | bytes) -> Seen:
        """The prompt of a chat of one turn."""
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        turns = [{"role": "user", "content": content}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self.ids(text, tuple(part for part in parts if isinstance(part, bytes)))


@pytest.fixture(scope="module", params=PLACES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(request.param, tmp_path_factory.mktemp("images") / request.param)


@asynccontextmanager
async def served(world: World, config: Callable[..., ServerConfig]) -> AsyncIterator[SlipstreamClient]:
    server = Server(config(model=str(world.path), device="cpu", cpu_threads=1, native="off"), build_core_engine)
    async with loaded(server), SlipstreamClient(f"127.0.0.1:{server.port}") as client:
        yield client


def part(data: bytes, kind: str = "png") -> dict[str, Any]:
    """An image as OpenAI's clients have it."""
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def test_texts_ids_and_chats_with_images_say_what_transformers_says(
    world: World, config: Callable[..., ServerConfig]
) -> None:
    text = f"hi {world.place} and {world.place}?"
    seen, talk = world.ids(text, (A, B)), world.chat("what is ", A, " and ", B, "?")
    content = [{"type": "text", "text": "what is "}, part(A), {"type": "text", "text": " and "}]
    content += [part(B, "JPEG"), {"type": "text", "text": "?"}]
    async with served(world, config) as client:
        assert (await client.model_info()).takes_images
        (by_text,) = await client.complete(text, images=[A, B], **GREEDY)
        (by_ids,) = await client.complete(list(seen.ids), images=[A, B], **GREEDY)
        (said,) = await client.complete([{"role": "user", "content": content}], **GREEDY)
        # The command has the same way.
        (again,) = await client.complete([{"role": "user", "content": "plain"}], **GREEDY)
    assert by_text.token_ids == by_ids.token_ids and by_text.end.prompt_tokens == len(seen.ids)
    assert said.end.prompt_tokens == len(talk.ids) and again.token_ids
    for done, each in ((by_text, seen), (said, talk)):
        want = world.oracle.greedy(each, 8)
        assert done.token_ids[: len(want)] == want


async def test_a_kept_stream_with_an_image_is_found_again(world: World, config: Callable[..., ServerConfig]) -> None:
    """And a request of its id with another image is another request."""
    text, options = f"see {world.place}", {**GREEDY, "request_id": "kept", "resumable": True}
    async with served(world, config) as client:
        (first,) = await client.complete(text, images=[A], **options)
        (again,) = await client.complete(text, images=[A], **options)
        assert first.token_ids == again.token_ids
        with pytest.raises(CallFailed) as failed:
            await client.complete(text, images=[B], **options)
        assert failed.value.code is grpc.StatusCode.ALREADY_EXISTS


async def test_what_users_write_is_no_place_for_an_image(world: World, config: Callable[..., ServerConfig]) -> None:
    """The token that stands for an image, written out in a message, is text; else the image would move there."""
    token = world.written
    content = [{"type": "text", "text": f"no {token} here"}, part(A)]
    async with served(world, config) as client:
        (done,) = await client.complete([{"role": "user", "content": content}], **GREEDY)
        plain = len((await client.complete([{"role": "user", "content": f"no {token} here"}], **GREEDY))[0].token_ids)
    written = len(world.tokenizer.encode(token, add_special_tokens=False))
    whole = len(world.chat("no ", " here", A).ids)
    assert plain == 8 and done.end.prompt_tokens > whole + written


@pytest.mark.parametrize(
    ("prompt", "images", "field", "says"),
    [
        ("{place}", [], None, ""),
        ("no place", [A], "images", "0 places"),
        ("{place}{place}", [A], "images", "2 places"),
        ("{place}", [b""], "images[0]", "bytes"),
        ("{place}{place}", [A, b"GIF89a"], "images[1]", "send one of"),
        ("{place}", [A[:-300]], "images[0]", "cannot be decoded"),
        ("{place}" * 17, [A] * 17, "images", "at most 16"),
        ([5, 6, 7], [A], "images", "take runs of"),
        ([{"role": "user", "content": "a"}], [A], "images", "in its messages"),
    ],
    ids=["no image", "no place", "two places", "nothing", "a GIF", "half", "seventeen", "ids", "a chat"],
)
async def test_what_does_not_fit_is_refused_by_field(
    world: World,
    config: Callable[..., ServerConfig],
    prompt: Any,
    images: list[bytes],
    field: str | None,
    says: str,
) -> None:
    asked = prompt.replace("{place}", world.place) if isinstance(prompt, str) else prompt
    async with served(world, config) as client:
        neighbour = asyncio.create_task(client.complete("and on it goes", **{**GREEDY, "max_tokens": 40}))
        if field is None:
            assert (await client.complete(asked, **GREEDY))[0].token_ids, "a token like any other"
        else:
            with pytest.raises(CallFailed) as failed:
                await client.complete(asked, images=images, **GREEDY)
            assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT and list(failed.value.fields) == [field]
            assert says in str(failed.value)
        assert len((await neighbour)[0].token_ids) == 40


async def test_a_model_that_sees_nothing_takes_no_images(serve: Serve) -> None:
    async with serve(FakeEngine()) as serving:
        client = serving.client
        assert not (await client.model_info()).takes_images
        for prompt, images, field in (
            ("a", [A], "images"),
            ([{"role": "user", "content": [part(A)]}], [], "chat.messages[0].parts[0]"),
        ):
            with pytest.raises(CallFailed, match="sees no images") as failed:
                await client.complete(prompt, images=images)  # type: ignore[arg-type]
            assert list(failed.value.fields) == [field] and not serving.engine.streams
        with pytest.raises(ValueError, match="data:image/png"):
            await client.complete(
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]}]
            )
        with pytest.raises(ValueError, match="'audio'"):
            await client.complete([{"role": "user", "content": [{"type": "audio"}]}])


async def test_without_pillow_texts_are_served_and_images_refused(
    world: World, config: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.text.images.processor.has_pillow", lambda: False)
    async with served(world, config) as client:
        assert not (await client.model_info()).takes_images
        assert (await client.complete("a", **GREEDY))[0].token_ids
        with pytest.raises(CallFailed, match="sees no images"):
            await client.complete(world.place, images=[A], **GREEDY)


def test_the_command_shows_a_file(world: World, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(A)
    asked = [
        "generate",
        "--model",
        str(world.path),
        "--native",
        "off",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--image",
        str(file),
    ]
    said = CliRunner().invoke(cli, [*asked, "--chat", "what?"])
    assert said.exit_code == 0, said.output
    want = world.oracle.greedy(world.chat(A, "what?"), 8)
    whole = len(want) == 8 and 2 not in want
    assert not whole or said.stdout.removesuffix("\n") == world.tokenizer.decode(want, skip_special_tokens=True)
    bad = CliRunner().invoke(cli, [*asked, "no place for it"])
    assert bad.exit_code == 1 and "images" in bad.output
