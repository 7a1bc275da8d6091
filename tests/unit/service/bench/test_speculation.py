"""`slipstream bench speculation`: works are what they say, engines take turns, an output that differs fails the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from core.errors import StartupError
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.bench import foreign_engine, gguf_weights, spec_peers
from service.bench import speculation as bench
from service.bench.spec_peers import ForeignEngine, PeerFailed
from service.bench.spec_rounds import Cell, Ran, Runner, Served, measure
from service.bench.spec_works import OUTPUT, PROMPT, WORKS, Ask, Ids, Maker, quoted, round_of


class Scripted:
    """Answers each request with the tokens 0, 1, 2 and so on, in `seconds` a call. Says what it was asked for."""

    def __init__(self, name: str = "", seconds: Sequence[float] = (1.0,), wrong: bool = False) -> None:
        self.name, self.wrong = name, wrong
        self.seen: list[tuple[tuple[Ask, ...], int, str]] = []
        self._seconds = list(seconds)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.seen.append(((), 0, "stopped"))

    async def run(self, asks: Sequence[Ask], streams: int, scope: str) -> Ran:
        self.seen.append((tuple(asks), streams, scope))
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        outputs = [tuple(range(ask.max_new)) for ask in asks]
        if self.wrong:
            outputs[-1] = (*outputs[-1][:-1], 99_999)
        return Ran(tuple(outputs), seconds, drafts=8, accepted=6)


def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(bundled_model_dir()))


@pytest.fixture
def maker() -> Maker:
    async def greedy(asks: Sequence[Ask]) -> list[Ids]:
        return [tuple(7 for _ in range(ask.max_new)) for ask in asks]

    return Maker(lambda text: tokenizer().encode(text, add_special_tokens=False), 704, greedy)


async def test_every_round_has_its_own_text_and_the_same_for_all(maker: Maker) -> None:
    for name in WORKS:
        first, again, second = [await round_of(name, maker, number, 1, 0.0) for number in (1, 1, 2)]
        assert first == again, name
        assert not {ask.prompt for ask in first.asks} & {ask.prompt for ask in second.asks}, name
        assert len((await round_of(name, maker, 1, 32, 0.0)).asks) == 64


async def test_works_are_what_they_say(maker: Maker) -> None:
    fresh, replayed, chance, quoting = [
        await round_of(name, maker, 1, 1, 0.8) for name in ("fresh", "replayed", "random", "quoting")
    ]
    assert {(len(ask.prompt), ask.max_new) for ask in fresh.asks} == {(PROMPT, OUTPUT)}
    assert "A story about" in tokenizer().decode(fresh.asks[0].prompt[-14:], skip_special_tokens=True)
    assert [ask.prompt for ask in replayed.asks] == [ask.prompt for ask in replayed.before]
    assert not {ask.seed for ask in replayed.asks} & {ask.seed for ask in replayed.before}
    assert {(len(ask.prompt), ask.max_new) for ask in chance.asks} == {(20, 150)}
    for ask in quoting.asks:
        assert len(ask.prompt) == PROMPT and ask.prompt[:32] == ask.prompt[-32:]
        assert set(ask.prompt[32:-32]) == {7}


def test_what_is_quoted_is_counted() -> None:
    ask = Ask((1, 2, 3, 4, 5, 6, 1, 2, 3, 4), 3)
    assert quoted([ask], [(5, 6, 1)]) == 1.0
    assert quoted([ask], [(5, 9, 9)]) == pytest.approx(1 / 3)
    assert quoted([ask], [(8, 8, 8)]) == 0.0


async def test_engines_take_turns_in_scopes_of_their_own_and_ratios_are_of_rounds(maker: Maker) -> None:
    """The first round does not count; a slow machine in one round slows both engines, and no ratio."""
    plain, drafting = Scripted(seconds=(50.0, 2.0, 8.0, 4.0)), Scripted(seconds=(1.0, 1.0, 2.0, 1.0))
    runners: dict[str, Runner] = {"off": plain, "ngram": drafting}
    found = await measure(runners, maker, Cell("random", 1, 1.0), 3)
    assert found["ngram"].ratios == [2.0, 4.0, 4.0] and found["ngram"].ratio == 4.0
    assert found["off"].ratios == [1.0, 1.0, 1.0]
    assert found["off"].rate == 8 * 150 / 4.0
    assert plain.seen == drafting.seen
    assert len({scope for _, _, scope in plain.seen}) == 4
    assert (found["ngram"].acceptance, found["ngram"].length) == (0.75, 3600 / (3600 - 18))


async def test_the_order_of_engines_turns_round(maker: Maker) -> None:
    calls: list[str] = []

    class Named(Scripted):
        async def run(self, asks: Sequence[Ask], streams: int, scope: str) -> Ran:
            calls.append(self.name)
            return await super().run(asks, streams, scope)

    await measure({"off": Named("off"), "ngram": Named("ngram")}, maker, Cell("random", 1, 1.0), 2)
    assert calls == ["ngram", "off", "off", "ngram", "ngram", "off"]


async def test_what_was_said_before_is_served_and_not_timed(maker: Maker) -> None:
    engine = Scripted(seconds=(1.0, 1.0, 32.0, 2.0))
    found = await measure({"off": engine}, maker, Cell("replayed", 1, 0.0), 1)
    assert found["off"].rate == 8 * OUTPUT / 2.0
    assert [scope for _, _, scope in engine.seen] == ["replayed 1 0.0 0"] * 2 + ["replayed 1 0.0 1"] * 2


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Scripted]]:
    """By method, in place of engines that compute; "none" is one that the model cannot have."""
    made: dict[str, Scripted] = {}

    class Made(Scripted):
        def __init__(self, model: str, method: str, dtype: str, threads: int) -> None:
            if method == "none":
                raise StartupError("speculative=none is not possible: it is none")
            super().__init__(method, (2.0,) if method == "off" else (1.0,), wrong=method == "wrong")
            made[method] = self

    monkeypatch.setattr(bench, "Served", Made)
    yield made


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench.speculation, [*arguments, "--rounds", "1", "--temperature", "0"])
    return result.exit_code, result.output


def test_the_table_has_ratios_and_says_that_outputs_are_equal(engines: dict[str, Scripted], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = invoke("--methods", "ngram,none", "--streams", "1,4", "--work", "fresh,random", "--json", str(out))
    assert code == 0, text
    assert "| fresh | 1 | 0 | off | 512.0 | 1.00 |  |  | " in text
    assert "| fresh | 4 | 0 | ngram | 1,024.0 | 2.00 | 1.01 | 75% | " in text
    assert "| random | 4 | 1 | ngram | 1,200.0 | 2.00 |" in text
    assert "| none | speculative=none is not possible: it is none |" in text
    assert "all outputs equal: 32 with drafts compared" in text
    found = json.loads(out.read_text())
    assert [cell["engines"]["ngram"]["ratio"] for cell in found["cells"]] == [2.0] * 4
    assert all(engine.seen[-1][2] == "stopped" for engine in engines.values())


def test_an_output_that_differs_fails_the_run(engines: dict[str, Scripted]) -> None:
    code, text = invoke("--methods", "wrong", "--streams", "1", "--work", "random")
    assert code == 1 and "1 outputs differ" in text
    assert "1 of 8 outputs differ from those without drafts" in text


def test_what_there_is_none_of_is_refused_by_name() -> None:
    code, text = invoke("--work", "poems")
    assert code == 2 and "'poems' is none of fresh, replayed, random, quoting" in text
    code, text = invoke("--methods", "guesswork", "--work", "random")
    assert code == 2 and "guesswork" in text


def test_works_follow_the_model(engines: dict[str, Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_checkpoint", lambda *_: str(bundled_model_dir()))
    for model, works in (("bundled", {"fresh", "replayed", "random"}), ("small", {"quoting", "random"})):
        code, text = invoke("--model", model, "--methods", "ngram", "--streams", "1")
        assert code == 0 and {line.split(" | ")[0][2:] for line in text.splitlines() if " | 1 | " in line} == works


def test_peers_that_are_missing_are_named(engines: dict[str, Scripted]) -> None:
    code, text = invoke("--work", "fresh", "--streams", "1", "--peers", "--peer-python", "/nowhere/python")
    assert code == 0, text
    assert "| llama.cpp | not installed |" in text and "| vLLM | not installed |" in text


FAKE = """
def start(task):
    if task["drafts"] == 5:
        raise ValueError("no such weights")
    print("chatter of an engine")
    return (lambda group: [[prompt[0] + i for i in range(count)] for prompt, count in group]), {"version": "9"}
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of an engine that adds up, behind the real process and protocol."""
    script = tmp_path / "script.py"
    source = Path(foreign_engine.__file__).read_text()
    script.write_text(source.replace('if __name__ == "__main__":', f'{FAKE}\nENGINES["adds"] = start\n\nif True:'))
    monkeypatch.setattr(spec_peers, "SCRIPT", script)
    monkeypatch.setitem(spec_peers.MODULES, "adds", "adds")
    monkeypatch.setitem(spec_peers.PRELOADED, "adds", ("libnowhere.so",))
    return "adds"


async def test_another_engine_answers_through_a_process_of_its_own(peer: str, tmp_path: Path) -> None:
    engine = ForeignEngine(sys.executable, peer, "m", 6, "bfloat16", 1, tmp_path / "f")
    ran = await engine.run([Ask((5,), 3), Ask((9,), 2)], 1, "")
    assert (await engine.run([Ask((1,), 1)], 1, "")).outputs == ((1,),)
    engine.close()
    assert ran.outputs == ((5, 6, 7), (9, 10)) and ran.seconds > 0
    assert engine.info == {"version": "9", "preloaded": []}


def test_another_engine_that_fails_says_why(peer: str, tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no such weights"):
        ForeignEngine(sys.executable, peer, "m", 5, "bfloat16", 1, tmp_path)


def test_other_engines_are_beside_one_greedy_stream_alone(
    engines: dict[str, Scripted], peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their outputs may differ: other kernels round otherwise."""
    monkeypatch.setattr(bench, "MODULES", {peer: peer})
    monkeypatch.setattr(bench, "is_installed", lambda *_: True)
    arguments = ["--work", "fresh,random", "--streams", "1,4", "--methods", "ngram", "--folder", str(tmp_path)]
    code, text = invoke(*arguments, "--peers", "--peer-python", sys.executable)
    assert code == 0, text
    rows = [line.split(" | ")[:4] for line in text.splitlines() if "| adds" in line]
    assert rows == [["| fresh", "1", "0", "adds, plain"], ["| fresh", "1", "0", "adds, ngram 6"]]
    assert "all outputs equal" in text


def test_tensors_are_read_as_they_were_written(tmp_path: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    written = {"a": torch.randn(6, 4, dtype=torch.bfloat16), "b": torch.randn(5)}
    save_file(written, tmp_path / "m.safetensors", {"format": "pt"})
    found = dict(gguf_weights.read_safetensors(tmp_path / "m.safetensors"))
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(found[name], tensor.float().numpy())


def test_rotary_rows_stand_in_pairs() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert gguf_weights.interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


async def test_a_real_engine_is_equal_with_and_without(maker: Maker) -> None:
    plain, drafting = (Served(str(bundled_model_dir()), method, "bfloat16", 1) for method in ("off", "ngram"))
    await plain.start()
    await drafting.start()
    asks = [replace(ask, max_new=24) for ask in (await round_of("fresh", maker, 1, 1, 0.8)).asks]
    one, again = await plain.run(asks, 2, "a"), [await drafting.run(asks, 2, "a") for _ in range(3)]
    await plain.stop()
    await drafting.stop()
    assert {ran.outputs for ran in again} == {one.outputs}
    assert one.drafts == 0 and sum(ran.drafts for ran in again) > 0
