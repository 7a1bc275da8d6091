"""The command line: help that teaches, the same settings as the documentation, and streaming from a server."""

from __future__ import annotations

import asyncio
import json
import re
from importlib import metadata

import click
import pytest
from click.testing import CliRunner, Result

from docs import generate
from service.bench import bench
from service.cli.cli import cli
from service.cli.cli_options import setting_options
from service.cli.lazy_group import LazyGroup
from service.cli.progress import TerminalProgress
from service.client import FLEET_CONFIG, SERVICE_CONFIG
from service.config.server_config import ServerConfig
from service.config.sources import settings_of
from service.process import version
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.servers import Serve

CLIENTS = (generate.REFERENCE / "client.md").read_text()


def helped(*args: str) -> str:
    result = CliRunner().invoke(cli, [*args, "--help"], prog_name="slipstream")
    assert result.exit_code == 0, result.output
    return result.output


def test_top_level_help_shows_every_command_and_how_to_begin() -> None:
    text = helped()
    assert all(f"\n  {name} " in text for name in ("serve", "generate", "adapters", "bench", "version"))
    assert "slipstream serve --model DIR" in text and 'slipstream generate "' in text


def test_serve_help_names_every_flag_its_default_and_its_variable() -> None:
    text = re.sub(r"\s+", " ", helped("serve"))
    for setting in settings_of(ServerConfig).values():
        assert setting.flag in text and f"[env: {setting.env}]" in text
        if setting.optional:
            assert f"{setting.help} [env: {setting.env}]" in text, "not to be set is no default to show"
        elif setting.kind is not bool:
            assert f"[default: {setting.default}] [env: {setting.env}]" in text
    for group in ("Model:", "Memory:", "Network:", "Shutdown:"):
        assert group in text
    assert "Exit codes" in text


def test_the_documents_have_the_service_config_of_the_code() -> None:
    one, beside = re.findall(r"```json\n(.*?)```", CLIENTS, re.DOTALL)
    assert json.loads(one) == SERVICE_CONFIG
    assert SERVICE_CONFIG | json.loads(f"{{{beside}}}") == FLEET_CONFIG


def test_generate_help_shows_sampling_and_engine_options_only() -> None:
    text = helped("generate")
    assert "--temperature" in text and "--page-size" in text
    assert "--metrics-port" not in text and text.count("--seed") == 1


def test_bench_lists_benchmarks_without_importing_them() -> None:
    assert "overlap" in CliRunner().invoke(bench, ["--help"]).output


def test_help_names_subcommands_that_cannot_be_imported() -> None:
    group = LazyGroup(name="group", table={"broken": ("no.such.module:command", "Cannot be imported.")})
    helped = CliRunner().invoke(group, ["--help"])
    assert (helped.exit_code, "broken  Cannot be imported." in helped.output) == (0, True), helped.output
    assert CliRunner().invoke(group, ["other"]).exit_code == 2
    assert isinstance(CliRunner().invoke(group, ["broken"]).exception, ModuleNotFoundError)


def test_version() -> None:
    assert CliRunner().invoke(cli, ["version"]).output == f"{metadata.version('slipstream')}\n"


def test_a_tree_that_was_never_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "DISTRIBUTION", "slipstream-that-is-not-there")
    assert version.installed_version() == "0+source"


def test_flags_become_settings_only_when_given() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @setting_options()
    def probe(config_file: str | None, **flags: object) -> None:
        seen.update({name: value for name, value in flags.items() if value is not None}, config_file=config_file)

    result = CliRunner().invoke(probe, ["--no-overlap", "--port", "7", "--config", "x.yaml"])
    assert result.exit_code == 0, result.output
    assert seen == {"overlap": False, "port": 7, "config_file": "x.yaml"}


async def test_generate_streams_from_a_server(serve: Serve) -> None:
    async with serve() as serving:

        async def generated(*args: str) -> Result:
            asked = ["generate", "--server", serving.target, *args]
            return await asyncio.to_thread(CliRunner().invoke, cli, asked)

        result = await generated("--max-tokens", "3", "--stop", "never", "hello")
        assert (result.exit_code, result.output) == (0, "0 1 2 \n")
        sampling = serving.engine.streams[0].request.sampling
        assert (sampling.max_tokens, sampling.stop) == (3, ("never",))
        chat = await asyncio.to_thread(
            CliRunner().invoke, cli, ["generate", "--server", serving.target, "--chat", "hi"]
        )
        assert chat.exit_code == 0
        assert serving.engine.streams[1].request.chat is not None
        bad = await asyncio.to_thread(
            CliRunner().invoke, cli, ["generate", "--server", serving.target, "--top-p", "9", "x"]
        )
    assert bad.exit_code == 1
    assert "INVALID_ARGUMENT: sampling_params.top_p" in bad.output and "Traceback" not in bad.output


def test_generate_runs_an_engine_of_its_own(checkpoint: object, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeEngine] = []

    def build(config: object, progress: TerminalProgress) -> FakeEngine:
        progress("loading weights", 1.0)
        engines.append(FakeEngine())
        return engines[0]

    monkeypatch.setattr("service.engine.builder.build_core_engine", build)
    args = ["generate", "--model", str(checkpoint), "--max-tokens", "2", "--seed", "5", "hello"]
    result = CliRunner().invoke(cli, args)
    assert (result.exit_code, result.stdout) == (0, "0 1 \n")
    assert engines[0].stopped == 1
    sampling = engines[0].streams[0].request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (2, 5, 0.5)


def test_bench_overlap_prints_idle_shares_and_what_the_device_checks_cost() -> None:
    result = CliRunner().invoke(bench, ["overlap", "--requests", "4", "--steps", "10", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["overlap_on"]["wrong_tokens"] == figures["overlap_off"]["wrong_tokens"] == 0
    checks = figures["device_checks"]
    assert 0 < checks["off_us"] < checks["count_us"] and "COUNT" in result.stdout and "TRAP" in result.stdout
