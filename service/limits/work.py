"""How much work a request is, told from its message: what limits of a tenant count beside its calls."""

from __future__ import annotations

from dataclasses import dataclass

from core.types.io import EmbedRequest, GenerateRequest

CHARS_PER_TOKEN = 4
"""Of a text that is not tokenised yet. The charge is corrected when the engine has counted."""

TURN_TOKENS = 8
"""What a chat template writes around one turn, about."""


@dataclass(frozen=True, slots=True)
class Work:
    """`sequences` are rows of a batch; `tokens` the most that the request can need, its `prompt` and all outputs."""

    sequences: int = 1
    prompt: int = 0
    tokens: int = 0


ONE_SEQUENCE = Work()


def generating(asked: GenerateRequest, context_length: int) -> Work:
    """The prompt once, for the outputs share it, and `max_tokens` of each output; left open, what the context holds."""
    prompt = _prompt(asked)
    each = asked.sampling.max_tokens
    room = max(1, context_length - prompt) if each is None else each
    return Work(asked.sampling.n, prompt, prompt + asked.sampling.n * room)


def embedding(asked: EmbedRequest) -> Work:
    """A sequence for each input, and the tokens of all."""
    prompt = sum(_of_text(each) if isinstance(each, str) else len(each) for each in asked.inputs)
    return Work(len(asked.inputs), prompt, prompt)


def _prompt(asked: GenerateRequest) -> int:
    if asked.token_ids is not None:
        return len(asked.token_ids)
    if asked.chat is not None:
        return sum(_of_text(turn.content) + TURN_TOKENS for turn in asked.chat)
    return _of_text(asked.text or "")


def _of_text(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)
