"""How much work a request is, estimated from its message: the sequences and tokens that a tenant's limits count."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.chat import ChatMessage
from core.types.io import EmbedRequest, GenerateRequest, Input, TextPair

CHARS_PER_TOKEN = 4
"""Estimate for a text that is not tokenised yet. The charge is corrected when the engine has counted."""

TURN_TOKENS = 8
"""Estimate of the tokens that a chat template writes around one turn."""


IMAGE_TOKENS = 256
"""Estimate of the tokens that an image becomes."""


@dataclass(frozen=True, slots=True)
class Work:
    """`sequences`: rows of a batch. `prompt`: its tokens, estimated. `tokens`: the most for prompt and outputs."""

    sequences: int = 1
    prompt: int = 0
    tokens: int = 0


ONE_SEQUENCE = Work()


def generating(asked: GenerateRequest, context_length: int) -> Work:
    """The work of a Generate request: the prompt once, since the outputs share it, and `max_tokens` of each output.

    Without `max_tokens` an output may fill the rest of the context.
    """
    prompt = _prompt(asked)
    each = asked.sampling.max_tokens
    room = max(1, context_length - prompt) if each is None else each
    return Work(asked.sampling.n, prompt, prompt + asked.sampling.n * room)


def embedding(asked: EmbedRequest) -> Work:
    """The work of a request to embed or judge: one sequence for each input, and the tokens of all inputs."""
    prompt = sum(map(_of_input, asked.inputs))
    return Work(len(asked.inputs), prompt, prompt)


def _prompt(asked: GenerateRequest) -> int:
    if asked.token_ids is not None:
        return len(asked.token_ids)
    if asked.chat is not None:
        return sum(_of_turn(turn) + TURN_TOKENS for turn in asked.chat)
    return _of_text(asked.text or "") + IMAGE_TOKENS * len(asked.images)


def _of_turn(turn: ChatMessage) -> int:
    texts = sum(_of_text(part) for part in turn.parts if isinstance(part, str))
    return _of_text(turn.content) + texts + IMAGE_TOKENS * sum(isinstance(part, bytes) for part in turn.parts)


def _of_input(given: Input) -> int:
    if isinstance(given, TextPair):
        return _of_text(given.first) + _of_text(given.second)
    return _of_text(given) if isinstance(given, str) else len(given)


def _of_text(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)
