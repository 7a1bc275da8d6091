"""The labels of a checkpoint with a classification head, as its config.json tells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from core.errors import ModelLoadError
from core.types.labels import Activation, Labels

SUFFIX: Final = "ForSequenceClassification"
"""How architectures of such checkpoints end."""
MAX_LABELS: Final = 4096
"""More labels than that would make an answer too long for clients, with every input of a call."""
LONE: Final = re.compile("[\ud800-\udfff]")
"""Half of a character, which JSON can tell and no message can."""

_BY_PROBLEM: Final = {
    "regression": Activation.NONE,
    "multi_label_classification": Activation.SIGMOID,
}
"""What is not here, as `single_label_classification`, goes by how many labels there are: of one it makes no share."""
_BY_MODULE: Final = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX}
"""Last part of the names that sentence-transformers writes for its cross-encoders."""


def read_labels(file: Path, config: Mapping[str, Any], architecture: str) -> Labels | None:
    """The labels of `config`, the object in `file`; None for an architecture without a classification head.

    Raises ModelLoadError for labels that cannot be used. As in transformers there are two labels unless the
    configuration says otherwise. What its numbers mean is what sentence-transformers or `problem_type` say, else as in
    transformers' pipeline: of one label each for itself, of several shares of one.
    """
    if not architecture.endswith(SUFFIX):
        return None
    names = _names(file, config)
    alone = len(names) == 1
    activation = _told(config) or (Activation.SIGMOID if alone else Activation.SOFTMAX)
    return Labels(names, activation, relevance=0 if alone else None)


def _told(config: Mapping[str, Any]) -> Activation | None:
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str) and (found := _BY_MODULE.get(named.rpartition(".")[2])) is not None:
        return found
    problem = config.get("problem_type")
    return _BY_PROBLEM.get(problem) if isinstance(problem, str) else None


def _names(file: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("id2label")
    if given is None:
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LABELS:
            raise ModelLoadError(f"{file}: num_labels must be 1 to {MAX_LABELS}, got {count!r:.100}")
        return tuple(f"LABEL_{number}" for number in range(count))
    if not isinstance(given, Mapping) or not 1 <= len(given) <= MAX_LABELS:
        raise ModelLoadError(f"{file}: id2label must name 1 to {MAX_LABELS} labels")
    by_number = {str(number): name for number, name in given.items()}
    names = tuple(by_number.get(str(number)) for number in range(len(given)))
    wrong = next((number for number, name in enumerate(names) if not isinstance(name, str)), None)
    if wrong is not None:
        raise ModelLoadError(f"{file}: id2label has no name for label {wrong}")
    told = tuple(str(name) for name in names)
    foreign = next((number for number, name in enumerate(told) if LONE.search(name)), None)
    if foreign is not None:
        raise ModelLoadError(f"{file}: id2label has a lone surrogate in the name of label {foreign}")
    return told
