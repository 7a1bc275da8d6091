"""Mutants of the commands: options that do nothing, statuses that lie, what is left behind."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTERS = "tests/service/test_adapters.py::"
COMMANDS = "tests/service/test_commands.py::"

COMMANDING: tuple[Mutant, ...] = (
    Mutant(
        "adapter-pin-ignored",
        "adapters load --pin keeps the adapter from being evicted",
        "service/commands/adapters.py",
        "client.load(name, path, pinned=pin)",
        "client.load(name, path)",
        ADAPTERS + "test_the_commands",
    ),
    Mutant(
        "embed-dimensions-ignored",
        "embed --dimensions shortens the vectors",
        "service/commands/embed.py",
        '        asked["dimensions"] = dimensions\n',
        "        pass\n",
        "tests/service/test_embed.py::test_the_command_prints_vectors_of_a_server",
    ),
    Mutant(
        "zero-is-no-option",
        "generate --temperature 0 is greedy, not the model's default",
        "service/commands/generate.py",
        "for name, value in sampling.items() if value is not None}",
        "for name, value in sampling.items() if value}",
        COMMANDS + "test_options_that_are_zero_are_given_all_the_same",
    ),
    Mutant(
        "health-asks-the-other-question",
        "health asks for readiness, and for life with --live",
        "service/commands/health.py",
        "LIVENESS if live else READINESS",
        "READINESS if live else LIVENESS",
        "tests/service/test_health_port.py::test_the_command_says_it_with_its_exit_code",
    ),
    Mutant(
        "local-engine-keeps-running",
        "a command stops the engine that it started",
        "service/commands/local.py",
        "        await engine.stop()\n",
        "        pass\n",
        "tests/service/test_cli.py::test_generate_runs_an_engine_of_its_own",
    ),
    Mutant(
        "serve-tells-the-wanted-port",
        "the ready line has the port that was bound",
        "service/commands/serve.py",
        "{config.host}:{server.port}",
        "{config.host}:{config.port}",
        COMMANDS + "test_the_ready_line_tells_the_ports_that_were_bound",
    ),
    Mutant(
        "dead-engine-exits-with-zero",
        "serve exits with 1 when the engine failed",
        "service/commands/serve.py",
        "        os._exit(code)\n",
        "        os._exit(0)\n",
        "tests/service/test_startup.py::test_a_process_whose_engine_dies_exits_with_one",
    ),
    Mutant(
        "trace-tells-the-inverse-share",
        "trace tells how much of the scheduler's work ran beside the device's",
        "service/commands/trace.py",
        "{beside / work:.0%}",
        "{1 - beside / work:.0%}",
        COMMANDS + "test_trace_asks_for_its_seconds_and_tells_what_ran_beside_the_device[]",
    ),
)
