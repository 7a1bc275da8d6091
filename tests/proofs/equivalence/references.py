"""What the oracle has said before, so that it need not be asked in every run.

An answer is kept under a digest of all that it depends on: weights and configuration of the checkpoint, the question,
and what `made_by` names. If one of them differs, the oracle is asked. `make nightly` asks it always
(`REFERENCES=check`), and fails where an answer is not the one that is kept, and where one is missing that the file
should have. After a change, write them anew, which keeps those of other versions and processors:

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
    """The answers in `path`: {what they were made by: {digest: outputs}}, one a line."""

    path: Path
    mode: str = "kept"
    kept: dict[str, dict[str, Outputs]] = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"{MODE_ENV}={self.mode}: choose from {', '.join(MODES)}")
        self.kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        if self.mode == "write":
            self.kept[made_by()] = {}

    def outputs(self, directory: Path, question: Any, ask: Callable[[], Sequence[Sequence[int] | None]]) -> Outputs:
        """The answer to `question`, which JSON can hold, about the checkpoint in `directory`."""
        key = digest(directory, question)
        kept = self.kept.get(made_by(), {}).get(key)
        if kept is not None and self.mode == "kept":
            return kept
        said = [None if output is None else list(output) for output in ask()]
        if self.mode == "check" and made_by() in self.kept:
            # A file that is out of date costs every run the oracle's time, and no test fails of it.
            assert kept is not None, f"{self.path.name} has no answer about {directory.name}: {MODE_ENV}=write"
            assert said == kept, f"{self.path.name} has another answer about {directory.name} than transformers"
        if self.mode == "write":
            self.kept[made_by()][key] = said
            self.path.write_text(lines(self.kept))
        return said


def lines(kept: dict[str, dict[str, Outputs]]) -> str:
    """JSON with a line for each answer, in an order of its own, so that a change shows what it changed."""
    compact = json.JSONEncoder(separators=(",", ":")).encode
    groups = []
    for maker in sorted(kept):
        answers = (f"{compact(each)}: {compact(kept[maker][each])}" for each in sorted(kept[maker]))
        groups.append(f"{compact(maker)}: {{\n" + ",\n".join(answers) + "\n}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def made_by() -> str:
    """Versions, and the vector instructions of this processor: random weights of a seed differ with them."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"transformers {transformers.__version__}, torch {torch.__version__}, {capability}"


def digest(directory: Path, question: Any) -> str:
    """Of the question and the checkpoint."""
    found = hashlib.sha256(json.dumps(question).encode())
    for path in sorted((*directory.glob("*config.json"), *directory.glob("*.safetensors"))):
        if path.name != "tokenizer_config.json":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:24]


@cache
def references() -> References:
    """Those of the repository; `REFERENCES` says how they are used. Raises ValueError for an unknown mode."""
    return References(Path(__file__).with_name("references.json"), os.environ.get(MODE_ENV, "kept"))
