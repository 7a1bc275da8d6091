"""Every field of every request at its edges, with what the documented range says must happen.

The ranges are written here a second time, from the comments of the proto file and not from the code, so that a check
that is lost there is missed here.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from service.pb.slipstream.v1 import inference_pb2 as pb

VOCAB = 320
CONTEXT = 1024
PROMPT = "hi"
PROMPT_TOKENS = 2
ROOM = CONTEXT - PROMPT_TOKENS
INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
TINY = sys.float_info.min * sys.float_info.epsilon


@dataclass(frozen=True)
class Edge:
    """One request; `refused` is the field that must be named, None if it must be served.

    An `absent` one is in range and names what the server does not have, so it must be NOT_FOUND.
    """

    method: str
    name: str
    message: Any
    refused: str | None = None
    absent: bool = False


def all_edges() -> list[Edge]:
    """The whole table."""
    from tests.security.attach_edges import attaches
    from tests.security.chat_edges import chats
    from tests.security.constraint_edges import constraints
    from tests.security.judge_edges import judgements

    mine = [*numbers(), *switches(), *lists(), *biases(), *texts(), *prompts(), *waits(), *others(), *embeddings()]
    return [*mine, *attaches(), *chats(), *constraints(), *judgements()]


def generate(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """A Generate call of a two-token prompt, with these fields of the request replaced."""
    if not fields.keys() & {"text", "token_ids", "chat", "audio"}:
        fields["text"] = PROMPT
    return Edge("Generate", name, pb.GenerateRequest(**fields), refused)


def sampled(name: str, refused: str | None = None, /, **params: Any) -> Edge:
    """A Generate call with these sampling parameters, and a token or two of output unless they say otherwise."""
    params.setdefault("max_tokens", 2)
    return generate(name, refused and f"sampling_params.{refused}", sampling_params=pb.SamplingParams(**params))


DOUBLES: dict[str, tuple[float, float, bool]] = {
    # name: lowest, highest, whether the lowest itself is allowed
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
}

INTS: dict[str, tuple[int, int, tuple[int, int]]] = {
    "top_k": (0, INT32[1], INT32),
    "max_tokens": (1, ROOM, INT32),
    "min_tokens": (0, 2, INT32),
    "seed": (0, INT64[1], INT64),
    "n": (1, 64, INT32),
    "top_logprobs": (0, 64, INT32),
    "prompt_logprobs": (0, 20, INT32),
}


def numbers() -> Iterator[Edge]:
    """Scalars: below, at and above each bound, at the ends of the type, and what is no number."""
    for name, (low, high, closed) in DOUBLES.items():
        wide = (math.nan, -math.nan, math.inf, -math.inf, 1e308, -1e308, 3.5e38, -3.5e38, 1e-45, -1e-45)
        near = (TINY, -TINY, 0.0, -0.0, 1e-38, 1e-7, 0.5, 1.0, 2.0, -1.0)
        at = (low, high, math.nextafter(low, -math.inf), math.nextafter(low, math.inf))
        past = (math.nextafter(high, -math.inf), math.nextafter(high, math.inf), high + 1, low - 1)
        for value in dict.fromkeys((*wide, *near, *at, *past)):
            fine = (low <= value <= high) and (closed or value > low)
            yield sampled(f"{name}={value!r}", None if fine else name, **{name: value})
            if fine and name != "temperature":
                yield sampled(f"{name}={value!r}, greedy", **{name: value, "temperature": 0.0})
    for name, (first, last, kind) in INTS.items():
        extra = {"logprobs": True} if name == "top_logprobs" else {}
        edges = (first - 1, first, first + 1, last - 1, last, last + 1, *kind, -1, 0, 1, 2, 3, 1000)
        for value in sorted({each for each in edges if kind[0] <= each <= kind[1]}):
            yield sampled(f"{name}={value}", None if first <= value <= last else name, **{name: value}, **extra)
    for value in (*INT32, -1, 0, 1):
        yield generate(f"priority={value}", priority=value, sampling_params=pb.SamplingParams(max_tokens=1))


def switches() -> Iterator[Edge]:
    """Booleans, alone and where two of them have to agree."""
    for name in ("ignore_eos", "logprobs", "skip_special_tokens", "include_stop_in_output"):
        for value in (False, True):
            yield sampled(f"{name}={value}", **{name: value})
    yield sampled("alternatives without logprobs", "top_logprobs", top_logprobs=1)
    yield sampled("alternatives with logprobs off", "top_logprobs", top_logprobs=1, logprobs=False)
    for value in (False, True):
        yield generate(f"text={value}", output_options=pb.OutputOptions(text=value), **short())
        yield generate(f"both logprobs={value}", **both(value, value))
    yield generate("logprobs differ", "output_options.logprobs", **both(True, False))
    differing = {**both(True, True, 3), "output_options": pb.OutputOptions(logprobs=True, top_logprobs=4)}
    yield generate("alternatives differ", "output_options.top_logprobs", **differing)
    yield sampled("at least more than at most", "min_tokens", min_tokens=3, max_tokens=2)


def short() -> dict[str, Any]:
    """The fields of a request for one token."""
    return {"sampling_params": pb.SamplingParams(max_tokens=1)}


def both(sampling: bool, options: bool, top: int = 0) -> dict[str, Any]:
    """Log probabilities asked for in both places."""
    return {
        "sampling_params": pb.SamplingParams(max_tokens=1, logprobs=sampling, top_logprobs=top),
        "output_options": pb.OutputOptions(logprobs=options),
    }


def lists() -> Iterator[Edge]:
    """Stop strings, stop ids and ids to be told of: how many, how long, and what is in them."""
    for count in (0, 1, 15, 16, 17, 1000):
        yield sampled(f"{count} stops", "stop" if count > 16 else None, stop=[f"stop {i}" for i in range(count)])
    for length in (0, 1, 2, 255, 256, 257, 100_000):
        fine = 1 <= length <= 256
        yield sampled(f"a stop of {length}", None if fine else "stop[0]", stop=["x" * length])
    yield sampled("the second stop is empty", "stop[1]", stop=["a", ""])
    for name, text in STRINGS.items():
        yield sampled(f"a stop of {name}", stop=[text[:256]])
    yield sampled("equal stops", stop=["a"] * 16)
    for count in (0, 1, 63, 64, 65, 5000):
        over = "stop_token_ids" if count > 64 else None
        yield sampled(f"{count} stop ids", over, stop_token_ids=[i % VOCAB for i in range(count)])
    for token in (*INT32, -1, 0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, 1 << 20):
        fine = 0 <= token < VOCAB
        yield sampled(f"stop id {token}", None if fine else "stop_token_ids[0]", stop_token_ids=[token])
        over = None if fine else "logprob_token_ids[0]"
        yield sampled(f"log probability of id {token}", over, logprobs=True, logprob_token_ids=[token])
    for count in (0, 1, 1023, 1024, 1025, 5000):
        over = "logprob_token_ids" if count > 1024 else None
        told = {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [i % VOCAB for i in range(count)]}
        yield sampled(f"log probabilities of {count} ids", over, **told)
    yield sampled("ids without log probabilities", "logprob_token_ids", logprob_token_ids=[1])


def biases() -> Iterator[Edge]:
    """Biases: how many, on which ids, how strong."""
    for count in (0, 1, VOCAB):
        yield sampled(f"{count} biases", logit_bias=dict.fromkeys(range(count), 1.0))
    for count in (1024, 1025, 20_000):
        named = "logit_bias" if count > 1024 else f"logit_bias[{VOCAB}]"
        yield sampled(f"{count} biases, most outside", named, logit_bias=dict.fromkeys(range(count), 1.0))
    for token in (*INT32, -1, 0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, 1 << 20):
        fine = 0 <= token < VOCAB
        yield sampled(f"bias on {token}", None if fine else f"logit_bias[{token}]", logit_bias={token: 1.0})
    for bias in (math.nan, math.inf, -math.inf, -100.0, 100.0, -0.0, TINY, 1e308, math.nextafter(100, 101), -100.1):
        fine = -100 <= bias <= 100
        yield sampled(f"bias of {bias!r}", None if fine else "logit_bias[5]", logit_bias={5: bias})
    for bias in (-100.0, 100.0):
        yield sampled(f"all biased by {bias}", logit_bias=dict.fromkeys(range(VOCAB), bias))


STRINGS: dict[str, str] = {
    "a NUL": "\0",
    "NULs": "a\0b" * 50,
    "control characters": "".join(map(chr, range(1, 32))),
    "delete": "\x7f",
    "a byte order mark": "\ufeff",
    "a replacement character": "\ufffd",
    "a non-character": "\uffff",
    "the last code point": "\U0010ffff",
    "private use": "\ue000",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "right to left": "\u202eabc\u202c",
    "combining marks": "e" + "\u0301" * 100,
    "zero widths": "\u200b" * 50,
    "line ends": "\r\n\u2028\u2029\x85",
    "blanks": " " * 200,
    "a path": "../../../../etc/passwd",
    "a template": "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}",
    "a format": "%s%n{0.__class__}",
    "special tokens": "<|bos|><|eos|><|pad|>",
    "half a special token": "<|eo",
    "quotes": "\"'`\\",
}


def texts() -> Iterator[Edge]:
    """Every string field, with strings that programs stumble over."""
    for name, text in STRINGS.items():
        yield generate(f"a prompt of {name}", text=text, **short())
        yield generate(f"a turn of {name}", chat=chat(("user", text)), **short())
        yield generate(f"a salt of {name}", cache_salt=text[:256], **short())
        yield adapted(f"an adapter called {name}", text)
        yield generate(f"an id of {name}", "request_id", request_id=text, **short())
        yield Edge("Tokenize", f"text of {name}", pb.TokenizeRequest(text=text))
        yield Edge("Abort", f"id of {name}", pb.AbortRequest(request_id=text))
    for length in (1, 64):
        yield generate(f"a role of {length}", chat=chat(("r" * length, "a")), **short())
    for length in (0, 65, 100_000):
        yield generate(f"a role of {length}", "chat.messages[0].role", chat=chat(("r" * length, "a")), **short())
    for length in (1, 128):
        yield generate(f"an id of {length}", request_id="x" * length, **short())
    for length in (129, 100_000):
        yield generate(f"an id of {length}", "request_id", request_id="x" * length, **short())
    for length in (0, 256):
        yield generate(f"a salt of {length}", cache_salt="x" * length, **short())
    yield generate("no adapter", adapter="", **short())
    for length in (1, 128, 129, 100_000):
        yield adapted(f"an adapter's name of {length}", "x" * length)
    for length in (257, 100_000):
        yield generate(f"a salt of {length}", "cache_salt", cache_salt="x" * length, **short())


def adapted(name: str, adapter: str, call: Callable[..., Edge] | None = None) -> Edge:
    """A call, of Generate if nothing else is said, with an adapter that nobody has loaded."""
    fine = re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", adapter) is not None
    named = None if fine else "adapter"
    edge = call(name, named, adapter=adapter) if call else generate(name, named, adapter=adapter, **short())
    return dataclasses.replace(edge, absent=fine)


def chat(*turns: tuple[str, str]) -> pb.Chat:
    """A conversation."""
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


def prompts() -> Iterator[Edge]:
    """Prompts by length: nothing, one token, around a page, around the context, far beyond it."""
    yield generate("no text", "text", text="")
    yield generate("no ids", "token_ids.ids", token_ids=pb.TokenIds())
    yield generate("no turns", "chat.messages", chat=pb.Chat())
    yield Edge("Generate", "no input", pb.GenerateRequest(), "input")
    yield generate("an empty turn", chat=chat(("user", "")), **short())
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, CONTEXT - 2, CONTEXT - 1):
        yield generate(f"{length} ids", token_ids=pb.TokenIds(ids=[5] * length), **short())
    for length in (CONTEXT, CONTEXT + 1, 2 * CONTEXT, 100_000, 1_000_000):
        yield generate(f"{length} ids", "token_ids.ids", token_ids=pb.TokenIds(ids=[5] * length), **short())
    for length in (CONTEXT * 8, CONTEXT * 64, CONTEXT * 64 + 1, 3_000_000):
        yield generate(f"{length} characters", "text", text="z" * length, **short())
    yield generate("a long turn", "chat.messages", chat=chat(("user", "z" * 20_000)), **short())
    yield generate("many turns", "chat.messages", chat=chat(*[("user", "z")] * 1000), **short())
    fills = pb.SamplingParams(max_tokens=ROOM + 1)
    yield generate("output past the context", "sampling_params.max_tokens", sampling_params=fills)


def waits() -> Iterator[Edge]:
    """Queue timeouts as durations can be written."""
    good = ((0, 1), (1, 0), (0, 999_999_999), (315_576_000_000, 0))
    bad = ((0, 0), (-1, 0), (0, -1), (1, -1), (-1, 1), (0, 10**9), (315_576_000_001, 0), (INT64[1], 0), (INT64[0], 0))
    for seconds, nanos in good[1:]:
        yield generate(f"waits {seconds}s {nanos}ns", queue_timeout=Duration(seconds=seconds, nanos=nanos), **short())
    for seconds, nanos in (*bad, (0, INT32[1]), (0, INT32[0])):
        wait = Duration(seconds=seconds, nanos=nanos)
        yield generate(f"waits {seconds}s {nanos}ns", "queue_timeout", queue_timeout=wait, **short())


def others() -> Iterator[Edge]:
    """The unary calls."""
    for length in (0, 1, CONTEXT, CONTEXT * 64):
        yield Edge("Tokenize", f"{length} characters", pb.TokenizeRequest(text="z" * length))
    for length in (CONTEXT * 64 + 1, 4_000_000):
        yield Edge("Tokenize", f"{length} characters", pb.TokenizeRequest(text="z" * length), "text")
    for value in (False, True):
        yield Edge("Tokenize", f"special={value}", pb.TokenizeRequest(text="z", add_special_tokens=value))
        yield Edge("Detokenize", f"skip={value}", pb.DetokenizeRequest(token_ids=[0, 1, 2], skip_special_tokens=value))
    for length in (0, 1, CONTEXT, 65_536):
        yield Edge("Detokenize", f"{length} ids", pb.DetokenizeRequest(token_ids=[5] * length))
    for length in (65_537, 1_000_000, 4_000_000):
        yield Edge("Detokenize", f"{length} ids", pb.DetokenizeRequest(token_ids=[5] * length), "token_ids")
    for token in (*INT32, -1, VOCAB, VOCAB + 1):
        yield Edge("Detokenize", f"id {token}", pb.DetokenizeRequest(token_ids=[5, token]), "token_ids[1]")
    yield Edge("Abort", "no id", pb.AbortRequest(), "request_id")
    for length in (1, 128, 129, 1_000_000):
        yield Edge("Abort", f"an id of {length}", pb.AbortRequest(request_id="x" * length))
    for method in ("GetModelInfo", "GetServerInfo", "GetLoad"):
        yield Edge(method, "empty", getattr(pb, f"{method}Request")())


HIDDEN = 64


def embed(name: str, refused: str | None = None, /, **fields: Any) -> Edge:
    """An Embed call of one short text, with these fields of the request replaced."""
    fields.setdefault("inputs", [pb.EmbedInput(text=PROMPT)])
    return Edge("Embed", name, pb.EmbedRequest(**fields), refused)


def embeddings() -> Iterator[Edge]:
    """Every field of Embed: inputs by count, form and length, then what it shares with Generate."""
    for count in (0, 1, 2, 127, 128, 129, 10_000):
        fine = 1 <= count <= 128
        yield embed(f"{count} inputs", None if fine else "inputs", inputs=[pb.EmbedInput(text="a")] * count)
    fine_input = pb.EmbedInput(text="a")
    yield embed("an input of nothing", "inputs[1].input", inputs=[fine_input, pb.EmbedInput()])
    yield embed("an empty text", "inputs[1].text", inputs=[fine_input, pb.EmbedInput(text="")])
    for length in (0, 1, 16, 17, CONTEXT - 1, CONTEXT, 1_000_000):
        named = None if 1 <= length < CONTEXT else "inputs[0].token_ids.ids"
        yield embed(f"{length} ids", named, inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5] * length))])
    yield embed("many ids in all", "inputs", inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5] * 1023))] * 129)
    yield embed("most ids in all", inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5] * 1023))] * 128)
    for token in (*INT32, -1, 0, VOCAB - 1, VOCAB):
        named = None if 0 <= token < VOCAB else "inputs[0].token_ids.ids[1]"
        yield embed(f"id {token}", named, inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=[5, token]))])
    for length in (CONTEXT * 8, CONTEXT * 64, CONTEXT * 64 + 1, 3_000_000):
        yield embed(f"{length} characters", "inputs[0].text", inputs=[pb.EmbedInput(text="z" * length)])
    for name, text in STRINGS.items():
        yield embed(f"an input of {name}", inputs=[pb.EmbedInput(text=text)])
        yield embed(f"a salt of {name}", cache_salt=text[:256])
        yield adapted(f"an adapter called {name}", text, embed)
        yield embed(f"an id of {name}", "request_id", request_id=text)
    for pooling in (*INT32, -1, 0, 1, 2, 3, 4):
        yield embed(f"pooling {pooling}", None if 0 <= pooling <= 3 else "pooling", pooling=pooling)
    for value in (False, True):
        yield embed(f"normalize={value}", normalize=value)
        long = [pb.EmbedInput(text="z" * CONTEXT), pb.EmbedInput(token_ids=pb.TokenIds(ids=[5] * CONTEXT))]
        yield embed(f"truncate={value}", None if value else "inputs[1].token_ids.ids", inputs=long, truncate=value)
    for dimensions in (*INT32, -1, 0, 1, HIDDEN - 1, HIDDEN, HIDDEN + 1):
        yield embed(
            f"dimensions={dimensions}", None if 1 <= dimensions <= HIDDEN else "dimensions", dimensions=dimensions
        )
    for value in (*INT32, 0):
        yield embed(f"priority={value}", priority=value)
    for length in (0, 1, 128, 129):
        yield embed(f"an id of {length}", "request_id" if length > 128 else None, request_id="x" * length)
    for length in (256, 257, 100_000):
        yield embed(f"a salt of {length}", "cache_salt" if length > 256 else None, cache_salt="x" * length)
    for nanos in (1_000_000_000, 0, -1):
        yield embed(f"waits {nanos}ns", "queue_timeout", queue_timeout=Duration(nanos=nanos))
    yield embed("waits a second", queue_timeout=Duration(seconds=1))
