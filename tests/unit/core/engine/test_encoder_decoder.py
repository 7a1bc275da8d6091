"""What an encoder-decoder changes at the engine's door, and what must not leave the encoder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ScheduleBatch
from core.errors import InvalidRequest, ModelLoadError
from core.executor.launched_step import LaunchedStep
from core.executor.step import StepRunner
from core.models.encoder_decoder.model import EncoderDecoder
from core.types.io import EmbedRequest
from service.client import CallFailed, Chunk, SlipstreamClient
from tests.proofs.equivalence.encoder_oracle import Seq2SeqOracle, make_inputs
from tests.proofs.equivalence.test_encoder_decoder_grpc import ENCODER_TOKENS, PAGE, pools, serve
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE
from tests.support.encoder_decoders import LANGUAGE_ID, MAX_INPUT, make_encoder_decoder
from tests.support.servers import serve_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
BUDGET = 64


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_decoder("bart", tmp_path_factory.mktemp("bart"))


@pytest.fixture(scope="module")
def mbart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder_decoder("mbart", tmp_path_factory.mktemp("mbart"))


async def output(client: SlipstreamClient, prompt: Any, **options: Any) -> tuple[int, ...]:
    (found,) = await client.complete(prompt, **(GREEDY | options))
    return found.token_ids


@pytest.mark.parametrize("overlap", [True, False])
async def test_encoder_ids_never_reach_the_decoder(bart: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs hold ids from 200 on, outputs none of those; then every id says where it came from."""
    decoder: list[torch.Tensor] = []
    encoder: list[torch.Tensor] = []
    steps: list[tuple[int, int, int]] = []
    launch, forward = StepRunner.launch, EncoderDecoder.forward

    def spy_launch(self: StepRunner, batch: ScheduleBatch, *rest: Any) -> LaunchedStep:
        if batch.num_extend:
            assert batch.staging.prefill_ids_cpu is not None
            decoder.append(batch.staging.prefill_ids_cpu.clone())
        if len(batch.encoder_lens):
            assert batch.staging.encoder_ids_cpu is not None
            encoder.append(batch.staging.encoder_ids_cpu.clone())
        prefilled = int(batch.extend_lens[: batch.num_extend].sum())
        steps.append((len(batch.encoder_lens), batch.num_extend, prefilled + int(batch.encoder_lens.sum())))
        return launch(self, batch, *rest)

    def spy_forward(self: EncoderDecoder, batch: ForwardBatch) -> torch.Tensor:
        decoder.append(batch.input_ids.clone())
        if batch.encoder_ids is not None:
            encoder.append(batch.encoder_ids.clone())
        return forward(self, batch)

    inputs = [tuple(200 + token % 120 for token in ids) for ids in make_inputs(16, 200, seed=3)]
    silent = dict.fromkeys(range(200, VOCAB_SIZE), -100.0)
    async with serve(bart, overlap=overlap) as (server, client):
        # Not earlier: the check at load forwards ids of its own.
        monkeypatch.setattr(StepRunner, "launch", spy_launch)
        monkeypatch.setattr(EncoderDecoder, "forward", spy_forward)
        outputs = await asyncio.gather(*(output(client, ids, logit_bias=silent) for ids in inputs))
        assert server.engine.stats.preemptions > 0, "nobody was encoded again"
    assert len(set(outputs)) > 4 and all(len(ids) == 16 for ids in outputs)
    assert max(int(ids.max()) for ids in decoder) < 200
    assert min(int(ids.min()) for ids in encoder) >= 200
    # Once per admission: staged and forwarded, for each input and for each retraction.
    assert sum(count for count, _, _ in steps) == len(inputs) + server.engine.stats.preemptions
    for inputs_encoded, segments, tokens in steps:
        assert tokens <= BUDGET or inputs_encoded == segments == 1, "an input that fills a step shared it"
    assert any(tokens > BUDGET for _, _, tokens in steps)


async def test_an_aborted_request_gives_its_cross_pages_back(bart: Path) -> None:
    """Streams are ended in the middle of their outputs; who waited for their pages then says what the oracle says."""
    (late,) = Seq2SeqOracle(bart).examples([tuple(range(100, 196))])
    async with serve(bart, max_total_tokens=2048) as (server, client):

        async def start(name: str, length: int) -> None:
            options: dict[str, Any] = {"max_tokens": 250, "temperature": 0.0, "ignore_eos": True}
            stream = client.generate(list(range(3, 3 + length)), request_id=name, **options)
            async for event in stream:
                if isinstance(event, Chunk):
                    seen.add(name)
                    running.set()
                else:
                    assert event.reason == "cancelled"

        seen: set[str] = set()
        running = asyncio.Event()
        async with asyncio.TaskGroup() as streams:
            for number in range(4):
                streams.create_task(start(f"r{number}", 120))
            while len(seen) < 4:
                await running.wait()
                running.clear()
            held = pools(server)["cross_page"].used
            waiting = streams.create_task(output(client, late.prompt))
            while not server.engine.stats.waiting:
                await asyncio.sleep(0)
            for number in range(4):
                assert await client.abort(f"r{number}")
        assert held == 4 * 120 // PAGE and held + 96 // PAGE > ENCODER_TOKENS // PAGE
        assert waiting.result() == late.output
        assert all(pool.used == 0 for pool in pools(server).values())


async def test_an_input_that_cannot_be_served_is_refused_by_field(bart: Path) -> None:
    async with serve(bart, encoder_tokens=160) as (_, client):

        async def refusal(prompt: Any) -> dict[str, str]:
            with pytest.raises(CallFailed) as failed:
                # An input that passes by mistake waits for room for ever.
                await output(client, prompt, timeout=10)
            assert failed.value.code.name == "INVALID_ARGUMENT"
            return failed.value.fields

        (found,) = (await refusal([5] * (MAX_INPUT + 1))).items()
        assert found[0] == "token_ids.ids" and str(MAX_INPUT) in found[1]
        assert await refusal([5] * 161) == {
            "token_ids.ids": "has 161 tokens, more than the server can hold for the encoder"
        }
        assert list(await refusal("!?" * 100)) == ["text"]
        assert list(await refusal("!?" * MAX_INPUT)) == ["text"]
        assert list(await refusal([VOCAB_SIZE])) == ["token_ids.ids[0]"]
        with pytest.raises(CallFailed) as failed:
            await output(client, [5], max_tokens=MAX_INPUT)
        assert list(failed.value.fields) == ["sampling_params.max_tokens"]
        assert len(await output(client, [5] * 160)) == 16


async def test_penalties_see_the_decoders_tokens_only(mbart: Path) -> None:
    inputs = make_inputs(12, 40, seed=5)
    examples = Seq2SeqOracle(mbart).examples(inputs, repetition_penalty=1.8)
    plain = {example.prompt: example.output for example in Seq2SeqOracle(mbart).examples(inputs)}
    assert len(examples) > 8 and any(plain.get(e.prompt, e.output) != e.output for e in examples)
    async with serve(mbart) as (_, client):
        for example in examples:
            assert await output(client, example.prompt, repetition_penalty=1.8) == example.output


async def test_forced_tokens_come_first_and_last_whatever_is_asked(mbart: Path) -> None:
    async with serve(mbart) as (_, client):
        for length in (1, 2, 3):
            (example,) = Seq2SeqOracle(mbart).examples([(9, 8, 7)], max_new_tokens=length)
            assert await output(client, [9, 8, 7], max_tokens=length) == example.output
        wild: dict[str, Any] = {"temperature": 5.0, "logit_bias": {LANGUAGE_ID: -100.0}, "min_tokens": 8, "seed": 1}
        (found,) = await client.complete([9, 8, 7], **wild, max_tokens=8, presence_penalty=2.0, repetition_penalty=2.0)
        assert (found.token_ids[0], found.token_ids[-1], len(found.token_ids)) == (LANGUAGE_ID, EOS_ID, 8)
        assert (found.end.reason, found.end.matched_stop) == ("stop", EOS_ID)


async def test_tokens_that_generate_suppresses_are_never_said(tmp_path: Path) -> None:
    """As Marian's padding is, by `bad_words_ids`; not even for who asks for them."""
    inputs = make_inputs(4, 30, seed=7)
    plain = Seq2SeqOracle(make_encoder_decoder("marian", tmp_path / "plain")).examples(inputs)
    bad = sorted({example.output[0] for example in plain} - {EOS_ID})
    made = make_encoder_decoder("marian", tmp_path / "bad", generation={"bad_words_ids": [[token] for token in bad]})
    examples = Seq2SeqOracle(made).examples(inputs)
    assert bad and examples
    async with serve(made) as (_, client):
        for example in examples:
            assert await output(client, example.prompt) == example.output
            asked = await output(client, example.prompt, logit_bias=dict.fromkeys(bad, 100.0))
            assert not {*asked, *example.output} & {*bad}


async def test_text_is_the_encoders_input_and_samples_share_nothing(bart: Path) -> None:
    text = "the quick brown fox"
    async with serve(bart) as (server, client):
        ids = await client.tokenize(text)
        found = await client.complete(text, n=3, **GREEDY)
        again = await client.complete(ids, **GREEDY)
        info = await client.model_info()
        assert {each.token_ids for each in found} == {again[0].token_ids}
        assert [each.end.prompt_tokens for each in found] == [len(ids)] * 3
        assert [each.end.cached_tokens for each in (*found, *again)] == [0] * 4
        assert found[0].text == await client.detokenize(found[0].token_ids)
        assert (info.context_length, info.max_input_length) == (MAX_INPUT, MAX_INPUT)
        with pytest.raises(InvalidRequest, match="no hidden states"):
            await server.engine.embed(EmbedRequest(inputs=(text,)))


async def test_adapters_stop_the_start(bart: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="adapters of encoder-decoders are not supported"):
        async with serve_checkpoint(bart, lora_dir=str(tmp_path)):
            raise AssertionError("it started")
