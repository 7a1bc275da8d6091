"""Every field of Classify and Score at its edges; part of the table of `edges`. The served model has labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.duration_pb2 import Duration

from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.security.edges import CONTEXT, INT32, PROMPT, STRINGS, VOCAB, Edge, adapted

LABEL_TOKENS = "y,n"
"""What the served model answers with, for it to have labels."""

MOST_CHARS = 4_194_304
Make = Callable[..., Edge]


def classify(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """A Classify call of one short text, with these fields of the request replaced."""
    fields.setdefault("inputs", [pb.ClassifyInput(text=PROMPT)])
    return Edge("Classify", name, pb.ClassifyRequest(**fields), refused)


def score(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """A Score call of one short document, with these fields of the request replaced."""
    return Edge("Score", name, pb.ScoreRequest(**({"query": PROMPT, "documents": [PROMPT]} | fields)), refused)


def judgements() -> Iterator[Edge]:
    """Both calls: their own fields, then those that they share with Generate."""
    yield from _inputs()
    yield from _pairs()
    yield from _truncated()
    yield from _documents()
    yield from _shared(classify)
    yield from _shared(score)


def _inputs() -> Iterator[Edge]:
    fine = pb.ClassifyInput(text="a")
    for count in (0, 1, 127, 128, 129, 10_000):
        yield classify(f"{count} inputs", None if 1 <= count <= 128 else "inputs", inputs=[fine] * count)
    yield classify("an input of nothing", "inputs[1].input", inputs=[fine, pb.ClassifyInput()])
    yield classify("an empty text", "inputs[1].text", inputs=[fine, pb.ClassifyInput(text="")])
    for length in (0, 1, CONTEXT - 1, CONTEXT, 1_000_000):
        named = None if 1 <= length < CONTEXT else "inputs[0].token_ids.ids"
        yield classify(f"{length} ids", named, inputs=[pb.ClassifyInput(token_ids=pb.TokenIds(ids=[5] * length))])
    for token in (*INT32, -1, 0, VOCAB - 1, VOCAB):
        named = None if 0 <= token < VOCAB else "inputs[0].token_ids.ids[1]"
        yield classify(f"id {token}", named, inputs=[pb.ClassifyInput(token_ids=pb.TokenIds(ids=[5, token]))])
    for length in (CONTEXT * 8, CONTEXT * 64 + 1, 3_000_000):
        yield classify(f"{length} characters", "inputs[0].text", inputs=[pb.ClassifyInput(text="z" * length)])


def _truncated() -> Iterator[Edge]:
    """A first text is not cut: nothing of a pair would be left to judge."""
    for length in (CONTEXT, CONTEXT * 65, 1_000_000):
        inputs = [pb.ClassifyInput(text="z" * length), pair_of("a", "z" * length)]
        yield classify(f"texts of {length}, cut", inputs=inputs, truncate=True)
        yield score(f"documents of {length}, cut", documents=["a", "z" * length], truncate=True)
        yield classify(
            f"a first text of {length}, cut", "inputs[0].pair", inputs=[pair_of("z" * length, "a")], truncate=True
        )
    yield score(f"a query of {CONTEXT}, cut", "documents[0]", query="z" * CONTEXT, truncate=True)


def pair_of(first: str, second: str) -> pb.ClassifyInput:
    """An input of two texts."""
    return pb.ClassifyInput(pair=pb.TextPair(first=first, second=second))


def _pairs() -> Iterator[Edge]:
    for first, second, wrong in (("a", "b", None), ("", "b", "first"), ("a", "", "second"), ("", "", "first")):
        pair = pair_of(first, second)
        yield classify(f"a pair of {first!r} and {second!r}", wrong and f"inputs[0].pair.{wrong}", inputs=[pair])
    for length in (CONTEXT * 8, CONTEXT * 64 + 1, 1_500_000):
        pair = pair_of("z" * length, "z" * length)
        yield classify(f"a pair of twice {length}", "inputs[0].pair", inputs=[pair])
    for name, text in STRINGS.items():
        pair = pair_of(text, text)
        yield classify(f"a pair of {name}", inputs=[pair, pb.ClassifyInput(text=text)])


def _documents() -> Iterator[Edge]:
    for count in (0, 1, 127, 128, 129, 10_000):
        yield score(f"{count} documents", None if 1 <= count <= 128 else "documents", documents=["a"] * count)
    yield score("an empty document", "documents[1]", documents=["a", ""])
    yield score("no query", "query", query="")
    for length in (CONTEXT * 8, CONTEXT * 63):
        yield score(f"a query of {length}", "documents[0]", query="z" * length)
        yield score(f"a document of {length}", "documents[1]", documents=["a", "z" * length])
    for length in (CONTEXT * 64 + 1, 3_000_000):
        yield score(f"a query of {length}", "query", query="z" * length)
    yield score("a long query in front of many", "documents", query="z" * (MOST_CHARS // 128), documents=["a"] * 128)
    for top in (*INT32, -1, 0, 1, 2):
        yield score(f"top_n={top}", None if top >= 1 else "top_n", top_n=top)
    for name, text in STRINGS.items():
        yield score(f"a query and a document of {name}", query=text, documents=["a", text])


def _shared(call: Make) -> Iterator[Edge]:
    for name, text in STRINGS.items():
        yield call(f"a salt of {name}", cache_salt=text[:256])
        yield adapted(f"an adapter called {name}", text, call)
        yield call(f"an id of {name}", "request_id", request_id=text)
    for value in (False, True):
        yield call(f"raw_scores={value}", raw_scores=value)
    for value in (*INT32, 0):
        yield call(f"priority={value}", priority=value)
    for length in (0, 1, 128, 129):
        yield call(f"an id of {length}", "request_id" if length > 128 else None, request_id="x" * length)
    for length in (256, 257, 100_000):
        yield call(f"a salt of {length}", "cache_salt" if length > 256 else None, cache_salt="x" * length)
    for nanos in (1_000_000_000, 0, -1):
        yield call(f"waits {nanos}ns", "queue_timeout", queue_timeout=Duration(nanos=nanos))
    yield call("waits a second", queue_timeout=Duration(seconds=1))
