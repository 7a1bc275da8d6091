"""The environment of a rank that torchrun starts, and of processes that are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig, NodesConfig
from core.engine.nodes import meeting_of
from core.errors import ConfigError
from service.config.torchrun import launched

MADE = EngineConfig(model=ModelConfig("x", tensor_parallel=4))
RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}


def without(name: str) -> dict[str, str]:
    return {each: value for each, value in RANK.items() if each != name}


def test_a_process_is_the_rank_that_it_was_started_as() -> None:
    found = launched(MADE, RANK | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).nodes
    assert found == NodesConfig(4, 3, "localhost", 29400, first_device=1, hosted=True)
    assert launched(MADE, RANK | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).nodes.hosted is False
    again = launched(MADE, RANK | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert again.nodes.attempt == 2 and meeting_of(again, torch.device("cpu"), leads=False).attempt == 2
    assert launched(MADE, without("LOCAL_RANK")).nodes == NodesConfig(4, 3, "localhost", 29400)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_not_all_there_is_no_rank(name: str) -> None:
    assert launched(MADE, without(name)) is MADE
    assert launched(MADE, RANK | {name: ""}) is MADE


def test_flags_win() -> None:
    told = EngineConfig(model=ModelConfig("x", tensor_parallel=4), nodes=NodesConfig(2, 1))
    assert launched(told, RANK) is told


def test_one_process_is_an_engine_by_itself() -> None:
    assert launched(EngineConfig(), RANK | {"WORLD_SIZE": "1", "RANK": "0"}) == EngineConfig()


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"WORLD_SIZE": "2"}, "the environment is that of 2 processes (WORLD_SIZE), and the engine has 4 ranks: set "),
        ({"RANK": "first"}, "RANK must be a number; got 'first'"),
        ({"RANK": "4"}, "node_rank must be less than nnodes, which is 4; got 4"),
        ({"MASTER_ADDR": "10.0.0.1"}, "master_addr is not loopback: rank_secret_file is needed"),
    ],
)
def test_an_environment_of_another_engine_is_refused(env: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        launched(MADE, RANK | env)
