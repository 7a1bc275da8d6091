"""A tokenizer that fails for chosen ids and texts, as libraries behind it do: by an exception, or by a panic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.text.tokenizer import Tokenizer

SECRET = "what the client wrote"
"""Stands for text of a client in an exception's message; no log may show it."""


class PanicException(BaseException):
    """What a panic in a Rust library is in Python: no `Exception`, so `except Exception` lets it pass."""


def value_error() -> BaseException:
    """What most libraries raise."""
    return ValueError(f"piece id is out of range in {SECRET!r}")


def panic() -> BaseException:
    """What a Rust library raises when it panics."""
    return PanicException(f"called `Option::unwrap()` on a `None` value: {SECRET!r}")


class BrittleTokenizer(Tokenizer):
    """`whole`, without its Rust backend; `decode` raises `failure()` where one of `bad` is among the ids.

    After `times` failures it works; None is for ever. `encode` raises for a text that holds SECRET.
    """

    def __init__(
        self,
        whole: Tokenizer,
        bad: Sequence[int] = (),
        failure: Callable[[], BaseException] = value_error,
        times: int | None = None,
    ) -> None:
        self.__dict__ |= vars(whole)
        self.backend = None
        self.bad, self.failure, self.left = set(bad), failure, times
        self._whole = whole

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See `Tokenizer.decode`."""
        if self.left != 0 and not self.bad.isdisjoint(ids):
            if self.left is not None:
                self.left -= 1
            raise self.failure()
        return self._whole.decode(ids, skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See `Tokenizer.encode`."""
        if SECRET in text:
            raise self.failure()
        return self._whole.encode(text, add_special_tokens)
