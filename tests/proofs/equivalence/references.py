"""What the oracle has said before, so that it need not be asked in every run.

An answer is kept under a digest of all that it depends on: weights and configuration of the checkpoint, the question,
and the versions of `transformers` and PyTorch. If one of them differs, the oracle is asked. `make nightly` asks it
always (`REFERENCES=check`), and fails where an answer is not the one that is kept. After a change, write them anew:

    REFERENCES=write python -m pytest tests/proofs/equivalence tests/unit/core/engine -m "not soak and not nightly"
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

MODE_ENV = "REFERENCES"
MODES = ("kept", "check", "write")

Outputs = list[list[int] | None]
"""One output for each prompt; None where the oracle itself was undecided."""


@dataclass
class References:
    """The answers in `path`: {digest: outputs}, one a line."""

    path: Path
    mode: str = "kept"
    answers: dict[str, Outputs] = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"{MODE_ENV}={self.mode}: choose from {', '.join(MODES)}")
        fresh = self.mode == "write" or not self.path.exists()
        self.answers = {} if fresh else json.loads(self.path.read_text())

    def outputs(self, directory: Path, question: Any, ask: Callable[[], Sequence[Sequence[int] | None]]) -> Outputs:
        """The answer to `question`, which JSON can hold, about the checkpoint in `directory`."""
        key = digest(directory, question)
        kept = self.answers.get(key)
        if kept is not None and self.mode == "kept":
            return kept
        said = [None if output is None else list(output) for output in ask()]
        if self.mode == "check" and kept is not None:
            assert said == kept, f"{self.path.name} has another answer about {directory.name} than transformers"
        if self.mode == "write":
            self.answers[key] = said
            compact = json.JSONEncoder(separators=(",", ":")).encode
            lines = (f"{compact(each)}: {compact(self.answers[each])}" for each in sorted(self.answers))
            self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return said


def digest(directory: Path, question: Any) -> str:
    """Of everything that an answer depends on."""
    found = hashlib.sha256(json.dumps([transformers.__version__, torch.__version__, question]).encode())
    for path in sorted((*directory.glob("*config.json"), *directory.glob("*.safetensors"))):
        if path.name != "tokenizer_config.json":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:24]


@cache
def references() -> References:
    """Those of the repository; `REFERENCES` says how they are used. Raises ValueError for an unknown mode."""
    return References(Path(__file__).with_name("references.json"), os.environ.get(MODE_ENV, "kept"))
