"""Brings the files of a hub's model into the cache of `huggingface_hub`, and says in one line why it cannot.

The library's own variables hold: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and the proxies'.
A broken connection is taken up again where it broke. Files that came whole stay for the next start, and so does what
came of weights (`partial`). Without a network, what the cache has whole is served.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from core.errors import ModelLoadError
from service.checkpoints.model_name import COMMIT, HubModel
from service.process.sizes import shown

if TYPE_CHECKING:
    from service.engine.builder import Progress

log = logging.getLogger(__name__)

FILES: Final = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "quantize_config.json"),
    *("tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("sentencepiece.bpe.model", "spiece.model", "modules.json", "1_Pooling/config.json"),
)
"""Weights as safetensors, configurations and tokenizers. Never pickles, and never code."""
LEFT_OUT: Final = ("[!1]*/*", "1/*", "1[!_]*/*", "1_[!P]*/*", "1_*/*[!g].*", "*/*/*", "consolidated*")
"""What lies in folders is for other programs, but for how sentence-transformers pools; `consolidated` are the same
weights once more."""
MARGIN_BYTES: Final = 64 * 1024 * 1024
"""Free space that a download leaves."""
ELSEWHERE: Final = "HF_HOME or HF_HUB_CACHE names another place"
PIECE_BYTES: Final = 16 * 1024
"""Most bytes that come untold: the library tells of 10 MiB at once, for which a slow network needs minutes."""


def download(model: HubModel, progress: Progress | None, current: bool = False) -> Path:
    """The directory of the model's files, fetched if they are not there. Raises ModelLoadError; blocks.

    With `current` the cache alone is taken only where it cannot be old: for a commit, or where no hub is to be asked.
    """
    try:
        with _one_line_only():
            return _downloaded(model, progress, current)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{model}: {_reason(error, model)}") from None


def _downloaded(model: HubModel, progress: Progress | None, current: bool) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.errors import DryRunError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from service.checkpoints.byte_progress import ByteProgress
    from service.checkpoints.partial import fetching_beside, located

    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, PIECE_BYTES)
    try:
        files = _snapshot(model, dry_run=True, tqdm_class=ByteProgress.silent())
    except DryRunError as error:
        return _cached(model, error.__cause__ or error, current)
    headers = build_hf_headers(library_name="slipstream")
    parts = located(files, model.repo, constants.ENDPOINT, headers)
    total, missing = _sizes(model, files, sum(each.here for each in parts), Path(constants.HF_HUB_CACHE))
    stage = f"downloading {model} ({shown(total)})"
    told = ByteProgress(stage, total, total - missing, progress if missing else None)
    with fetching_beside(parts, headers, told):
        found = Path(_snapshot(model, without=[each.name for each in parts], tqdm_class=told.bar()))
    if parts:
        # Their blobs are there now; this links them, in the commit that came: a branch may have moved meanwhile.
        _snapshot(replace(model, revision=found.name), tqdm_class=told.bar())
    log.info("%s: commit %s, %s, of which %s came now", model, found.name, shown(total), shown(missing))
    return found


def _cached(model: HubModel, cause: BaseException, current: bool) -> Path:
    """What the cache has whole, where the hub could not be asked because of `cause`, which is raised if it has not."""
    from huggingface_hub import constants, errors

    why, fixed = _why(cause), COMMIT.fullmatch(model.revision or "") is not None
    try:
        found = Path(_snapshot(model, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        raise cause from None
    if current and not fixed and not constants.HF_HUB_OFFLINE:
        if isinstance(cause, errors.RepositoryNotFoundError | errors.GatedRepoError):
            raise cause
        old = "what the cache has of it may be old; a full commit, as ORG/NAME@COMMIT, is taken from there"
        raise ModelLoadError(f"{model}: {why}, and {old}")
    log.info("%s: taken from the cache, since %s", model, why)
    return found


@contextmanager
def _one_line_only() -> Iterator[None]:
    """The library warns of each try that fails, dozens for one download; the last one is what the error tells.

    It sets its own level when it is imported, so that comes first. What it asks is told by the HTTP library, at INFO.
    """
    import huggingface_hub.utils.logging  # noqa: F401

    library = logging.getLogger("huggingface_hub")
    requests = [logging.getLogger(name) for name in ("httpx", "httpx2")]
    before = [(each, each.level) for each in (library, *requests)]
    if "HF_HUB_VERBOSITY" not in os.environ:
        library.setLevel(logging.ERROR)
        for each in requests:
            each.setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module="huggingface_hub")
    try:
        yield
    finally:
        for each, level in before:
            each.setLevel(level)


def _snapshot(model: HubModel, without: list[str] | None = None, **options: Any) -> Any:
    """Call the library for all files but `without`."""
    from huggingface_hub import constants, snapshot_download

    return snapshot_download(
        model.repo,
        endpoint=constants.ENDPOINT,
        revision=model.revision,
        allow_patterns=list(FILES),
        ignore_patterns=[*LEFT_OUT, *map(glob.escape, without or ())],
        library_name="slipstream",
        **options,
    )


def _sizes(model: HubModel, files: Any, here: int, cache: Path) -> tuple[int, int]:
    """Bytes of all files, and of those to come, less `here` of them that came before.

    Raises ModelLoadError if there are no weights, or too little space, and OSError if the cache cannot be written.
    """
    if not any(each.filename.endswith(".safetensors") for each in files):
        raise ModelLoadError(f"{model} has no *.safetensors files on the hub; other weight formats are not read")
    total = sum(max(0, each.file_size or 0) for each in files)
    missing = max(0, sum(max(0, each.file_size or 0) for each in files if each.will_download) - here)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if missing and missing + MARGIN_BYTES > free:
        needed = f"{shown(missing)} more, beside {shown(MARGIN_BYTES)} that stay free"
        raise ModelLoadError(f"{model} needs {needed}, and {there} has {shown(free)} free; {ELSEWHERE}")
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(cache))
    return total, missing


def _reason(error: Exception, model: HubModel) -> str:
    """One line that says what went wrong, and what to do."""
    from huggingface_hub import constants, errors

    hub = _without_password(constants.ENDPOINT)
    status = _status(error) or _status(error.__cause__)
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: ask for access on {hub}/{model.repo}, and give the token of that account as HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub} has the model, and no revision {model.revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        advice = "a private one needs HF_TOKEN" if not _has_token() else "the token of HF_TOKEN may not see it"
        return f"no directory of that name is here, and no such model on {hub} ({advice})"
    if status in (401, 403):
        return f"{hub} refused the token (status {status}); HF_TOKEN has to be valid and allowed to read"
    if status is not None:
        return f"{hub} answered with status {status}, and the cache does not have all of its files; try again later"
    # The library under it is httpx for some of its releases, and httpx2 for later ones.
    lost = type(error).__module__.startswith("httpx")
    if lost or isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return _unreachable(error, hub, constants.HF_HUB_OFFLINE)
    if isinstance(error, OSError) and error.errno is not None:
        return _of_the_disk(error, constants.HF_HUB_CACHE)
    return f"{type(error).__name__}: {_first_line(error)}"


def _unreachable(error: Exception, hub: str, offline: bool) -> str:
    if offline:
        name = _offline_variable()
        return f"{name} is set, and the cache does not have all of its files; {name}=0 lets the server fetch them"
    cause = error.__cause__ or error
    return f"{hub} cannot be reached ({_first_line(cause)}), and the cache does not have all of its files"


def _why(cause: BaseException) -> str:
    """Why the hub was of no use, in a few words."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"{_offline_variable()} is set"
    hub, status = _without_password(constants.ENDPOINT), _status(cause)
    if status is not None:
        return f"{hub} answered with status {status}"
    return f"{hub} cannot be reached ({_first_line(cause)})"


def _offline_variable() -> str:
    """The one that is set: the library takes the first that is not empty."""
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "HF_HUB_OFFLINE")


def _of_the_disk(error: OSError, cache: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {cache} is full; {ELSEWHERE}"
    return f"{error.filename or cache} cannot be written ({os.strerror(error.errno or 0).lower()}); {ELSEWHERE}"


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _status(error: BaseException | None) -> int | None:
    """Of the hub's answer that `error` tells of."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _without_password(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
