"""Which calls the served model can answer, and the errors that send a caller to those when it cannot."""

from __future__ import annotations

from core.errors import Unsupported
from core.types.io import ModelInfo
from core.types.labels import Labels


def refuse_unless_generating(info: ModelInfo) -> None:
    """Raise Unsupported if the model puts out no text."""
    if not info.generates:
        raise Unsupported(f"the served model puts out no text; {_instead(info)}")


def refuse_unless_embedding(info: ModelInfo) -> None:
    """Raise Unsupported if the model has no hidden states to embed with."""
    if not info.embedding_dimension:
        raise Unsupported(f"the served model gives no hidden states to embed with; {_instead(info)}")


def labels_of(info: ModelInfo) -> Labels:
    """The labels that Classify gives scores of. Raises Unsupported if there are none."""
    if info.labels is None:
        raise Unsupported(f"the served model has no labels to judge by; {_instead(info)}")
    return info.labels


def relevance_of(info: ModelInfo) -> int:
    """The label whose score Score gives. Raises Unsupported if the model has no such label."""
    labels = labels_of(info)
    if labels.relevance is None:
        raise Unsupported(
            f"the served model has {len(labels.names)} labels and none says relevance; use Classify for their scores"
        )
    return labels.relevance


def _instead(info: ModelInfo) -> str:
    labels = info.labels
    known = {
        "Generate": info.generates,
        "Embed": info.embedding_dimension > 0,
        "Classify": labels is not None,
        "Score": labels is not None and labels.relevance is not None,
    }
    served = [name for name, answered in known.items() if answered]
    return f"use {' or '.join(served)}" if served else "it can be asked for tokens only"
