"""What chunks, and what rows hold behind them, are called in files. Host state only."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.disk.chunk_names import chunk_names, ending_name
from core.types.arrays import Ints


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a chunk is named by in every process: the model with its weights, and what shares prefixes."""

    stamp: str
    namespace: Callable[[str], str | None]
    """Of a namespace of this process the name that it has in others; None for one that is gone."""
    tenant: Callable[[str], str]
    """Of a namespace."""


class FileNames:
    """Names by token ids and all before them, for each namespace apart."""

    def __init__(self, lasting: Lasting, chunk: int) -> None:
        """`chunk`: tokens of a chunk."""
        self._lasting = lasting
        self._chunk = chunk
        self._stamp = lasting.stamp

    def forget(self) -> None:
        """The model is another one from now on, of which no other process knows."""
        self._stamp = secrets.token_hex(16)

    def tenant(self, salt: str) -> str:
        """Whose prefixes those of namespace `salt` are."""
        return self._lasting.tenant(salt)

    def chunks(self, ids: Ints, salt: str) -> list[str]:
        """Of each whole chunk of `ids`, int64[n]; none in a namespace that is gone."""
        namespace = self._lasting.namespace(salt)
        if namespace is None:
            return []
        return chunk_names(self._stamp, namespace, self.tenant(salt), ids, self._chunk)

    def ending(self, ids: Ints, salt: str, known: Sequence[str] | None = None) -> str | None:
        """Of what rows hold where `ids`, int64[n >= 1], end; None in a namespace that is gone.

        `known`: names of chunks of `ids`, if there are any.
        """
        namespace, count = self._lasting.namespace(salt), (len(ids) - 1) // self._chunk
        if namespace is None:
            return None
        names = self.chunks(ids[: count * self._chunk], salt) if known is None else known
        tail, before = ids[count * self._chunk :], names[count - 1] if count else ""
        return ending_name(self._stamp, namespace, self.tenant(salt), before, tail)

    def trail(self, ids: Ints, salt: str, known: Sequence[str] | None = None) -> str | None:
        """Of what rows hold beside the keys of the last chunk of `ids`, int64[n * chunk]; see `ending`.

        An ending has a token at least, so this is the name of none.
        """
        namespace, count = self._lasting.namespace(salt), len(ids) // self._chunk
        if namespace is None:
            return None
        names = self.chunks(ids, salt) if known is None else known
        return ending_name(self._stamp, namespace, self.tenant(salt), names[count - 1], ids[:0])
