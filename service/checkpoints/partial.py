"""Large files of a hub that outlive the process which fetches them: what came of a file is kept, and gone on with.

`huggingface_hub` gives each try a file of its own and removes what did not come whole. These files are fetched with its
own functions under the one name `<etag>.incomplete` beside the cache's blobs, and become the blob that it looks for.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service.checkpoints.byte_progress import ByteProgress

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

AT_ONCE: Final = 8
"""Files that come at the same time, as many as the library fetches."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")
"""What a hub tells as the etag of a large file: the hash of its bytes."""
_ETAG: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""What can name a file."""


@dataclass(frozen=True, slots=True)
class PartialFile:
    """A file of `size` bytes at `url`, of which a part may be in the cache."""

    name: str
    url: str
    size: int
    blob: Path
    """Where the cache has it once it is whole."""
    lock: Path
    """The lock that every process with this library takes for it."""
    here: int = 0
    """Bytes of it that were in the cache when it was looked for."""

    @property
    def part(self) -> Path:
        """The bytes that came so far, from the first on."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def present(self) -> int:
        """Bytes that are here and need not come."""
        with suppress(OSError):
            found = self.part.stat().st_size
            return found if found <= self.size else 0
        return 0

    def fetch(self, headers: dict[str, str], progress: ByteProgress) -> None:
        """Have the whole file as the blob. Raises what the library raises; what came until then stays."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        progress.refuse_if_left()
        for folder in (self.blob.parent, self.lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self.lock):
            if self.blob.exists():
                progress.came(self.size - self.here)
                return
            resumed = self.present()
            progress.came(resumed - self.here)
            self._go_on(resumed, headers, progress)
            # A machine that lost its power may have kept the length of a file, and not its bytes.
            if resumed and SHA256.fullmatch(self.blob.name) and _sha256(self.part) != self.blob.name:
                progress.came(-self.size)
                self._go_on(0, headers, progress)
            try:
                self.part.replace(self.blob)
            except FileNotFoundError:
                # Another process, where the file system does not honour locks.
                if not self.blob.exists():
                    raise

    def _go_on(self, present: int, headers: dict[str, str], progress: ByteProgress) -> None:
        """Fetch what is behind the first `present` bytes.

        It is written at its place, never appended: of two processes that no lock keeps apart, each writes the same
        bytes to the same places.
        """
        from huggingface_hub.file_download import http_get

        with open(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if not present:
                file.truncate()
            file.seek(present)
            http_get(
                self.url,
                file,
                resume_size=present,
                headers=headers,
                expected_size=self.size,
                displayed_filename=self.name,
                tqdm_class=progress.bar_of_one_file(present),
            )


def located(files: list[DryRunFileInfo], repo: str, endpoint: str, headers: dict[str, str]) -> list[PartialFile]:
    """Those of the files to come that are gone on with. Asks the hub for the etag of each, and raises what fails.

    The others are the library's: small ones, those of more than it fetches over HTTP, and those that come by Xet.
    """
    from huggingface_hub import constants

    large = [
        each
        for each in files
        if each.will_download and each.filename.endswith(".safetensors") and "/" not in each.filename
        if 0 < (each.file_size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE
    ]
    if not large:
        return []
    with ThreadPoolExecutor(AT_ONCE, "slipstream-hub") as pool:
        found = pool.map(lambda each: _located(each, repo, endpoint, headers), large)
        return [each for each in found if each is not None]


def _located(file: DryRunFileInfo, repo: str, endpoint: str, headers: dict[str, str]) -> PartialFile | None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, file.filename, revision=file.commit_hash, endpoint=endpoint)
    # A copy: the library may take headers out of what it is given.
    told = get_hf_file_metadata(url, headers=dict(headers), endpoint=endpoint)
    by_xet = told.xet_file_data is not None and not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
    if by_xet or told.etag is None or not _ETAG.fullmatch(told.etag) or told.size is None:
        return None
    model = Path(file.local_path).parents[2]
    lock = model.parent / ".locks" / model.name / f"{told.etag}.lock"
    found = PartialFile(file.filename, url, told.size, model / "blobs" / told.etag, lock)
    return replace(found, here=found.present())


@contextmanager
def fetching_beside(files: list[PartialFile], headers: dict[str, str], progress: ByteProgress) -> Iterator[None]:
    """Fetch `files` while the block runs; behind it they are there. If one fails, or the block, the others are left.

    Raises what failed first.
    """
    failed: list[BaseException] = []

    def fetch(file: PartialFile) -> None:
        try:
            file.fetch(dict(headers), progress)
        except BaseException as error:
            failed.append(error)
            progress.leave()

    with ThreadPoolExecutor(AT_ONCE, "slipstream-hub") as pool:
        for each in files:
            pool.submit(fetch, each)
        try:
            yield
        except BaseException as error:
            failed.append(error)
            progress.leave()
    if failed:
        raise failed[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
