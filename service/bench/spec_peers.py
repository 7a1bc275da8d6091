"""Other engines' own n-gram speculation on the same prompts, each in a process of another interpreter for all rounds.

The glue around them is `service/bench/foreign_engine.py`, which needs nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.bench.spec_rounds import Ran
from service.bench.spec_works import Ask

MODULES = {"llama.cpp": "llama_cpp", "vLLM": "vllm"}
"""By the name in the table, the module that is imported."""
PRELOADED = {"llama.cpp": (), "vLLM": ("libiomp5.so", "libtcmalloc_minimal.so.4")}
"""Libraries that it warns to be slower without: each is preloaded where it is installed."""
NOT_INSTALLED = "not installed"
SCRIPT = Path(__file__).with_name("foreign_engine.py")


class PeerFailed(Exception):
    """Another engine ended or could not start; says what it printed last."""


def is_installed(python: str, peer: str) -> bool:
    """Whether the interpreter `python` finds the module of `peer`; False without such an interpreter."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[peer]!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that is asked and answers through pipes, and close these."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


class ForeignEngine:
    """A `Runner`: one stream, greedy. `drafts`: most tokens of its n-gram drafts, 0 for none."""

    def __init__(
        self,
        python: str,
        peer: str,
        model: str,
        drafts: int,
        dtype: str,
        threads: int,
        folder: Path,
        *,
        context: int = 1024,
        streams: int = 4,
    ) -> None:
        """Blocks until it is ready. `folder`: for converted weights and what it prints. Raises PeerFailed.

        `context`: tokens of the longest sequence; `streams`: requests that it may serve at once.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{MODULES[peer]}-{drafts}.log"
        task = {"module": MODULES[peer], "model": model, "drafts": drafts, "dtype": dtype, "threads": threads}
        task |= {"context": context, "streams": streams}
        folders = (Path(python).parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu"))
        preloaded = [str(each / name) for name in PRELOADED[peer] for each in folders if (each / name).exists()]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(SCRIPT), json.dumps(task | {"folder": str(folder)})],
                env=env | {"OMP_NUM_THREADS": str(threads), "LD_PRELOAD": ":".join(preloaded)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.info: dict[str, Any] = self._read() | {"preloaded": preloaded}
            """Versions and settings."""
        except PeerFailed:
            self.close()
            raise

    async def run(self, asks: Sequence[Ask], streams: int, scope: str) -> Ran:
        """See `Runner`. Raises PeerFailed."""
        assert streams == 1 and all(ask.temperature == 0.0 for ask in asks), "one stream, greedy"
        return await asyncio.to_thread(self.run_groups, [[ask] for ask in asks])

    def run_groups(self, groups: Sequence[Sequence[Ask]]) -> Ran:
        """Serve one group after the other, the requests of each at once, greedily. Raises PeerFailed."""
        assert self._process.stdin is not None
        asked = [[[ask.prompt, ask.max_new] for ask in group] for group in groups]
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_read` says why.
        answer = self._read()
        return Ran(tuple(map(tuple, answer["outputs"])), answer["seconds"])

    def close(self) -> None:
        """End the process; it keeps no state."""
        end(self._process)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._log.read_text(errors="replace")[-1500:])
        found: dict[str, Any] = json.loads(line)
        return found
