"""How the served model judges texts: by the head of its checkpoint, or by chosen tokens of a causal reranker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from core.config import ModelConfig
from core.engine.streams.token_stream import TokenStream
from core.errors import ConfigError, RequestAborted
from core.models.base import LabelHead, ModelSpec
from core.models.config import read_checkpoint_config
from core.text.tokenizer import Tokenizer
from core.types.io import Delta, Embedding, EmbedResult, Finished, FinishReason, TextPair
from core.types.labels import Activation, Labels
from core.types.sampling_params import SamplingParams

QUERY, DOCUMENT = "{query}", "{document}"
MAX_LABEL_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Labelling:
    """The labels of the served model, and where their numbers come from: `head` if there is one, else `token_ids`.

    The numbers of tokens are natural-log probabilities of each as the next one.
    """

    labels: Labels
    head: LabelHead | None = None
    token_ids: tuple[int, ...] = ()
    template: str = ""
    """What a pair becomes, with QUERY and DOCUMENT in it; empty where the tokenizer joins them."""
    pad_token_id: int | None = None
    """Left out at the end of an input, as transformers does it, whose head reads the last other token."""

    def filled(self, pair: TextPair) -> tuple[str, tuple[int, int]]:
        """(the text that stands for `pair`, from and to which character its second text is there).

        What looks like a place in one of its texts stays as it is.
        """
        before, _, rest = self.template.partition(QUERY)
        between, _, after = rest.partition(DOCUMENT)
        start = f"{before}{pair.first}{between}"
        return f"{start}{pair.second}{after}", (len(start), len(start) + len(pair.second))


def labelling_of(
    config: ModelConfig, spec: ModelSpec, tokenizer: Tokenizer, head: LabelHead | None
) -> Labelling | None:
    """What `config` and its checkpoint say, with the checkpoint's `head` if it has one; None for no labels.

    Raises ConfigError for label tokens that are not one token each, and where there are both.
    """
    if head is not None:
        if config.label_tokens:
            raise ConfigError("label_tokens: the checkpoint has a classification head with labels of its own")
        checkpoint = read_checkpoint_config(config.path)
        assert checkpoint.labels is not None, "the head came with them"
        pad = None if spec.whole_prompts else checkpoint.pad_token_id
        return Labelling(checkpoint.labels, head, (), config.pair_template, pad)
    if not config.label_tokens:
        if config.pair_template:
            raise ConfigError("pair_template: the served model has no labels, and label_tokens names none")
        return None
    names = tuple(config.label_tokens.split(","))
    if spec.encoder is not None or spec.whole_prompts:
        raise ConfigError("label_tokens: the served model does not go on from a text, so no token comes next")
    ids = tuple(_single_id(name, spec, tokenizer) for name in names)
    if len(set(ids)) != len(ids) or not 2 <= len(ids) <= MAX_LABEL_TOKENS:
        raise ConfigError(f"label_tokens: must name 2 to {MAX_LABEL_TOKENS} different tokens, with commas")
    return Labelling(Labels(names, Activation.SOFTMAX, relevance=0), None, ids, config.pair_template)


def _single_id(name: str, spec: ModelSpec, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(name, add_special_tokens=False) if name else []
    if len(ids) != 1 or ids[0] >= spec.vocab_size:
        raise ConfigError(f"label_tokens: {name!r} must be one token of the model; it is {len(ids)}")
    return ids[0]


class TokenLabelCall:
    """The engine's `EmbedCall` for labels that are tokens: a stream of one token per input, read to its end."""

    def __init__(self, stream: TokenStream) -> None:
        self.request_id = stream.request_id
        self._stream = stream

    async def result(self) -> EmbedResult:
        """Wait for the numbers of every input, in their order. Raises what the stream raises, and RequestAborted."""
        found: dict[int, Embedding] = {}
        values: dict[int, tuple[float, ...]] = {}
        aborted = False
        async for event in self._stream:
            if isinstance(event, Delta) and event.logprobs:
                values.setdefault(event.index, event.logprobs[0].chosen)
            elif isinstance(event, Finished):
                aborted |= event.reason is FinishReason.CANCELLED
                numbers = np.array(values.get(event.index, ()), np.float32)
                found[event.index] = Embedding(numbers, event.usage.prompt_tokens, event.usage.cached_tokens)
        if aborted:
            raise RequestAborted("the request was aborted")
        return EmbedResult(self.request_id, tuple(found[index] for index in range(len(found))))

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        await self._stream.aclose()


def next_tokens(labelling: Labelling) -> SamplingParams:
    """How an input is sampled: the step draws one token, which is dropped, and tells the numbers of the labels."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, logprob_token_ids=labelling.token_ids)
