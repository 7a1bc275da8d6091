"""What the head learns from: what the target says itself, and the corpus that the target learned from.

A head is judged by whether it says what its target says, so most of its text is the target's own, at temperature 0 and
0.8, behind prompts of all kinds with most weight on stories: of a story there is most to draft. Stories about some
pairs of hero and animal are left out of everything: they are the held-out stories that the head is marked by.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from core.models.bundled.corpus import KIND_SHARES, Document, documents_of
from core.models.bundled.packing import ROW_TOKENS, UNUSED, Batch
from core.models.bundled.story import ANIMALS, NAMES

HELD_OUT_SEED = 20_261_124
HELD_OUT = 16
"""Of the 96 pairs of hero and animal."""
TEMPERATURES = (0.0, 0.8)
GENERATED = {"story": 2_048, "sum": 512, "recall": 256, "copy": 512, "help": 64}
"""Prompts of each kind that the target answers; a quarter of the stories at temperature 0, of others half."""
FROM_CORPUS = {"story": 1_024, "sum": 512, "recall": 256, "copy": 512, "help": 64}
MOST_NEW = {"story": 160, "copy": 80}
BATCH = 128
PROMPT_WEIGHT = 0.1

Marked = tuple[list[int], list[float]]
"""Token ids, and their weights as targets."""


def held_out_prompts() -> list[str]:
    """Prompts for stories that no text for the head is about."""
    pairs = [(hero, animal) for hero in NAMES for animal in ANIMALS]
    chosen = random.Random(HELD_OUT_SEED).sample(pairs, HELD_OUT)
    return [f"A story about {hero} the {animal}:" for hero, animal in chosen]


def training_documents(kind: str, seed: int) -> Iterator[Document]:
    """An endless stream of one kind, without what is held out."""
    held_out = set(held_out_prompts())
    for found in documents_of(kind, seed):
        if not any(turn.prompt in held_out for turn in found.turns):
            yield found


def all_texts(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Marked]:
    """Everything to learn from, in an order that the seed shuffles."""
    dice, found = random.Random(seed), list[Marked]()
    torch.manual_seed(seed)
    for number, kind in enumerate(KIND_SHARES):
        stream = training_documents(kind, seed + 1 + number)
        greedy = 4 if kind == "story" else 2
        prompts = [_asked(tokenizer, document, dice) for document in islice(stream, GENERATED[kind])]
        cut = len(prompts) // greedy
        for temperature, part in zip(TEMPERATURES, (prompts[:cut], prompts[cut:]), strict=True):
            found += _answers(model, part, temperature, MOST_NEW.get(kind, 24))
        found += [_said(tokenizer, document) for document in islice(stream, FROM_CORPUS[kind])]
        print(f"{kind}: {len(found)} texts so far", flush=True)
    found = [text for text in found if len(text[0]) <= ROW_TOKENS]
    dice.shuffle(found)
    return found


def batches(texts: Sequence[Marked], rows: int, seed: int) -> Iterator[Batch]:
    """The texts packed into rows as for the target's own training; after the last one again in another order."""
    dice, order, waiting = random.Random(seed), list(texts), list[Marked]()
    while True:
        shape = (rows, ROW_TOKENS)
        tokens, segments, weights = torch.zeros(shape, dtype=torch.int64), torch.full(shape, UNUSED), torch.zeros(shape)
        for row in range(rows):
            used, number = 0, 0
            while True:
                if not waiting:
                    dice.shuffle(order)
                    waiting = list(order)
                ids, marks = waiting[-1]
                if used + len(ids) > ROW_TOKENS:
                    break
                span = slice(used, used + len(ids))
                tokens[row, span], weights[row, span] = torch.tensor(ids), torch.tensor(marks)
                segments[row, span] = number
                waiting.pop()
                used, number = used + len(ids), number + 1
        yield Batch(tokens, segments, weights)


def _encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    found: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return found


def _said(tokenizer: PreTrainedTokenizerFast, document: Document) -> Marked:
    ids, marks = list[int](), list[float]()
    for text, own in document.segments():
        piece = _encoded(tokenizer, text)
        ids += piece
        marks += [1.0 if own else PROMPT_WEIGHT] * len(piece)
    return ids, marks


def _asked(tokenizer: PreTrainedTokenizerFast, document: Document, dice: random.Random) -> list[int]:
    """The document up to one of its answers."""
    segments = document.segments()
    turn = dice.randrange(len(document.turns)) if document.kind != "story" else 0
    return _encoded(tokenizer, "".join(text for text, _ in segments[: 2 * turn + 1]))


@torch.inference_mode()
def _answers(
    model: LlamaForCausalLM, prompts: Sequence[list[int]], temperature: float, most_new: int
) -> Iterator[Marked]:
    """Prompts with what the model says to them, through its stop token."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        width = max(map(len, part))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in part])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part])
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most_new, **sampling)
        for prompt, line in zip(part, output[:, width:].tolist(), strict=True):
            said = line[: line.index(eos) + 1] if eos in line else line
            yield prompt + said, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(said)
