"""Bearer tokens: the file that lists them, and a comparison whose timing shows nothing about them.

Only digests are kept, all of one length. Every presented token is compared with every entry to the end. So neither the
place of a match nor the length of a common prefix shows in the time taken.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import StartupError
from service.access.reloaded_file import Reloaded

UNNAMED = "unnamed"
"""The caller of a token that has no name in the file."""

MIN_TOKEN_CHARS = 16
"""Shorter tokens can be guessed. And the first letters of a token, in a half-written file, must not become a token."""

MAX_TOKENS = 1024
"""Bounds the time of a call's check, in which all tokens are compared."""

_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN_CHARS},2048}}={{0,2}}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller that presented a token: its name, and the token's digest, by which `holds` finds it again later."""

    name: str
    digest: bytes = field(repr=False)


class TokenBook:
    """The tokens of one state of the file. Immutable."""

    def __init__(self, callers: Iterable[Caller]) -> None:
        self._callers = tuple(callers)

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, presented: str) -> Caller | None:
        """The caller of the token `presented`; None if it is not listed."""
        return self._matching(_digest_of(presented))

    def holds(self, caller: Caller) -> bool:
        """Whether the token that `caller` once presented is still listed."""
        return self._matching(caller.digest) is not None

    def limited_to(self, digests: frozenset[bytes]) -> TokenBook:
        """A book of only the tokens whose digests are in `digests`."""
        listed = {caller.digest: caller for caller in self._callers}
        return TokenBook(listed[each] for each in listed.keys() & digests)

    def _matching(self, digest: bytes) -> Caller | None:
        found: Caller | None = None
        for caller in self._callers:
            # No early end: the time must not tell where in the file a token stands.
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        return found


def token_file(path: str | Path) -> Reloaded[TokenBook]:
    """The tokens of the file at `path`, read again when it changes. Raises StartupError."""
    return Reloaded("token file", (path,), lambda contents: parse_tokens(contents[0], path), _still_listed)


def _still_listed(last: TokenBook, contents: tuple[bytes, ...] | None) -> TokenBook:
    """The tokens of the last good state that a bad file still holds; none if the file cannot be read.

    So revoked tokens end at once. No new token is accepted: the beginning of one, in a half-written file, is none.
    """
    secrets = () if contents is None else _secrets(contents[0])
    found = frozenset(_digest_of(secret) for secret in secrets)
    return last.limited_to(found)


def _secrets(content: bytes) -> Iterator[str]:
    """The text in the token's place of each line, whether it is a good token or not."""
    for line in content.decode("ascii", "replace").splitlines():
        if not line.strip().startswith("#"):
            yield line.strip().rpartition(":")[2]


def parse_tokens(content: bytes, path: str | Path) -> TokenBook:
    """Read one `token` or `name:token` a line; empty lines and lines that start with # are skipped.

    Raises StartupError, which names file and line and never shows the line's text.
    """
    seen: dict[bytes, int] = {}
    callers: list[Caller] = []
    for number, name, secret in _lines(content, path):
        digest = _digest_of(secret)
        earlier = seen.setdefault(digest, number)
        if earlier < number:
            raise StartupError(f"{path}, line {number}: the same token as in line {earlier}")
        callers.append(Caller(name, digest))
    if not callers:
        raise StartupError(f"{path}: holds no token")
    if len(callers) > MAX_TOKENS:
        raise StartupError(f"{path}: holds {len(callers)} tokens, at most {MAX_TOKENS}")
    return TokenBook(callers)


def first_token(path: str | Path) -> str:
    """The first token of a file of the same form, which a client presents. Raises StartupError."""

    def first(contents: tuple[bytes, ...]) -> str:
        parse_tokens(contents[0], path)
        return next(_lines(contents[0], path))[2]

    return Reloaded("token file", (path,), first).current()


def _lines(content: bytes, path: str | Path) -> Iterator[tuple[int, str, str]]:
    """(line number, name, token) of every line that holds a token. Raises StartupError."""
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise StartupError(f"{path}: holds bytes that are not ASCII") from None
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, colon, secret = line.rpartition(":")
        if not _TOKEN.fullmatch(secret):
            raise StartupError(
                f"{path}, line {number}: a token has at least {MIN_TOKEN_CHARS} characters of A-Z a-z 0-9 . _ ~ + / - ="
            )
        if colon and not _NAME.fullmatch(name):
            raise StartupError(f"{path}, line {number}: a name has 1 to 64 characters of A-Z a-z 0-9 . _ -")
        yield number, name or UNNAMED, secret


def _digest_of(presented: str) -> bytes:
    return hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
