"""What is proved where this process has a part of a model's layers; `core.models.stages` has the parts."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedModel

from core.models.base import ModelSpec
from core.models.hf.packed_attention import PackedContext
from core.models.hf.recurrent import StateContext
from core.models.hf.self_check import CheckResult


class Part(Protocol):
    """One process's part; all processes prove theirs at the same time, by the same steps."""

    @property
    def told(self) -> str:
        """By which setting it is a part, as the end of what is refused."""
        ...

    def judged(self, result: CheckResult) -> CheckResult:
        """What all make of a check: the process that has the logits judges them."""
        ...

    def model(
        self, module: PreTrainedModel, spec: ModelSpec, context: PackedContext, states: StateContext | None
    ) -> Any:
        """The `TransformersModel` around the module tree of this part; `spec` is of its layers."""
        ...
