"""Models whose experts several engines share: refused by name where they cannot be, and proved in all or in none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, ModelConfig, SpeculationConfig
from core.distributed.world import World
from core.engine.peers import open_peers
from core.errors import ConfigError, ModelLoadError
from core.model_config import Peers
from core.models.config import read_checkpoint_config
from core.models.experts.joint_model import JointProof, load_joint
from core.models.experts.shared_experts import ExpertLayers
from core.models.hf.self_check import CheckResult
from tests.unit.core.models.test_shared_experts import Exchange, Meeting, together

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [
        ("llama", 2, "expert_parallel is not possible: transformers shares out no experts of 'llama'"),
        ("qwen3_moe", 3, "expert_parallel is not possible with 3 engines: num_local_experts is 8, no multiple of it"),
        ("mixtral", 5, "expert_parallel is not possible with 5 engines: num_local_experts is 4, no multiple of it"),
        ("deepseek_v3", 7, "expert_parallel is not possible with 7 engines: n_routed_experts is 4, no multiple of it"),
    ],
)
def test_models_whose_experts_cannot_be_shared_out_are_refused_by_name(
    checkpoint_of: Callable[[str], Path], kind: str, size: int, why: str
) -> None:
    checkpoint, exchange = read_checkpoint_config(checkpoint_of(kind)), Exchange(Meeting(size), 0)
    with pytest.raises(ModelLoadError) as refused:
        load_joint(checkpoint, ModelConfig(str(checkpoint.path)), CPU, lambda *_: None, exchange)
    assert refused.value.message == why


@pytest.mark.parametrize(
    ("setting", "config"),
    [
        ("tensor_parallel", EngineConfig(ModelConfig("m", tensor_parallel=2))),
        ("pipeline_parallel", EngineConfig(ModelConfig("m", pipeline_parallel=2))),
        ("overlap off", EngineConfig(ModelConfig("m"), executor=ExecutorConfig(overlap=False))),
        ("deterministic", EngineConfig(ModelConfig("m", deterministic=True))),
        ("speculative", EngineConfig(ModelConfig("m"), speculation=SpeculationConfig("ngram"))),
    ],
)
def test_settings_that_are_not_possible_are_refused_by_name(
    setting: str, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "join", lambda *_: pytest.fail("it is let in"))
    shared = dataclasses.replace(config, model=dataclasses.replace(config.model, peers=Peers(1, 2, 9)))
    with pytest.raises(ConfigError, match=f"^expert_parallel is not possible with {setting} yet$"):
        open_peers(shared, CPU)
    assert open_peers(config, CPU) is None, "it shares nothing"


@pytest.mark.parametrize(
    ("of_the_other", "told"),
    [
        (CheckResult(True, 0.5, 1.0), CheckResult(True, 0.5, 1.0)),
        (CheckResult(False, 1.5, 1.0), CheckResult(False, 1.5, 1.0)),
        (CheckResult(False, math.nan, 1.0), CheckResult(False, math.inf, 1.0)),
    ],
    ids=["both pass", "one fails", "no numbers"],
)
def test_a_proof_that_one_engine_fails_has_failed_in_all(of_the_other: CheckResult, told: CheckResult) -> None:
    def judged(exchange: Any) -> CheckResult:
        own = of_the_other if exchange.rank else CheckResult(True, 0.25, 1.0)
        return JointProof(ExpertLayers(exchange)).judged(own)

    assert together(judged, judged) == [told, told], "with the error of the one that failed"
