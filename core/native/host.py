"""The host's work in C++, compiled for this machine in seconds: `python -m core.native.host` does it before a start.

What it does is done in Python too, with equal results. So nothing waits for it: it takes over once it is ready.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from core.native.kept_library import ExtensionUnavailable
from core.native.library import FLAGS, Library, main

log = logging.getLogger(__name__)

PARTS = "host.cpp confidence.h draws.h peaks.h relay.h suffix_drafter.h suffix_index.h trial.h".split()
SOURCES = Path(__file__).with_name("host")
HOST = Library(
    name="slipstream_host",
    at="core.native.host:HOST",
    sources=tuple(SOURCES / name for name in PARTS),
    uses_torch=False,
    # Python rounds a product before it is added, so compiled code must: a draft is worth its place by the last bit.
    flags=(*FLAGS, "-ffp-contract=off"),
)


class HostCode:
    """The compiled module, once there is one. Any thread may look."""

    def __init__(self) -> None:
        self.module: Any = None
        """None where Python does the work, for now or for ever."""

    def fetch(self, native: str) -> None:
        """Load the module now if it was compiled before, else beside the caller; `native`: as in `ModelConfig`.

        With "wait" it is compiled now, with "off" never.
        """
        if native == "off":
            return
        if native == "wait" or HOST.is_built():
            self._load()
        else:
            threading.Thread(target=self._load, name="slipstream-host-code", daemon=True).start()

    def _load(self) -> None:
        try:
            self.module = HOST.load()
        except ExtensionUnavailable as reason:
            log.warning("no compiled code for the host's part of a step, Python goes on: %s", reason)
        except BaseException:  # a thread of its own: nothing above it would tell of a panic
            log.exception("no compiled code for the host's part of a step, Python goes on: it failed")


if __name__ == "__main__":
    main(HOST)
