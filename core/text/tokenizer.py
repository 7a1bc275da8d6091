"""A checkpoint's own tokenizer and chat template, loaded from its directory and safe to use from several threads.

For fast tokenizers everything goes straight to the Rust tokenizer: the calls of `transformers` around it switch
truncation and padding on that shared object, and one thread doing so while another encodes is an "Already borrowed"
error. What is switched is switched once, at load.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
import transformers

from core.errors import InvalidRequest, ModelLoadError
from core.text.chat_process import template_reason
from core.text.chat_renderer import ChatRenderer
from core.text.conversation import Conversation
from core.text.literal_text import NOT_TEXT, LiteralText
from core.types.chat import ChatMessage

MAX_CHAT_CHARS: Final = 4 << 20
"""Most characters of a conversation, before and after rendering: beyond any context, and still fast to render."""
_MAX_REASON_CHARS: Final = 200
_LONG_DECODE: Final = 1024
"""Number of ids from which a batch call, which releases the GIL, is worth its cost; streams decode a few at a time."""
_SHORT_ENCODE: Final = 256
"""Characters up to which letting go of the GIL is not worth its cost, and no other thread either: they take tens of
microseconds. Two threads that encoded 64 queries each, one by one, took 21 ms, and so 5."""
_TOKENIZER_FILES: Final = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """Text to ids and back. Immutable after `load`; all methods may be called from any thread."""

    def __init__(self, hf: Any) -> None:
        """`hf`: any `transformers` tokenizer; nothing else may keep using it."""
        self._hf = hf
        self._lock = threading.Lock()
        self.backend: tokenizers.Tokenizer | None = getattr(hf, "backend_tokenizer", None)
        """The Rust tokenizer; None for tokenizers written in Python, which are used under a lock."""
        if self.backend is not None:
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.encode_special_tokens = False
        self.vocab_size: int = len(hf)
        """Ids including added tokens; the model's embedding may have more rows."""
        self.bos_token_id: int | None = hf.bos_token_id
        self.eos_token_id: int | None = hf.eos_token_id
        self.has_chat_template: bool = bool(hf.chat_template)
        template = hf.chat_template or ""
        self.template: str = template if isinstance(template, str) else "\n".join(template.values())
        """The source of the chat template, of all if there are several; empty if there is none."""
        self.response_template: dict[str, Any] | None = getattr(hf, "response_template", None)
        """What the checkpoint declares of the form of answers, for the parser of `transformers`."""
        self.special_ids: frozenset[int] = _special_ids(hf, self.backend)
        """Ids that `decode` leaves out when it skips special tokens."""
        self._bos_token: str | None = hf.bos_token
        self._known = None if self.backend is not None else _known_ids(hf)
        """Ids of the vocabulary, which has holes; None where the backend passes over all others by itself."""
        self._literal = None if self.backend is None else LiteralText(self.backend, hf.unk_token_id)
        self.chats = _chat_renderer(hf)
        """Renders the chat template; None if there is none, or if it is code of the library."""

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer files of a checkpoint directory; never the network, never code from the checkpoint.

        Raises ModelLoadError, one line with the cause, when there is nothing to load or it cannot be read.
        """
        # Not at the top: this import takes three seconds, which only a process that reads a tokenizer has to pay.
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        path = Path(directory)
        if not path.is_dir():
            raise ModelLoadError(f"no model directory at {path}")
        if not any(True for pattern in _TOKENIZER_FILES for _ in path.glob(pattern)):
            raise ModelLoadError(f"no tokenizer files in {path}")
        try:
            hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library raises whatever its parsers raise
            raise ModelLoadError(f"cannot read the tokenizer in {path}: {_one_line(error)}") from error
        if len(hf) == 0:
            raise ModelLoadError(f"the tokenizer in {path} has an empty vocabulary")
        return cls(hf)

    def is_quick(self, chars: int) -> bool:
        """Whether text of so many characters is encoded sooner than another thread could begin with it."""
        return self.backend is not None and chars <= _SHORT_ENCODE

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written out in it count as such.

        With `add_special_tokens` the tokenizer's own are added, but no second BOS to text that already starts with it,
        as rendered chats do. Raises InvalidRequest, field `text`, for lone surrogates: they have no UTF-8 form.
        """
        _refuse_surrogates(text, "text")
        if self.backend is not None:
            ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
        else:
            with self._lock:
                ids = self._hf.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._bos_token and text.startswith(self._bos_token):
            doubled = len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
            return ids[1:] if doubled else ids
        return ids

    def encode_within(self, text: str, limit: int, part: tuple[int, int] | None = None) -> list[int]:
        """As `encode` with special tokens, but without the last tokens of `text` beyond `limit` ids.

        `part`: characters from and to which tokens may be left out; None for all of them. Special tokens that the
        tokenizer adds stay. Raises InvalidRequest, field `text`, also where too few tokens may be left out: field
        `pair.first` if there is a `part`.
        """
        ids = self.encode(text, add_special_tokens=True)
        if len(ids) <= limit:
            return ids
        if self.backend is None:
            if part is not None:
                raise InvalidRequest.of("text", "this model's tokenizer cannot say which tokens may be cut")
            with self._lock:
                cut: list[int] = self._hf(text, truncation=True, max_length=limit)["input_ids"]
            return cut
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=True)
        # A part is the second text of a pair: what is too long without it is the first, with what is around them.
        field = "text" if part is None else "pair.first"
        kept = _places_within(encoding, len(ids) - limit, 0, part or (0, len(text)), field)
        # Asked for once: the library makes a new list each time.
        found = encoding.ids
        # A second BOS that `encode` leaves out stands in front of everything.
        return [found[place] for place in kept[len(found) - len(ids) :]]

    def encode_pair(self, first: str, second: str, limit: int | None = None) -> tuple[list[int], list[int]]:
        """(ids of two texts as the checkpoint joins them, number of the text that each belongs to).

        Special tokens are the tokenizer's own and those written out. Beyond `limit` ids the last tokens of `second` are
        left out. Raises InvalidRequest, field `pair`, for lone surrogates, and `pair.first` where leaving out `second`
        is too little.
        """
        _refuse_surrogates(first + second, "pair")
        if self.backend is not None:
            encoding = self._encoding(first, second)
            ids, types = encoding.ids, encoding.type_ids
            if limit is None or len(ids) <= limit:
                return ids, types
            kept = _places_within(encoding, len(ids) - limit, 1, None, "pair.first")
            return [ids[place] for place in kept], [types[place] for place in kept]
        cut: dict[str, Any] = {} if limit is None else {"truncation": "only_second", "max_length": limit}
        with self._lock:
            found = self._hf(first, second, return_token_type_ids=True, **cut)
        given: list[int] = found["input_ids"]
        return given, found.get("token_type_ids") or [0] * len(given)

    def _encoding(self, first: str, second: str | None = None, *, add_special_tokens: bool = True) -> Any:
        assert self.backend is not None, "the others have other calls"
        if len(first) + len(second or "") <= _SHORT_ENCODE:
            return self.backend.encode(first, second, add_special_tokens=add_special_tokens)
        # Only the batch calls of the binding release the GIL: `encode` of a million characters would stop every thread
        # of the process for a second. The fast variant leaves out offsets.
        given = first if second is None else (first, second)
        (encoding,) = self.backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)
        return encoding

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`, bytes that are no UTF-8 as U+FFFD. Ids outside the vocabulary add nothing.

        The decoder of the tokenizer alone: the clean-up of spaces that `transformers` can do on top is not for streams,
        since it changes text that was already sent.
        """
        if self.backend is not None:
            if len(ids) > _LONG_DECODE:
                (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
                return str(text)
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        assert self._known is not None, "set where there is no backend"
        known = [token for token in ids if token in self._known]
        with self._lock:
            text = self._hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return str(text)

    def name_of(self, token: int) -> str:
        """The text that stands for the added token `token` in a prompt."""
        return str(self._hf.convert_ids_to_tokens(token))

    def render_chat(self, messages: Sequence[ChatMessage], tools: Sequence[str] = (), arguments: str = "") -> str:
        """The prompt that the checkpoint's chat template makes of a conversation, up to where the model answers.

        `tools`, `arguments`: of `GenerateRequest`. Rendered by the sandboxed Jinja of `transformers` in a process of
        its own; blocks, so not for an event loop. Raises InvalidRequest, field `chat`, without messages or template,
        when the template refuses the messages or fails on them, beyond MAX_CHAT_CHARS and past its time; what
        `Conversation.of` does, and what `ChatRenderer.render` does.
        """
        return self._rendered(self._conversation(messages, tools, arguments))

    def render_literally(
        self, messages: Sequence[ChatMessage], tools: Sequence[str] = (), arguments: str = ""
    ) -> tuple[str, str]:
        """(what `render_chat` makes of the conversation, a mark): special tokens written out in it are text.

        Raises as `render_chat`; InvalidRequest, field `chat.messages`, where there are any and the tokenizer, written
        in Python, could not tell them from those of the template.
        """
        conversation = self._conversation(messages, tools, arguments)
        if self._literal is not None:
            marked, mark = self._literal.marked(conversation)
            return self._rendered(marked), mark
        names = [token for token in self._hf.all_special_tokens if token]
        if any(name in text for text in conversation.texts() for name in names):
            raise InvalidRequest.of("chat.messages", NOT_TEXT)
        return self._rendered(conversation), ""

    def _conversation(self, messages: Sequence[ChatMessage], tools: Sequence[str], arguments: str) -> Conversation:
        if not self.has_chat_template:
            raise InvalidRequest.of("chat", "this model has no chat template; send text or token_ids")
        if not messages:
            raise InvalidRequest.of("chat", "needs at least one message")
        size = sum(each.chars for each in messages) + sum(map(len, tools)) + len(arguments)
        if size > MAX_CHAT_CHARS:
            raise InvalidRequest.of("chat", f"more than {MAX_CHAT_CHARS} characters")
        conversation = Conversation.of(messages, tools, arguments, self._hf.special_tokens_map)
        for text in conversation.texts():
            _refuse_surrogates(text, "chat")
        return conversation

    def _rendered(self, conversation: Conversation) -> str:
        rendered = self._render(conversation)
        if len(rendered) > MAX_CHAT_CHARS:
            raise InvalidRequest.of("chat", f"more than {MAX_CHAT_CHARS} characters once rendered")
        return rendered

    def encode_rendered(self, rendered: str, mark: str) -> list[int]:
        """Ids of a prompt that `render_literally` has made. Raises InvalidRequest as `encode`, and `chat.messages`."""
        if not mark:
            # The template writes the special tokens itself; encoding must not add them a second time.
            return self.encode(rendered, add_special_tokens=False)
        assert self._literal is not None, "it made the mark"
        return self._literal.encode(rendered, mark)

    def _render(self, conversation: Conversation) -> str:
        if self.chats is not None:
            return self.chats.render(conversation)
        options: dict[str, Any] = {"tools": conversation.tools} if conversation.tools else {}
        options |= conversation.arguments
        try:
            return str(
                self._hf.apply_chat_template(conversation.turns, tokenize=False, add_generation_prompt=True, **options)
            )
        except Exception as error:  # a library raises whatever it likes
            reason = template_reason(error)
            said = f"refused by the tokenizer: {reason}" if reason else "the tokenizer cannot render these messages"
            raise InvalidRequest.of("chat", said) from error


def _chat_renderer(hf: Any) -> ChatRenderer | None:
    if not hf.chat_template:
        return None
    if type(hf).apply_chat_template is not transformers.PreTrainedTokenizerBase.apply_chat_template:
        return None  # not a template of the checkpoint: code of mistral-common
    try:
        template = hf.get_chat_template()
    except ValueError:  # several, none of them the default
        return None
    return ChatRenderer(template, hf.special_tokens_map, MAX_CHAT_CHARS)


def _places_within(
    encoding: tokenizers.Encoding, surplus: int, sequence: int, part: tuple[int, int] | None, field: str
) -> list[int]:
    """Places in `encoding` without the last `surplus` tokens of its text number `sequence`.

    `part`: characters between which they must be. Raises InvalidRequest where there are fewer.
    """
    places = [place for place, number in enumerate(encoding.sequence_ids) if number == sequence]
    if part is not None:
        offsets = encoding.offsets
        places = [place for place in places if part[0] <= offsets[place][0] and offsets[place][1] <= part[1]]
    if len(places) < surplus:
        raise InvalidRequest.of(field, f"is {surplus - len(places)} tokens too long without what may be cut")
    left_out = set(places[len(places) - surplus :])
    return [place for place in range(len(encoding.ids)) if place not in left_out]


def _special_ids(hf: Any, backend: tokenizers.Tokenizer | None) -> frozenset[int]:
    if backend is None:
        return frozenset(hf.all_special_ids)
    return frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)


def _known_ids(hf: Any) -> frozenset[int]:
    """Ids that have a token. Tokenizers written in Python raise for others, or decode them as their unknown token."""
    ids = {*hf.get_vocab().values(), *hf.added_tokens_decoder}
    # Tokens that share a text with another one are missing in `get_vocab`: parts of characters in mistral-common.
    return frozenset({*ids, *(token for token in range(len(hf)) if token not in ids and _has_token(hf, token))})


def _has_token(hf: Any, token_id: int) -> bool:
    try:
        token = hf.convert_ids_to_tokens(token_id)
    except Exception:  # whatever the library looks it up in raises
        return False
    return isinstance(token, str) and token != hf.unk_token


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_MAX_REASON_CHARS] if lines else 'unknown'}"


def _refuse_surrogates(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest.of(field, "has a lone surrogate, which is no valid text") from None
