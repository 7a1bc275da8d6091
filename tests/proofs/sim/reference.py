"""What a correct engine answers: one request at a time, with no pools, no batches, no pages and no overlap.

The model of the simulation is defined here as well, in functions that both sides share: `link` is what a KV slot holds,
`blend` is what more pools than one say together, `encode` and `heard` are what an encoder says of its input and what a
decoder makes of that, `pick` is how a token follows. All else here knows nothing of how the engine works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.types.io import FinishReason
from core.types.sampling_params import SamplingParams

VOCAB = 509
EOS = tuple(range(500, VOCAB))
ROOT = 0x5EED
"""What stands before the first token."""

BASE = 0
"""What stands for no adapter; every adapter has another number."""

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15

NOTHING: frozenset[int] = frozenset()

Extras = tuple[float | int | tuple[float | int, ...], ...]


def link(before: int, token: int, position: int) -> int:
    """What the KV slot of `token` holds, given what the slot before it holds: a hash of the whole prefix."""
    return hash((before, token, position))


def root(adapter: int) -> int:
    """What stands before the first token of a request for an adapter."""
    return hash((ROOT, adapter)) if adapter != BASE else ROOT


def blend(*read: int) -> int:
    """What the model makes of a row that it read in several pools, each of which holds the same hash of its tokens."""
    return hash(read)


def encode(ids: Sequence[int]) -> list[int]:
    """What an encoder says of each token of its input: every token sees all the others."""
    whole = hash(tuple(ids))
    return [hash((whole, place)) for place in range(len(ids))]


def heard(said: Sequence[int]) -> int:
    """What a decoder's token makes of all that the encoder said."""
    return hash(tuple(said))


def force(state: int, tokens: Sequence[int]) -> int:
    """The one of `tokens` that is said where one of them must be."""
    return tokens[hash((state,)) % len(tokens)]


def pick(state: int, extras: Extras, forbidden: frozenset[int] | set[int]) -> int:
    """The token after a sequence whose last slot holds `state`; `extras` is whatever else a sampler reads."""
    token = hash((state, *extras)) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def uniform(seed: int, position: int) -> float:
    """The random number of an output position, written from the description of SplitMix64 and not from our sampler."""
    return (_mix(_mix(seed + GAMMA) + (position + 1) * GAMMA) >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word &= MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


@dataclass(frozen=True, slots=True)
class EncoderSide:
    """What a request of an encoder-decoder has beside its decoder's prompt; no tokens: nothing is forced."""

    ids: tuple[int, ...]
    forced_first: tuple[int, ...]
    forced_last: tuple[int, ...]

    def forced(self, position: int, limit: int) -> tuple[int, ...]:
        """Of which one must be said at an output position; in an output of one token the last word is the last's."""
        last = self.forced_last if position == limit - 1 else ()
        return last or (self.forced_first if position == 0 else ())


@dataclass(frozen=True, slots=True)
class Answer:
    """All tokens of a request that nothing disturbs, and how it ends."""

    tokens: tuple[int, ...]
    reason: FinishReason
    matched_stop: int | None


def answer(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    limit: int,
    pools: int = 1,
    encoder: EncoderSide | None = None,
    adapter: int | None = None,
) -> Answer:
    """What the request gets: at most `limit` tokens, fewer when one of them stops it. All else as for `spoken`."""
    stops, out = _stops(params), list[int]()
    for token in spoken(prompt, params, seed, limit, pools, encoder, adapter):
        out.append(token)
        if token in stops:
            return Answer(tuple(out), FinishReason.STOP, token)
    return Answer(tuple(out), FinishReason.LENGTH, None)


def spoken(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    limit: int,
    pools: int = 1,
    encoder: EncoderSide | None = None,
    adapter: int | None = None,
) -> Iterator[int]:
    """What is sampled at `limit` places one after another, as if no token stopped it. The model reads `pools` pools of
    the decoder's tokens, what its encoder said, if it has one, and the adapter, if there can be any.
    """
    said = () if encoder is None else (heard(encode(encoder.ids)),)
    said += () if adapter is None else (adapter,)
    state, ids = root(adapter or BASE), list(prompt)
    for position, token in enumerate(prompt):
        state = link(state, token, position)
    stops = _stops(params)
    for place in range(limit):
        read = blend(*[state] * pools, *said) if said or pools > 1 else state
        forced = encoder.forced(place, limit) if encoder is not None else ()
        blocked = stops if place < params.min_tokens else NOTHING
        token = force(read, forced) if forced else pick(read, _extras(params, seed, place, ids), blocked)
        yield token
        state = link(state, token, len(ids))
        ids.append(token)


def _stops(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}


def _extras(params: SamplingParams, seed: int, position: int, ids: list[int]) -> Extras:
    """What the sampler may look at: filters and a random number unless greedy, the history if penalised, the biases."""
    found: list[float | int | tuple[float | int, ...]] = []
    if params.temperature > 0:
        found += [uniform(seed, position), params.temperature, params.top_k, params.top_p, params.min_p]
    if params.penalised:
        found += [tuple(ids), params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    if params.logit_bias:
        found.append(tuple(part for item in sorted(params.logit_bias.items()) for part in item))
    return tuple(found)
