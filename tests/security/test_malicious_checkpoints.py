"""Checkpoints made to run code, read elsewhere or crash the loader: refused in one line, or served without it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc
import grpc.aio
import pytest

from core.errors import InvalidRequest, ModelLoadError
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from service.client import SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security import replies
from tests.security.evil import REFUSED, SERVED_OR_REFUSED, Spoil, edit
from tests.support.scorecard import Scorecard
from tests.support.servers import serve_checkpoint

GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))


async def greedy(directory: Path) -> tuple[int, ...]:
    """What the checkpoint answers; ModelLoadError if it is refused."""
    async with serve_checkpoint(directory) as (_, client):
        return (await client.complete("hi", **GREEDY))[0].token_ids


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
async def test_refused(folder: Path, canary: Path, spoil: Spoil, scorecard: Scorecard) -> None:
    spoil(folder, canary)
    with pytest.raises(ModelLoadError) as refused:
        await greedy(folder)
    assert "\n" not in refused.value.message and len(refused.value.message) < 600
    scorecard(34, f"{spoil.__name__}: canaries", int(canary.exists()), equals=0)
    scorecard(34, f"{spoil.__name__}: exit code", refused.value.exit_code, equals=3)


@pytest.fixture(scope="module")
def clean(tiny: Path) -> tuple[int, ...]:
    """What the checkpoint answers as it is."""
    return asyncio.run(greedy(tiny))


@pytest.mark.parametrize("spoil", SERVED_OR_REFUSED, ids=lambda spoil: spoil.__name__)
async def test_never_run(
    clean: tuple[int, ...], folder: Path, canary: Path, spoil: Spoil, scorecard: Scorecard
) -> None:
    spoil(folder, canary)
    try:
        found: tuple[int, ...] | None = await greedy(folder)
    except ModelLoadError as refused:
        found = None
        assert "\n" not in refused.message
    word = "refused" if found is None else "served as without it"
    scorecard(34, f"{spoil.__name__}, {word}: canaries", int(canary.exists()), equals=0)
    assert found in (None, clean)


SECRET = "what only the operator may read"

ESCAPES: dict[str, str] = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a helper": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "globals of a function": "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "globals of an exception": "{{ raise_exception.__globals__ }}",
    "attr filter": "{{ (''|attr('__class__'))|attr('__mro__') }}",
    "attribute by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "map with attribute": "{{ [messages]|map(attribute='__class__')|list }}",
    "include": "{% include 'SECRET_FILE' %}",
    "import": "{% import 'SECRET_FILE' as x %}{{ x }}",
    "extends": "{% extends 'SECRET_FILE' %}",
    "builtins": "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
    "code object": "{{ (messages|length).__class__.__init__.__code__ }}",
    "generator frame": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "mutation": "{{ messages.append({'role': 'x', 'content': 'y'}) }}",
    "open": "{{ open('SECRET_FILE').read() }}",
    "huge range": "{% for x in range(10**9) %}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "division by nothing": "{{ 1 // 0 }}",
    "a refusal with a path": "{{ raise_exception('only user and assistant may speak') }}",
    "not a template": "{% if %}",
}


def plant(folder: Path, canary: Path, secret: Path, name: str) -> None:
    """Give the checkpoint this chat template, both where it may stand."""
    secret.write_text(SECRET)
    template = ESCAPES[name].replace("CANARY", str(canary)).replace("SECRET_FILE", str(secret))
    edit(folder / "tokenizer_config.json", chat_template=template)
    (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize("name", ESCAPES)
def test_chat_templates_stay_in_their_sandbox(folder: Path, canary: Path, tmp_path: Path, name: str) -> None:
    plant(folder, canary, tmp_path / "secret", name)
    try:
        rendered = Tokenizer.load(folder).render_chat([ChatMessage("user", "hi")])
    except InvalidRequest as refused:
        rendered = refused.message
        assert not replies.FORBIDDEN.search(rendered), rendered
    assert SECRET not in rendered and str(tmp_path) not in rendered
    # A template that could read what it should not would make a long prompt.
    assert len(rendered) < 200
    assert not canary.exists()


@pytest.mark.parametrize("name", ["subclasses", "globals of a helper", "huge range", "endless recursion", "include"])
async def test_a_hostile_template_harms_nobody_else(folder: Path, canary: Path, tmp_path: Path, name: str) -> None:
    plant(folder, canary, tmp_path / "secret", name)
    async with serve_checkpoint(folder) as (_, client):
        text = await chat_answer(client, (SECRET, str(tmp_path)))
        # The server is as well as before, and the rendered prompt is nothing that the model could be made to repeat.
        assert (await client.complete("hi", **GREEDY))[0].token_ids
    assert not canary.exists()
    assert text in ("refused", "served")


async def chat_answer(client: SlipstreamClient, secrets: tuple[str, ...]) -> str:
    """Whether a conversation was served; a refusal must be a clean INVALID_ARGUMENT."""
    message = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling_params=pb.SamplingParams(max_tokens=2),
    )
    try:
        events = [event async for event in client.stub.Generate(message)]
    except grpc.aio.AioRpcError as error:
        failed = replies.read(error, secrets)
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        return "refused"
    # A template that could read what it should not would make a long prompt.
    assert events[0].started.prompt_tokens < 200
    return "served"


def test_the_canary_can_sing(canary: Path) -> None:
    """Else a pickle that creates nothing would pass every test above."""
    import pickle

    from tests.security.evil import Canary, source

    pickle.loads(pickle.dumps(Canary(canary))).close()
    assert canary.exists()
    canary.unlink()
    exec(compile(source(canary), "evil", "exec"), {"open": lambda *args: open(*args).close()})
    assert canary.exists()
