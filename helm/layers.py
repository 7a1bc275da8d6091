"""The layers of an image, read from the archive that `docker save` writes, as it comes: nothing is kept on the disk."""

from __future__ import annotations

import json
import posixpath
import tarfile
from dataclasses import dataclass
from typing import IO, Any

MAX_JSON_BYTES = 4 << 20
"""The archive's own descriptions are smaller; what is larger is a layer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an image."""

    bytes: int
    """Of its files unpacked, as the archive holds them."""
    made_by: str
    """The instruction of the Dockerfile, in one line."""


def read_layers(stream: IO[bytes]) -> list[Layer]:
    """Layers of the only image in an archive, lowest first; empty where the stream holds no image.

    Raises ValueError if the image's history and its layers do not match.
    """
    sizes: dict[str, int] = {}
    texts: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                # Engines before 25 link layers that are equal.
                linked = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
                sizes[member.name] = sizes[linked] if member.issym() else member.size
                if member.isfile() and member.size <= MAX_JSON_BYTES:
                    texts[member.name] = _read(archive, member)
    except tarfile.ReadError:
        return []
    if "manifest.json" not in texts:
        return []
    (manifest,) = json.loads(texts["manifest.json"])
    made = [each for each in json.loads(texts[manifest["Config"]])["history"] if not each.get("empty_layer")]
    names: list[str] = manifest["Layers"]
    if len(made) != len(names):
        raise ValueError(f"the image has {len(names)} layers, and a history of {len(made)}")
    return [Layer(sizes[name], _instruction(each)) for name, each in zip(names, made, strict=True)]


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a regular file has contents"
    return file.read()


def _instruction(made: dict[str, Any]) -> str:
    """As it stands in the Dockerfile, without what the builder wraps around it."""
    line = " ".join(str(made.get("created_by") or made.get("comment") or "(not told)").split())
    run = line.removeprefix("RUN ").removesuffix("# buildkit").strip()
    return run.removeprefix("/bin/sh -c #(nop) ") if "#(nop)" in run else run.replace("/bin/sh -c ", "RUN ", 1)
