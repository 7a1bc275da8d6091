"""Log probabilities of chosen ids, from a real model through gRPC: those that the alternatives name are the same."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from core.models.bundled import bundled_model_dir
from service.cli.cli import cli
from service.client import Chunk, SlipstreamClient
from tests.support.servers import serve_checkpoint

PROMPT = "27+45="
IDS = [500, 3, 41, 41, 0]
TOKENS = 7


async def told(client: SlipstreamClient, **sampling: object) -> list[Chunk]:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, "logprobs": True}
    return [event async for event in client.generate(PROMPT, **options, **sampling) if isinstance(event, Chunk)]


@pytest.mark.parametrize("settings", [{}, {"speculative": "ngram"}, {"frontends": 0, "overlap": False}], ids=str)
async def test_they_are_those_of_the_alternatives(settings: dict[str, object]) -> None:
    async with serve_checkpoint(bundled_model_dir(), **settings) as (_, client):
        ranked = await told(client, top_logprobs=64)
        best = [top[0][0] for chunk in ranked for _, _, top in chunk.logprobs]
        chosen = await told(client, logprob_token_ids=[*best, *IDS])
        alone = await told(client, logprob_token_ids=[7])
    expected = [dict(top) for chunk in ranked for _, _, top in chunk.logprobs]
    found = [values for chunk in chosen for values in chunk.chosen_logprobs]
    assert len(found) == len(expected) == TOKENS and all(len(values) == TOKENS + len(IDS) for values in found)
    for place, (values, top) in enumerate(zip(found, expected, strict=True)):
        assert values[place] == pytest.approx(top[best[place]], abs=1e-4)
        for token, value in zip([*best, *IDS], values, strict=True):
            if token in top:
                assert value == pytest.approx(top[token], abs=1e-4), (place, token)
            else:
                assert value <= min(top.values()) + 1e-4, (place, token)
        assert values[-2] == values[-3], "one id twice"
    assert [len(values) for chunk in alone for values in chunk.chosen_logprobs] == [1] * TOKENS


def test_the_command_prints_those_of_the_prompt() -> None:
    done = CliRunner().invoke(cli, ["generate", "--native", "off", "--max-tokens", "1", "--prompt-logprobs", PROMPT])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith("prompt ")]
    assert [line.split()[1] for line in lines] == [f"{place}:" for place in range(1, len(lines) + 1)] and len(lines) > 2
    assert all(float(line.rpartition(":")[2]) < 0 for line in lines)


def test_the_command_prints_them() -> None:
    asked = ["generate", "--native", "off", "--temperature", "0", "--max-tokens", "2"]
    done = CliRunner().invoke(cli, [*asked, "--token-logprob", "41", "--token-logprob", "3", PROMPT])
    assert done.exit_code == 0, done.output
    text, *lines = done.output.strip().splitlines()[-3:]
    assert text.startswith("72") and [line.split()[0] for line in lines] == ["0:", "1:"]
    assert all([pair.partition(":")[0] for pair in line.split()[1:]] == ["41", "3"] for line in lines)


def test_the_command_prints_no_more_than_it_is_asked_for() -> None:
    done = CliRunner().invoke(cli, ["generate", "--native", "off", "--max-tokens", "1", "--prompt-top", "0", PROMPT])
    lines = [line.split() for line in done.output.splitlines() if line.startswith("prompt ")]
    assert len(lines) > 2 and all(len(line) == 3 for line in lines)


def test_the_command_prints_what_was_likely_in_the_prompt() -> None:
    done = CliRunner().invoke(cli, ["generate", "--native", "off", "--max-tokens", "1", "--prompt-top", "2", PROMPT])
    assert done.exit_code == 0, done.output
    lines = [line.split()[2:] for line in done.output.splitlines() if line.startswith("prompt ")]
    assert len(lines) > 2
    for own, *best in lines:
        values = [float(each.strip("()").partition(":")[2]) for each in best]
        assert len(best) == 2 and values == sorted(values, reverse=True)
        assert float(own.partition(":")[2]) <= values[0]
