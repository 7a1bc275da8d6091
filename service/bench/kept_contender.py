"""An engine in a process of its own, kept for several workloads: engines take turns without a start for each.

`python -m service.bench.kept_contender DIRECTORY TASK` serves what stands on its standard input: a line with the name
of a workload and the number of a round, each answered by a line with its figures. `service.bench.families` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from service.bench.contenders import CONTENDERS
from service.bench.spec_peers import ForeignEngine, end
from service.bench.spec_works import Ask
from service.bench.workloads import Measured, measure, workload

ROOT: Final = Path(__file__).resolve().parents[2]


class EngineFailed(Exception):
    """The process of an engine ended; the message is the end of what it printed."""


class Kept(Protocol):
    """An engine that stays between two workloads."""

    def rate(self, load: str, number: int) -> float:
        """Output tokens per second of the workload `load` in round `number`. Raises EngineFailed or PeerFailed."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class KeptContender:
    """A contender of `service.bench.cpu` in its process."""

    def __init__(self, directory: str, task: dict[str, Any], log: Path) -> None:
        """`task`: contender, dtype, quantization, threads. `log`: where to put what it prints."""
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "service.bench.kept_contender", directory, json.dumps(task)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(task["threads"])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def rate(self, load: str, number: int) -> float:
        """See `Kept`."""
        return self.measured(load, number).rate

    def measured(self, load: str, number: int) -> Measured:
        """Figures of the workload `load` in round `number`. Raises EngineFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([load, number]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # What it printed says why.
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(self._log.read_text(errors="replace")[-1500:])
        return Measured(**json.loads(line))

    def close(self) -> None:
        """See `Kept`."""
        end(self._process)


class KeptPeer:
    """vLLM under an interpreter that has it."""

    def __init__(self, engine: ForeignEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size

    def rate(self, load: str, number: int) -> float:
        """See `Kept`."""
        work = workload(load, self._vocab_size, number)
        asks = [Ask(tuple(request["prompt"]), request["max_new"]) for request in work.requests]
        if work.lead:
            self._engine.run_groups([asks[: work.lead]])
        timed = asks[work.lead :]
        ran = self._engine.run_groups([timed] if work.together else [[ask] for ask in timed])
        short = [
            n for n, (ask, output) in enumerate(zip(timed, ran.outputs, strict=True)) if len(output) != ask.max_new
        ]
        if short:
            raise EngineFailed(f"requests {short} were answered with another number of tokens than they asked for")
        return sum(map(len, ran.outputs)) / ran.seconds

    def close(self) -> None:
        """See `Kept`."""
        self._engine.close()


def main(directory: str, text: str) -> None:
    """The process: makes the engine, then measures what it is told to until its input ends."""
    # Engines print where they like; the first file is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(text)
    vocab = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    contender = CONTENDERS[task["contender"]](directory, task["dtype"], task["quantization"], task["threads"])
    for line in sys.stdin:
        load, number = json.loads(line)
        print(json.dumps(asdict(measure(contender, workload(load, vocab, number)))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
