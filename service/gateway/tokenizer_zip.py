"""The checkpoint's tokenizer as gateways fetch it: one zip of its files, equal for equal files, made once."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from core.errors import Unsupported
from service.engine.builder import in_daemon_thread

PATTERNS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
"""Files that hold the data of tokenizers and templates; never weights, never code."""

CHUNK_BYTES = 64 * 1024
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 50
"""Most files that the gateway takes; no checkpoint comes near."""

_EPOCH = (1980, 1, 1, 0, 0, 0)


class TokenizerZip:
    """The zip of the checkpoint in `folder`, which is asked for with the first call; kept in memory from then on.

    Event-loop thread only.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._packed: asyncio.Task[tuple[bytes, str]] | None = None

    async def packed(self) -> tuple[bytes, str]:
        """The zip and the SHA-256 of it in hex. Raises Unsupported where there are no such files."""
        if self._packed is None:
            # One task for all calls that ask meanwhile: packing a large vocabulary takes a second.
            folder = self._folder()
            self._packed = asyncio.create_task(in_daemon_thread(lambda: pack(folder)))
        try:
            return await asyncio.shield(self._packed)
        except Unsupported:
            self._packed = None
            raise


def pack(folder: Path) -> tuple[bytes, str]:
    """The zip of the tokenizer files in `folder` and its SHA-256 in hex; blocks while it compresses.

    Raises Unsupported if there are no tokenizer files.
    """
    found = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
    fitting = [path for path in found if path.stat().st_size <= MAX_FILE_BYTES][:MAX_FILES]
    if not any(path.name.startswith(("tokenizer", "vocab")) for path in fitting):
        raise Unsupported("the checkpoint has no tokenizer files to send")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in fitting:
            archive.writestr(zipfile.ZipInfo(path.name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def chunks(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """`data` in pieces, and whether a piece is the last."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES], start + CHUNK_BYTES >= len(data)
