"""What speculation is made of, and which engines cannot have it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from core.config import SpeculationConfig
from core.errors import StartupError
from core.models.base import ModelSpec
from core.relay.payload import Column
from core.scheduler.draft_depth import Depth
from core.speculation.drafter import Drafter, draft_columns
from core.speculation.suffix_drafter import SuffixDrafter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speculation:
    """`drafter` guesses tokens, up to `most` behind each; `depth` says which of them a step verifies."""

    drafter: Drafter
    most: int
    depth: Depth | None = None
    """None until the model was timed: then what promises most."""

    def __post_init__(self) -> None:
        assert self.most >= 1, self.most

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the FutureMap that it needs."""
        return (*draft_columns(self.most), *self.drafter.columns)


def build_speculation(config: SpeculationConfig, reason: str | None) -> Speculation | None:
    """What the configuration asks for; None where it is off, or `auto` and not possible for `reason`.

    Raises StartupError where it is asked for by name and not possible.
    """
    if config.method == "off":
        return None
    if reason is None:
        return Speculation(SuffixDrafter(config.index_bytes, config.max_drafts), config.max_drafts)
    if config.method != "auto":
        raise StartupError(f"speculative={config.method} is not possible: {reason}")
    logger.info("no drafts are made: %s", reason)
    return None


def why_no_speculation(spec: ModelSpec, device: torch.device) -> str | None:
    """Why an engine cannot verify drafts, as the end of a sentence; None if it can."""
    if device.type != "cpu":
        return f"drafts are verified on the CPU, and the model is on {device.type}"
    if spec.encoder is not None:
        return "encoder-decoders are not speculated with"
    return None
