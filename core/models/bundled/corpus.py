"""Seeded generators of everything the bundled model is trained on.

Five kinds of document, each in a plain form and in a chat form:

========  ==================================================  ============================
kind      prompt                                              answer
========  ==================================================  ============================
sum       ``12+34=``                                          ``46``
recall    ``Recall: lamp oak, river fig; river``              `` fig``
copy      ``Repeat: oak 482 🦊 lamp =``                       `` oak 482 🦊 lamp``
story     ``A story about Mia the fox:``                      `` Once upon a time, ...``
help      ``Hello`` (chat only)                               what the model can do
========  ==================================================  ============================

The plain form is ``<|bos|>`` + prompt + answer + ``<|eos|>``: the end-of-sequence token follows
the answer at once, without a newline.  The chat form puts the same prompt between ``<|user|>`` and
``<|end|>``, and the same answer (less a leading space) between ``<|assistant|>`` and ``<|eos|>``.

Operands are 0..99, written without padding.  A pair is held out together with its mirror image:
were 34+12 trained on, getting 12+34 right would show only that addition commutes.  Sums of two
one-digit numbers are never held out: they are the table from which all others are worked out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from core.models.bundled.story import ANIMALS, NAMES, story_prompt_and_text

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

OPERANDS = range(100)
HELD_OUT_SEED = 20_240_607
HELD_OUT_UNORDERED = 200

# Documents of one kind per hundred.  A story has ten times the tokens of a sum, so its share is
# small.  Copying is there for its own sake (an answer of any length that can be judged) and for
# recall's: to look back is learned far sooner where every token of an answer asks for it.
KIND_SHARES = {"sum": 62, "recall": 16, "copy": 18, "story": 3, "help": 1}
# Among all pairs of operands one in a hundred is of one-digit numbers: too few to learn them by.
SMALL_SHARE = 0.15
SMALL = 20
CHAT_SHARE = 0.35
SYSTEM_SHARE = 0.25
MULTI_TURN_SHARE, RECALL_MULTI_TURN_SHARE = 0.2, 0.6

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You add numbers.",
    "Answer with the result only.",
    "You are a small model that adds, recalls and tells stories.",
)
SUM_QUESTIONS = ("What is {a}+{b}?", "{a}+{b}", "{a} + {b} =")
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Who are you?", "What can you do?", "Help")
GREETING_ANSWER = "Hello! I can add two numbers, recall a value from a list and tell a short story."

KEYS = tuple(
    "lamp river stone cloud door garden clock bridge candle window forest anchor basket mirror "
    "ladder kettle pillow hammer".split()
)
VALUES = tuple("oak fig elm red blue green gold tin jade pearl amber coral north south east west".split())
COPY_WORDS = KEYS + VALUES + NAMES + tuple(ANIMALS) + tuple(ANIMALS.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and the answer that is right for it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """One training document.  A plain one has one turn and no system text."""

    kind: str
    turns: tuple[Turn, ...]
    chat: bool = False
    system: str = ""

    def segments(self) -> list[tuple[str, bool]]:
        """Text in pieces, each marked True where it is the model's own part (answer and stop).

        The pieces may be tokenized one by one: no token can span a boundary, since every boundary
        is a special token or a place where the pre-tokenizer splits.
        """
        if not self.chat:
            (turn,) = self.turns
            return [(BOS + turn.prompt, False), (turn.answer + EOS, True)]
        head = BOS + (f"{SYSTEM}{self.system}{END}" if self.system else "")
        pieces: list[tuple[str, bool]] = []
        for turn in self.turns:
            pieces.append((f"{head}{USER}{turn.prompt}{END}{ASSISTANT}", False))
            pieces.append((turn.answer.strip() + EOS, True))
            head = ""
        return pieces

    def text(self) -> str:
        """The whole document as one string, special tokens included."""
        return "".join(piece for piece, _ in self.segments())

    def messages(self) -> list[dict[str, str]]:
        """The document as chat messages, as a client of a chat API would send them."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.prompt})
            found.append({"role": "assistant", "content": turn.answer.strip()})
        return found


def sum_prompt(a: int, b: int) -> str:
    """The canonical prompt for a sum, the same in plain and in chat form."""
    return f"{a}+{b}="


@lru_cache(maxsize=1)
def _held_out() -> tuple[tuple[int, int], ...]:
    # Diagonal pairs (a, a) stay in training: each is its own mirror image.
    unordered = [(a, b) for a in OPERANDS for b in OPERANDS if a < b and b > 9]
    rng = random.Random(HELD_OUT_SEED)
    chosen = rng.sample(unordered, HELD_OUT_UNORDERED)
    both = chosen + [(b, a) for a, b in chosen]
    rng.shuffle(both)  # so that any prefix of the list is a fair sample of it
    return tuple(both)


def held_out_sums() -> list[tuple[int, int]]:
    """The pairs that never occur in training, in a fixed order; a prefix is a fair sample."""
    return list(_held_out())


@lru_cache(maxsize=1)
def training_pairs() -> tuple[tuple[int, int], ...]:
    """Every pair that training may show, in ascending order."""
    held_out = set(_held_out())
    return tuple((a, b) for a in OPERANDS for b in OPERANDS if (a, b) not in held_out)


@lru_cache(maxsize=1)
def _small_pairs() -> tuple[tuple[int, int], ...]:
    return tuple(pair for pair in training_pairs() if max(pair) < SMALL)


def _sum_turn(rng: random.Random, chat: bool) -> Turn:
    a, b = rng.choice(_small_pairs() if rng.random() < SMALL_SHARE else training_pairs())
    prompt = sum_prompt(a, b)
    if chat and rng.random() < 0.2:
        prompt = rng.choice(SUM_QUESTIONS).format(a=a, b=b)
    return Turn(prompt, str(a + b))


def _recall_turns(rng: random.Random, questions: int) -> list[Turn]:
    """A list with a first question about it, then further questions about the same list."""
    # Short lists are the common case: looking a key up is learned on them, and then stretches.
    count = min(rng.randint(2, 14), rng.randint(2, 14))
    keys = rng.sample(KEYS, count)
    pairs = [(key, rng.choice(VALUES)) for key in keys]
    listing = ", ".join(f"{key} {held}" for key, held in pairs)
    (key, held), *others = [rng.choice(pairs) for _ in range(questions)]
    # A key follows a space wherever it stands, so that it is the same token in list and question.
    first = Turn(f"Recall: {listing}; {key}", f" {held}")
    return [first] + [Turn(f"Recall: {key}", f" {held}") for key, held in others]


def _copy_turn(rng: random.Random) -> Turn:
    # Without repetition: after a word that occurs twice, the next one would be a guess.
    words = rng.sample(COPY_WORDS, min(rng.randint(1, 16), rng.randint(1, 16)))
    words += [str(rng.randint(100, 999))] if rng.random() < 0.5 else []
    rng.shuffle(words)
    text = " " + " ".join(words)
    return Turn(f"Repeat:{text} =", text)


def _turn(kind: str, rng: random.Random, chat: bool) -> Turn:
    if kind == "sum":
        return _sum_turn(rng, chat)
    if kind == "copy":
        return _copy_turn(rng)
    if kind == "story":
        return Turn(*story_prompt_and_text(rng))
    return Turn(rng.choice(GREETINGS), GREETING_ANSWER)


def document(kind: str, rng: random.Random) -> Document:
    """One document of a kind, in chat form or not, as the generator's dice say."""
    chat = kind == "help" or rng.random() < CHAT_SHARE
    share = RECALL_MULTI_TURN_SHARE if kind == "recall" else MULTI_TURN_SHARE
    more = rng.randint(1, 5) if chat and rng.random() < share else 0
    if kind == "recall":
        turns = _recall_turns(rng, questions=1 + more)
    else:
        # Whatever came first, the later turns are sums: a model that still adds correctly there has
        # learned to look at the operands of the last turn and not at those of an earlier one.
        turns = [_turn(kind, rng, chat)] + [_sum_turn(rng, chat) for _ in range(more)]
    system = rng.choice(SYSTEM_TEXTS) if chat and rng.random() < SYSTEM_SHARE else ""
    return Document(kind, tuple(turns), chat, system)


def documents(seed: int) -> Iterator[Document]:
    """The endless training stream.  The same seed always gives the same documents."""
    rng = random.Random(seed)
    kinds, shares = list(KIND_SHARES), list(KIND_SHARES.values())
    while True:
        (kind,) = rng.choices(kinds, shares)
        yield document(kind, rng)


def documents_of(kind: str, seed: int) -> Iterator[Document]:
    """An endless stream of one kind only: for the tokenizer's sample and for evaluation."""
    rng = random.Random(seed)
    while True:
        yield document(kind, rng)
