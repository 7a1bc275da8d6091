"""Settings: a flag over the environment over the file over the default, and errors that name the source."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SchedulerConfig
from core.errors import ConfigError
from core.models.bundled import bundled_model_dir
from service.config.server_config import REFUSAL_ROOM, ServerConfig
from service.config.sources import Setting, load, settings_of, values_of
from service.frontends.process import read_config

SETTINGS = settings_of(ServerConfig)


def written(folder: Path, text: str) -> str:
    path = folder / "slipstream.yaml"
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    file = written(tmp_path, "page_size: 4\nport: 4\nseed: 4\noverlap: false\n")
    env = {"SLIPSTREAM_PORT": "3", "SLIPSTREAM_SEED": "3"}
    config = load(ServerConfig, {"seed": 2, "port": None}, env, file)
    engine = config.engine
    assert (engine.seed, config.port, engine.memory.page_size, engine.executor.overlap) == (2, 3, 4, False)
    assert engine.memory.max_running_requests == 256


def test_defaults_are_those_of_core() -> None:
    config = load(ServerConfig, {}, {})
    assert config.engine == EngineConfig(ModelConfig(), MemoryConfig(), SchedulerConfig(), ExecutorConfig())
    served = ModelConfig(str(bundled_model_dir()), served_name="slipstream-bundled")
    assert config.engine_config() == dataclasses.replace(config.engine, model=served)


def test_every_setting_reaches_the_engine_or_is_the_services_own() -> None:
    config = ServerConfig.of(
        model="x",
        served_model_name="n",
        dtype="bfloat16",
        context_length=99,
        device="cpu",
        overlap=False,
        cpu_threads=3,
        assert_mode="trap",
        hang_timeout=7.0,
        page_size=8,
        max_total_tokens=800,
        max_running_requests=5,
        prefix_cache="none",
        chunked_prefill_size=64,
        mixed_chunk=False,
        schedule_policy="lpm",
        priority_preemption=False,
        priority_preemption_threshold=5,
        max_queued_requests=6,
        queue_timeout=1.5,
        seed=11,
        max_pending_tokens=77,
    )
    assert config.engine_config() == EngineConfig(
        ModelConfig("x", "bfloat16", 99, "n"),
        MemoryConfig(8, 5, 800, "none"),
        SchedulerConfig(64, False, "lpm", 6, 1.5, False, 5),
        ExecutorConfig("cpu", False, "trap", 3, 7.0),
        seed=11,
        max_pending_tokens=77,
    )
    assert config.concurrency_limit == 11 + REFUSAL_ROOM


def leaves(config: Any, at: str = "") -> dict[str, Any]:
    """Every value of nested dataclasses, by its path."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        found |= leaves(value, f"{at}{field.name}.") if dataclasses.is_dataclass(value) else {at + field.name: value}
    return found


OTHERS = {"speculative": "ngram", "pair_template": "{query} {document}", "transfer_peers": "127.0.0.9/32"}
"""Of settings whose texts have a form."""
BESIDE = {"nnodes": {"tensor_parallel": 101}, "node_rank": {"tensor_parallel": 102, "nnodes": 102}}
"""What a setting needs beside it."""


def another(setting: Setting) -> Any:
    """A value that is not the default."""
    if setting.choices:
        return next(each for each in setting.choices if each != setting.default)
    if setting.kind is tuple:
        return (("a", "/a"),)
    if setting.kind is bool:
        return not setting.default
    if setting.name in OTHERS:
        return OTHERS[setting.name]
    return "other" if setting.kind is str else setting.kind((setting.default or 1) + 100)


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if each.place[0] == "engine"])
def test_each_setting_of_the_engine_changes_one_value_there(name: str) -> None:
    value = another(SETTINGS[name])
    beside = BESIDE.get(name, {})
    before, after = (leaves(ServerConfig.of(**beside, **more)) for more in ({}, {name: value}))
    changed = {place: after[place] for place in after if after[place] != before[place]}
    assert changed == {".".join(SETTINGS[name].place): value}


def test_a_configuration_is_made_again_from_its_values() -> None:
    """What a front end is told of the engine process's configuration, on its standard input."""
    config = ServerConfig.of(port=7, max_lora_rank=9, adapter=(("a", "/a"),), queue_timeout=2.5)
    assert read_config(json.dumps(values_of(config))) == config
    values = values_of(config)
    assert (values["port"], values["max_lora_rank"], values["model"]) == (7, 9, "")
    assert ServerConfig.of(**values) == config and ServerConfig.of() == ServerConfig()
    with pytest.raises(TypeError, match="no setting 'pagesize'"):
        ServerConfig.of(pagesize=4)


def test_the_checkpoint_is_the_one_asked_for_and_its_name_its_own() -> None:
    asked = ServerConfig.of(model="/a/b").engine_config().model
    assert (asked.path, asked.served_name) == ("/a/b", None)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"page_size": 0}, "page_size must be at least 1; got 0"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1; got 0"),
        ({"schedule_policy": "sjf"}, "schedule_policy must be one of fcfs, lpm, priority; got 'sjf'"),
        ({"max_pending_tokens": 0}, "max_pending_tokens must be at least 1; got 0"),
        ({"drain_grace": -1.0}, "drain_grace must be at least 0; got -1.0"),
        ({"weight_version": "step 1"}, "weight_version: must be 1 to 128 characters of A-Z a-z 0-9 . _ : / @ + -"),
        ({"max_encoder_tokens": 8}, "max_encoder_tokens must be at least 16; got 8"),
    ],
)
def test_bounds_hold_however_a_configuration_is_made(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ServerConfig.of(**wrong)


def test_keys_may_have_dashes_and_values_may_be_null(tmp_path: Path) -> None:
    file = written(tmp_path, "max-running-requests: 7\nqueue_timeout: null\nrate_limit: 2\n")
    config = load(ServerConfig, {}, {}, file)
    engine = config.engine
    found = (engine.memory.max_running_requests, engine.scheduler.default_queue_timeout, config.rate_limit)
    assert found == (7, None, 2.0)
    unset = load(ServerConfig, {}, {"SLIPSTREAM_QUEUE_TIMEOUT": "none"}, None).engine
    assert unset.scheduler.default_queue_timeout is None
    assert load(ServerConfig, {}, {"SLIPSTREAM_PORT": ""}, None).port == 50051
    assert load(ServerConfig, {}, {}, written(tmp_path, "")).port == 50051


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("on", True), ("FALSE", False), ("0", False)])
def test_switches_in_words(text: str, value: bool) -> None:
    assert load(ServerConfig, {}, {"SLIPSTREAM_OVERLAP": text}).engine.executor.overlap is value


def test_a_kubernetes_service_of_our_name_does_not_break_the_port() -> None:
    assert load(ServerConfig, {}, {"SLIPSTREAM_PORT": "tcp://10.0.0.1:50051"}).port == 50051


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pagesize: 4", "unknown key 'pagesize'; did you mean page_size?"),
        ("zzz: 4", "unknown key 'zzz'"),
        ("port: abc", "port: 'abc' is not a whole number"),
        ("port: 1.5", "port: 1.5 is not a whole number"),
        ("port: true", "port: True is not a whole number"),
        ("port: null", "port: needs a value"),
        ("overlap: maybe", "overlap: 'maybe' is not true or false"),
        ("rate_limit: .nan", "rate_limit: nan is not a number"),
        ("rate_limit: 0", "rate_limit: must be at least 0.001; got 0"),
        ("dtype: int4", "dtype: must be one of auto, float32, bfloat16; got 'int4'"),
        ("port: 1\nport-: 2", "unknown key 'port-'"),
        ("max-queued-requests: 1\nmax_queued_requests: 2", "max_queued_requests is given twice"),
        ("- a", "must hold keys and values at the top level"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_bad_file_names_itself_and_the_key(tmp_path: Path, text: str, told: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(ServerConfig, {}, {}, file)
    assert refused.value.message.startswith(file) and told in refused.value.message
    assert "\n" not in refused.value.message


def test_bad_flags_and_variables_name_themselves() -> None:
    with pytest.raises(ConfigError, match=r"^--max-queued-requests: must be at least 1"):
        load(ServerConfig, {"max_queued_requests": 0}, {})
    with pytest.raises(ConfigError, match=r"^SLIPSTREAM_WRITE_TIMEOUT: 'soon' is not a number"):
        load(ServerConfig, {}, {"SLIPSTREAM_WRITE_TIMEOUT": "soon"})


def test_the_two_ports_must_differ() -> None:
    with pytest.raises(ConfigError, match="must differ"):
        ServerConfig.of(port=7000, metrics_port=7000)
    assert ServerConfig.of(port=0, metrics_port=0).port == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_described_and_its_default_is_valid(name: str) -> None:
    setting = SETTINGS[name]
    assert setting.help.endswith(".") and setting.group
    assert setting.parse("none" if setting.optional else setting.default, "default") == setting.default
    assert isinstance(dataclasses.replace(ServerConfig()), ServerConfig)
